"""The Triton kernels on an NVIDIA card: correctness first, then times. Written for an H200.

    python -m benchmarks.kernels_h200 RESULT.json

Needs torch for CUDA, Triton, and gemlite (pure Python) for the comparison. Correctness: codes, scales and row sums of
the producers bit for bit against the reference on the CPU, GEMMs against float64 of the same codes. A failed check ends
the run before anything is timed. The checks are spread over processes, as most of their time is Triton's compiler.
Times: CUDA events around one call, a 512 MiB write between calls so that the L2 is cold, median and quartiles of
REPEATS calls. What the L2 holds is then written lines, which the call pays for writing back: ``clean_us`` is the median
after a read of the same size. bf16 torch.matmul and a device-to-device copy are measured in the same run. No time is
corrected for the launch: ``launch_us`` is what an almost empty kernel takes by the same method.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from benchmarks.kernel_checks import (
    APART,
    CUDA,
    check_gemms,
    check_producers,
    check_real_rotation,
    random_rows,
    random_weight,
    relative,
)
from paroquant_gfx1201.kernels.triton import decode, prefill, producer, weights
from paroquant_gfx1201.kernels.triton.linear import multiply

INPUTS, OUTPUTS, GROUP = 5120, 17408, 128
REPEATS = 50
FLUSH_BYTES = 1 << 29
PEERS = {"A16W4": "A16W4_HQQ_INT", "A8W4": "A8W4_HQQ_INT_dynamic"}
PEER_ROWS = (1, 8, 64, 2048)
PROCESSES = 16
MODES = list(itertools.product(("int8", "e4m3"), ("group", "token")))
# The plugin has int8 rows for codes that are integers alone.
WEIGHTS = [*weights.MIDPOINTS, APART]
FORMS = [
    (form, mode) for form, mode in itertools.product(WEIGHTS, MODES) if form in ("int4", "int5") or mode[0] == "e4m3"
]
PRODUCER_SHAPES = [(128, 128), (576, 64), (5120, 128), (8704, 128), (17408, 128)]
GEMM_SHAPES = [(576, 64, 224), (640, 128, 48), (5120, 128, 17408)]


def prepare_check() -> None:
    """In each process. Outputs start as NaN, so that an element nobody wrote is an error above every bound."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def check() -> dict[str, object]:
    """All checks, and the peer's kernels compiled beside them. Raises the first AssertionError."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES, prepare_check) as pool:
        cases = [(shape, *form) for shape, form in itertools.product(GEMM_SHAPES, FORMS)]
        gemms = pool.map_async(check_gemms, cases, 1)
        peers = pool.map_async(call_peer, list(itertools.product(PEERS, PEER_ROWS)), 1)
        producers = pool.map(check_producers, list(itertools.product(PRODUCER_SHAPES, (1, 2, 3))), 1)
        worst: dict[str, float] = {}
        for path, error in (item for found in gemms.get() for item in found.items()):
            worst[path] = max(worst.get(path, 0.0), error)
        peers.get()
    total = {key: sum(found[key] for found in producers) for key in ("launches", "codes")}
    return {"producers": total, "real_rotation": check_real_rotation(), "gemms": worst}


def timed(call: Callable[[], object], flush: torch.Tensor, clean: bool = False) -> dict[str, float]:
    """Median and quartiles in microseconds; where ``clean``, after a read in place of a write."""
    for _ in range(3):
        call()
    pairs = []
    for _ in range(REPEATS):
        if clean:
            flush.view(torch.int64).max()
        else:
            flush.zero_()
        # The host, which may take longer for a call than the device, is a millisecond ahead.
        torch.cuda._sleep(2_000_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) * 1e3 for start, end in pairs], dtype=torch.float64)
    low, median, high = times.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"us": median, "q1_us": low, "q3_us": high}


def timed_both(call: Callable[[], object], flush: torch.Tensor) -> dict[str, float]:
    """``timed``, and ``clean_us``."""
    return timed(call, flush) | {"clean_us": timed(call, flush, clean=True)["us"]}


def measure() -> dict[str, object]:
    """Every time of the report. bytes: each input read once and each output written once."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=CUDA)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA).random_()
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), flush)
    copy["tb_per_s"] = 2 * source.numel() / copy["us"] / 1e6
    one = torch.empty(1, device=CUDA)
    report: dict[str, object] = {"copy": copy, "launch_us": timed(one.zero_, flush)["us"]}
    cells = []
    dense = torch.randn(OUTPUTS, INPUTS, device=CUDA).bfloat16()
    peer = {}
    for count in (1, 8, 64, 2048):
        x = torch.randn(count, INPUTS, device=CUDA).bfloat16()
        peer[count] = timed_both(lambda x=x: x @ dense.T, flush)
        cells.append({"kernel": "torch.matmul bf16", "M": count, **peer[count]})
    for form in WEIGHTS:
        packed, _ = random_weight(INPUTS, GROUP, OUTPUTS, form)
        modes = [mode for kind, mode in FORMS if kind == form]
        for element, count in itertools.product(dict(modes), (1, 8, 64)):
            rows = random_rows(count, INPUTS, GROUP, element, "group")
            time = timed_both(lambda rows=rows, packed=packed: decode.decode(rows, packed), flush)
            moved = packed.nbytes + rows.codes.nbytes + rows.scales.nbytes + rows.row_sums.nbytes + 2 * count * OUTPUTS
            cells.append(cell(f"decode {form} x {element}", count, time, moved, copy, peer[count]))
        for element, granularity in modes:
            rows = random_rows(2048, INPUTS, GROUP, element, granularity)
            time = timed(lambda rows=rows, packed=packed: prefill.prefill(rows, packed), flush)
            name = f"prefill {form} x {element} per {granularity}"
            cells.append(cell(name, 2048, time, None, copy, peer[2048]))
    for rotations in (1, 3):
        matrices = torch.linalg.qr(torch.randn(rotations, INPUTS // GROUP, GROUP, GROUP, device=CUDA))[0]
        terms = producer.split_rotation(matrices)
        for (element, granularity), count in itertools.product(MODES, (1, 64, 2048, 16384)):
            x = torch.randn(count, INPUTS, device=CUDA).bfloat16()
            made = producer.quantize_rows(x, terms, element, granularity)
            moved = x.nbytes + terms.nbytes + made.codes.nbytes + made.scales.nbytes + made.row_sums.nbytes
            time = timed(
                lambda x=x, terms=terms, e=element, g=granularity: producer.quantize_rows(x, terms, e, g), flush
            )
            name = f"producer {element} per {granularity}, P={rotations}"
            cells.append(cell(name, count, time, moved, copy, None))
    report["cells"] = cells
    return report


def peer_layer(name: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], weights.PackedWeight, torch.Tensor]:
    """gemlite's layer of int4 weights, the same weights packed for our kernels, and in f32 [K, N]."""
    from gemlite import helper

    codes = torch.randint(0, 16, (INPUTS, OUTPUTS), dtype=torch.uint8, device=CUDA)
    zeros = torch.randint(0, 16, (INPUTS // GROUP, OUTPUTS), dtype=torch.uint8, device=CUDA)
    # Seven bits and a power of two: bf16 and f16 hold them alike.
    scales = (torch.randint(64, 128, zeros.shape, device=CUDA) * 2.0**-13).half()
    layer = getattr(helper, PEERS[name])(device="cuda:0", dtype=torch.bfloat16).from_weights(
        codes.T.contiguous(), scales.T.reshape(-1, 1).bfloat16(), zeros.T.reshape(-1, 1).bfloat16()
    )
    exact = (codes.float() - zeros.float().repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    return layer, weights.pack_codes(codes, zeros, scales, 4), exact


def call_peer(case: tuple[str, int]) -> None:
    """gemlite tunes itself at the first call of a shape; this leaves what it compiles in Triton's cache."""
    name, count = case
    layer, _, _ = peer_layer(name)
    layer(torch.randn(count, INPUTS, device=CUDA).bfloat16())
    torch.cuda.synchronize()


def measure_peer() -> list[dict[str, object]]:
    """gemlite on the same int4 weights, beside ours, from bf16 rows to bf16 outputs.

    gemlite multiplies bf16 rows, or quantizes them to e4m3 per token, and does not rotate; ours rotates and quantizes,
    for up to 64 rows with a scale per group.
    """
    import gemlite

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=CUDA)
    terms = producer.split_rotation(torch.linalg.qr(torch.randn(1, INPUTS // GROUP, GROUP, GROUP, device=CUDA))[0])
    report = []
    layers = {name: peer_layer(name) for name in PEERS}
    for name, count in itertools.product(PEERS, PEER_ROWS):
        layer, packed, exact = layers[name]
        x = torch.randn(count, INPUTS, device=CUDA).bfloat16()
        error = relative(layer(x), (x.float() @ exact).double())
        row: dict[str, object] = {"peer": f"gemlite {gemlite.__version__} {name}", "M": count, "relative_error": error}
        assert error < 0.05, f"gemlite is used wrongly: {row}"
        row["peer_us"] = timed(lambda layer=layer, x=x: layer(x), flush)["us"]
        granularity = "group" if count <= decode.MAX_ROWS else "token"
        for element in ("int8", "e4m3"):
            row[f"ours_{element}_us"] = timed(
                lambda x=x, e=element, g=granularity, packed=packed: multiply(
                    producer.quantize_rows(x, terms, e, g).of(0), packed, torch.bfloat16
                ),
                flush,
            )["us"]
        report.append(row)
    return report


def cell(
    kernel: str,
    count: int,
    time: dict[str, float],
    moved: int | None,
    copy: dict[str, float],
    peer: dict[str, float] | None,
) -> dict[str, object]:
    """One row: its time, its share of the copy's bandwidth, and the bf16 matmul's time over its own."""
    row: dict[str, object] = {"kernel": kernel, "M": count, **time}
    if moved is not None:
        row |= {"bytes": moved, "of_copy": moved / time["us"] / 1e6 / copy["tb_per_s"]}
    if peer is not None:
        row["over_bf16"] = peer["us"] / time["us"]
        if "clean_us" in time:
            row["clean_over_bf16"] = peer["clean_us"] / time["clean_us"]
    return row


def main(path: Path) -> None:
    torch.manual_seed(0)
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
    print(machine, flush=True)
    checks = check()
    print(json.dumps(checks, indent=1), flush=True)
    report = {"machine": machine, "checks": checks, **measure(), "peer": measure_peer()}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"copy {report['copy']}, launch {report['launch_us']:.1f} us")
    for row in report["cells"]:
        of_copy = f"{row['of_copy']:.1%}" if "of_copy" in row else ""
        ratio = f"{row['over_bf16']:.2f}" if "over_bf16" in row else ""
        spread = f"{row['us']:.1f} ({row['q1_us']:.1f} to {row['q3_us']:.1f})"
        clean = f"{row['clean_us']:.1f}" if "clean_us" in row else ""
        clean_ratio = f"{row['clean_over_bf16']:.2f}" if "clean_over_bf16" in row else ""
        print(f"| {row['kernel']} | {row['M']} | {spread} | {of_copy} | {ratio} | {clean} | {clean_ratio} |")
    for row in report["peer"]:
        print(row)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: kernels_h200.py RESULT.json")
    if not torch.cuda.is_available():
        sys.exit("kernels_h200.py: no CUDA device, and the interpreter's times would mean nothing")
    main(Path(sys.argv[1]))
