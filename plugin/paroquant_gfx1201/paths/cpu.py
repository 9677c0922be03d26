"""The paths on a CPU: the reference in torch, and the same with int8 codes and products by ``kernels.cpu``."""

from dataclasses import dataclass

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.modes import Band, Order, ZeroPoint
from paroquant_gfx1201.paths.path import Prepared, Product
from paroquant_gfx1201.paths.weights import Weights
from paroquant_gfx1201.reference import PreparedWeight

INTEGER_MIN_M = 16
"""Rows from which torch's int32 dots per group beat one f32 product on a CPU (measured on Zen 5)."""


def _outputs(rows: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y [M, N], bf16 for bf16 rows and f32 for others, and its columns for each projection."""
    dtype = rows.dtype if rows.dtype == torch.bfloat16 else torch.float32
    y = torch.empty(len(rows), sum(widths), dtype=dtype)
    return y, list(y.split(widths, 1))


@dataclass(frozen=True)
class CpuReference:
    """What the kernels compute, in torch: any format and mode."""

    name: str = "cpu_reference"

    def refusal(self, weights: Weights, band: Band) -> str:
        """Every layer on a CPU is taken."""
        return "" if weights.device.type == "cpu" else f"it runs on a CPU, not on {weights.device}"

    def form(self, weights: Weights) -> str:
        """The format."""
        return weights.kind

    def zero_point(self, band: Band) -> ZeroPoint:
        """The band's own."""
        return band.zero_point

    def order(self, band: Band) -> Order:
        """Row after row: it has no other."""
        return "rows"

    def prepare(self, weights: Weights, epilogue: bool) -> Prepared:
        """Weights in f32, and as integers where they are."""
        parts = [reference.prepare(projection) for projection in weights.projections]
        rotations = torch.stack([part.rotation for part in parts])
        return lambda rows, band: _multiply(rows, band, rotations, parts)


def _multiply(rows: torch.Tensor, band: Band, rotations: torch.Tensor, parts: list[PreparedWeight]) -> Product:
    inputs, integer = rows.shape[1], band.element == "int8" and len(rows) >= INTEGER_MIN_M
    activations = reference.quantize_activations(rotation.rotate_groups(rows.float(), rotations), band)
    y, columns = _outputs(rows, [part.weight.shape[1] for part in parts])
    each = [activations.of(index) for index in range(len(parts))]
    for part, quantized, out in zip(parts, each, columns, strict=True):
        if integer:
            out.copy_(reference.multiply_int8(quantized, part.codes, part.scales, part.weight[inputs:], band))
        else:
            out.copy_(reference.multiply(quantized, part.weight, band))
    return Product(y, "int32" if integer else "f32", lambda: each)


@dataclass(frozen=True)
class CpuInt8:
    """int8 rows and integer codes, compiled for this machine's own int8 instructions."""

    name: str = "cpu_int8"

    def refusal(self, weights: Weights, band: Band) -> str:
        """For another device or element, codes that are no integers, vectors not filled, or no compiler."""
        spec = weights.spec
        if weights.device.type != "cpu":
            return f"it runs on a CPU, not on {weights.device}"
        if band.element != "int8":
            return f"it multiplies int8 rows, not {band.element}"
        if weights.kind not in ("int4", "int5"):
            return f"it multiplies integer codes, not {weights.kind}"
        if wrong := next((width for width in weights.widths if not cpu.fits(spec.group_size, width)), None):
            return f"groups of {spec.group_size} and N={wrong} do not fill vectors of {cpu.LANES}"
        return cpu.reason_against()

    def form(self, weights: Weights) -> str:
        """The format."""
        return weights.kind

    def zero_point(self, band: Band) -> ZeroPoint:
        """The band's own."""
        return band.zero_point

    def order(self, band: Band) -> Order:
        """Row after row: it has no other."""
        return "rows"

    def prepare(self, weights: Weights, epilogue: bool) -> Prepared:
        """Codes and scales in the order of the vectors; the f32 weights are not kept."""
        parts = [reference.prepare(projection) for projection in weights.projections]
        rotations = torch.stack([part.rotation for part in parts]).transpose(-1, -2).contiguous()
        codes = [cpu.pack(part.codes) for part in parts]
        scales = [cpu.pack_scales(part.scales, part.weight[-len(part.scales) :]) for part in parts]
        widths = weights.widths

        def multiply(rows: torch.Tensor, band: Band) -> Product:
            activations = cpu.produce(rows, rotations, band)
            y, columns = _outputs(rows, widths)
            each = [activations.of(index) for index in range(len(widths))]
            for quantized, packed, steps, out in zip(each, codes, scales, columns, strict=True):
                cpu.multiply(quantized, packed, steps, band, out)
            return Product(y, "int32", lambda: each)

        return multiply
