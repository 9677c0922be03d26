"""``python -m paroquant_gfx1201.roofline``: what an R9700 could do with the linear layers of Qwen3.8-27B on two cards.

For each layer of one rank and each number of rows M: bytes that have to move, operations, the time that the card's
published peaks allow, an estimate from the compiled kernel's instructions, and what somebody has measured, where a
figure is published. Nothing here is measured on this machine, and every figure of ours is an estimate.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip import codeobject
from paroquant_gfx1201.kernels.hip.codeobject import KernelCode
from paroquant_gfx1201.kernels.hip.launch import OBJECTS
from paroquant_gfx1201.kernels.hip.rows import refusal as rows_refusal


@dataclass(frozen=True)
class Card:
    """Published peaks. ``operations_s`` is of dense 8-bit products, a multiplication and an addition each."""

    simds: int
    clock_hz: float
    bytes_s: float
    operations_s: float

    @property
    def wmma_clocks(self) -> float:
        """Of a SIMD for one 16 x 16 x 16 product of 8-bit values."""
        return 2 * 16**3 / (self.operations_s / self.simds / self.clock_hz)

    @property
    def bytes_a_clock(self) -> float:
        """Memory bandwidth for each SIMD."""
        return self.bytes_s / self.clock_hz / self.simds


R9700 = Card(simds=128, clock_hz=2.92e9, bytes_s=640e9, operations_s=383e12)
GROUP = 128
TURN_OUTPUTS = 32
"""Outputs that a turn of a wave's hot loop serves, over one group of k: decode for all its rows."""
PREFILL_ROWS = 64
"""Rows that a turn of the prefill kernel serves."""
BLOCK = 128
"""Rows and outputs of a prefill workgroup."""
WEIGHT_BITS = {"int4": 4 + 32 / GROUP, "int5": 5 + 32 / GROUP, "mxfp4": 4 + 8 / 32}
"""With scales: of int4 and int5 f16 and a folded zero point in f16 for each group, of MXFP4 a byte for each 32."""
DECODE_MOST_ROWS = 64


@dataclass(frozen=True)
class Layer:
    """K inputs, N outputs of one rank, rotations P of its merged projections, and how many the model has."""

    name: str
    inputs: int
    outputs: int
    rotations: int
    count: int


LAYERS = (
    Layer("qkv_proj", 5120, 7168, 3, 16),
    Layer("in_proj_qkvz", 5120, 8192, 2, 48),
    Layer("o_proj, out_proj", 3072, 5120, 1, 64),
    Layer("gate_up_proj", 5120, 17408, 2, 64),
    Layer("down_proj", 8704, 5120, 1, 64),
)
GATES = Layer("in_proj_ba (bf16)", 5120, 48, 0, 48)


@dataclass(frozen=True)
class Mode:
    """Weights int4, int5 or mxfp4; activations int8 or e4m3; activation scales by group or token."""

    weights: str
    element: str
    granularity: str

    @property
    def form(self) -> str:
        """What the kernels multiply: MXFP4 whose exponents lie close enough together to be folded."""
        return "folded" if self.weights == "mxfp4" else self.weights

    def kernel(self, rows: int) -> str:
        """The name of the GEMM's kernel for so many rows, which are in tiles where there is one."""
        if rows <= DECODE_MOST_ROWS:
            size = next(size for size in (16, 32, 64) if rows <= size)
            return f"decode_{self.form}_{self.element}_g{GROUP}_m{size}"
        return f"prefill_{self.form}_{self.element}_g{GROUP}_{self.granularity}{self.order(rows)}"

    def producer(self, rows: int) -> str:
        """The name of its producer."""
        return f"{self.granularity}_{self.element}_g{GROUP}_r8{self.order(rows)}"

    def order(self, rows: int) -> str:
        """The end of the names of kernels that have rows in tiles; empty for others."""
        tiles = rows > DECODE_MOST_ROWS and not rows_refusal(self.element, self.granularity)
        return "_tiles" if tiles else ""


PUBLISHED: dict[tuple[str, str, int], float] = {
    ("qkv_proj", "int4 e4m3 token", 2048): 1019 * 0.83,
    ("in_proj_qkvz", "int4 e4m3 token", 2048): 1172 * 0.84,
    ("o_proj, out_proj", "int4 e4m3 token", 2048): 450 * 0.79,
    ("gate_up_proj", "int4 e4m3 token", 2048): 2458 * 0.85,
    ("down_proj", "int4 e4m3 token", 2048): 1239 * 0.83,
    ("gate_up_proj", "int4 e4m3 group", 8): 60.0,
    ("qkv_proj", "mxfp4 e4m3 token", 8): 28.6,
    ("in_proj_qkvz", "mxfp4 e4m3 token", 8): 30.0,
    ("gate_up_proj", "mxfp4 e4m3 token", 8): 59.0,
    ("qkv_proj", "int5 int8 group", 2048): 891.0,
    ("o_proj, out_proj", "int5 int8 group", 2048): 381.0,
    ("qkv_proj", "int5 e4m3 token", 2048): 810.0,
}
"""(layer, mode, M) -> microseconds on an R9700 by the published engineering log of another implementation (2026-08-31
to 2026-09-12), of its best kernel for the shape. At M = 8 it timed one weight again and again, so that part of it came
from the 64 MB cache: such a time can be below what memory alone allows."""
PUBLISHED_PRODUCERS: dict[tuple[str, int], float] = {("qkv_proj", 2048): 254.0, ("down_proj", 2048): 149.0}
"""(layer, M) -> microseconds, per group, int8 and e4m3 alike; the same log."""


@dataclass(frozen=True)
class Estimate:
    """Of one launch. ``instructions_s`` is None where the kernel's instructions are not known."""

    bytes: float
    operations: float
    memory_s: float
    matrix_s: float
    instructions_s: float | None

    @property
    def bound_s(self) -> float:
        """What the card's peaks allow."""
        return max(self.memory_s, self.matrix_s)

    @property
    def static_s(self) -> float | None:
        """The later of memory and instructions, where each vector instruction takes a clock and nothing overlaps."""
        return None if self.instructions_s is None else max(self.memory_s, self.instructions_s)


def gemm(layer: Layer, mode: Mode, rows: int, kernel: KernelCode | None, card: Card = R9700) -> Estimate:
    """The product of one layer: weights, codes, scales and row sums are read once, y bf16 [M, N] is written."""
    groups = layer.inputs // GROUP
    weights = layer.inputs * layer.outputs * WEIGHT_BITS[mode.weights] / 8
    scales = 4 * rows * (groups if mode.granularity == "group" or rows <= DECODE_MOST_ROWS else 1)
    activations = layer.rotations * (rows * layer.inputs + scales + 4 * rows * groups)
    moved = weights + activations + 2 * rows * layer.outputs
    operations = 2.0 * rows * layer.inputs * layer.outputs
    instructions_s = None
    if kernel is not None:
        turns = layer.outputs / TURN_OUTPUTS * groups
        if rows > DECODE_MOST_ROWS:
            turns *= -(-rows // BLOCK) * BLOCK / PREFILL_ROWS
        clocks = kernel.valu + card.wmma_clocks * kernel.count("v_wmma")
        instructions_s = turns * clocks / card.simds / card.clock_hz
    return Estimate(moved, operations, moved / card.bytes_s, operations / card.operations_s, instructions_s)


def producer(layer: Layer, mode: Mode, rows: int, kernel: KernelCode | None, card: Card = R9700) -> Estimate:
    """Rotation and encoding of the layer's inputs: x bf16 [M, K] is read once; codes, scales and row sums written.

    Operations are not counted: a rotation has none for the matrix unit.
    """
    groups = layer.inputs // GROUP
    scales = 4 * rows * (groups if mode.granularity == "group" else 1)
    moved = 2 * rows * layer.inputs + layer.rotations * (rows * layer.inputs + scales + 4 * rows * groups)
    instructions_s = None
    if kernel is not None and mode.granularity == "group":  # the loop is one group of one row
        turns = layer.rotations * rows * groups
        instructions_s = turns * (kernel.valu + kernel.count("ds_")) / card.simds / card.clock_hz
    return Estimate(moved, 0.0, moved / card.bytes_s, 0.0, instructions_s)


def kernels() -> dict[str, KernelCode]:
    """The wheel's code objects read back, or the sources compiled; empty where clang 19's tools are not installed."""
    if codeobject.missing(19):
        return {}
    found: dict[str, KernelCode] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for source in ("decode", "prefill", "producer"):
            built = OBJECTS / f"{source}.co"
            if not built.is_file():
                built = Path(scratch) / built.name
                codeobject.compile_source(f"{source}.hip", built)
            found |= codeobject.inspect(built)
    return found


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.4g}"


def _row(name: str, rows: int, estimate: Estimate, published_us: float | None) -> str:
    by = "memory" if estimate.memory_s >= estimate.matrix_s else "matrix"
    part = "" if published_us is None else f"{1e6 * estimate.bound_s / published_us:.0%}"
    figures = [
        f"{estimate.bytes / 1e6:.4g}",
        f"{estimate.operations / 1e9:.4g}" if estimate.operations else "-",
        f"{_us(estimate.bound_s)} {by}",
        _us(estimate.instructions_s),
        _us(estimate.static_s),
        "-" if published_us is None else f"{published_us:.4g} ({part})",
    ]
    return f"| {name} | {rows} | {' | '.join(figures)} |"


def lines(mode: Mode, rows: Sequence[int], found: dict[str, KernelCode]) -> Iterator[str]:
    """The page, as Markdown."""
    yield "ESTIMATES for one of two R9700, from published peaks: 640 GB/s, 383 TOPS, 128 SIMDs at 2.92 GHz. Nothing was"
    yield f"measured. Qwen3.8-27B: weights {mode.weights} ({WEIGHT_BITS[mode.weights]:.4g} bits), rows {mode.element} "
    yield f'per {mode.granularity}, groups of {GROUP}. "published": measured by others, with their kernels.'
    if reason := codeobject.missing(19):
        yield f"No estimate from instructions: {reason}"
    head = "| MB | GOP | bound, us | instructions, us | estimate, us | published, us (bound / published) |"
    yield ""
    yield f"| GEMM of | M {head}"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for layer in LAYERS:
        for count in rows:
            published = PUBLISHED.get((layer.name, f"{mode.weights} {mode.element} {mode.granularity}", count))
            yield _row(layer.name, count, gemm(layer, mode, count, found.get(mode.kernel(count))), published)
    yield ""
    yield f"| producer of | M {head}"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for layer in LAYERS:
        for count in rows:
            kernel = found.get(mode.producer(count))
            published = PUBLISHED_PRODUCERS.get((layer.name, count)) if mode.granularity == "group" else None
            yield _row(layer.name, count, producer(layer, mode, count, kernel), published)
    yield ""
    yield "| all linear layers of a step, ms | M | bound | estimate |"
    yield "|---|--:|--:|--:|"
    for count in rows:
        pairs = [(layer, gemm(layer, mode, count, found.get(mode.kernel(count)))) for layer in LAYERS]
        bound_s = sum(layer.count * estimate.bound_s for layer, estimate in pairs)
        static = [layer.count * estimate.static_s for layer, estimate in pairs if estimate.static_s is not None]
        estimate = f"{1e3 * sum(static):.4g}" if len(static) == len(pairs) else "-"
        yield f"| GEMMs | {count} | {1e3 * bound_s:.4g} | {estimate} |"
    moved = GATES.count * 2 * GATES.inputs * GATES.outputs
    yield ""
    yield f"{GATES.count} {GATES.name} read {moved / 1e6:.4g} MB more, {1e3 * moved / R9700.bytes_s:.2g} ms by memory;"
    yield "published: 6.5 us each by a kernel of their own, 29 us by the BLAS library."


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paroquant_gfx1201.roofline",
        description="What an R9700 could do with the linear layers of Qwen3.8-27B, tensor parallel 2: an estimate.",
    )
    parser.add_argument("--weights", choices=tuple(WEIGHT_BITS), default="int5")
    parser.add_argument("--activations", choices=("int8", "e4m3"), default="int8")
    parser.add_argument("--scales", choices=("group", "token"), default="group")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 64, 512, 2048, 8192), metavar="M")
    given = parser.parse_args(arguments)
    try:
        if min(given.rows) < 1:
            raise PluginError("--rows: every M must be 1 or more")
        if given.weights == "mxfp4" and given.activations == "int8":
            raise PluginError("--weights mxfp4 are e4m3 values: add --activations e4m3")
        for line in lines(Mode(given.weights, given.activations, given.scales), given.rows, kernels()):
            print(line)
    except PluginError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
