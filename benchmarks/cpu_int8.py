"""Processor time of the CPU path in all linear layers of the demo model, compiled against the reference in torch.

    python benchmarks/cpu_int8.py [ROWS ...]

One thread, random operands, int8 per group with the zero-point epilogue; each projection has its own rotation. Medians
of processor time over repeats, of one layer, times the model's 30 layers.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.modes import Band

LAYERS, SIZE, REPEATS = 30, 64, 9
SHAPES = {"qkv": (576, (576, 192, 192)), "o": (576, (576,)), "gate_up": (576, (1536, 1536)), "down": (1536, (576,))}
BAND = Band("int8", "group", "epilogue")


def milliseconds(job: Callable[[], object]) -> float:
    job()
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        job()
        taken.append(1e3 * (time.process_time() - began))
    return statistics.median(taken)


def layer(rows: int) -> dict[str, float]:
    """Milliseconds of one layer's linears by what is timed."""
    total = dict.fromkeys(("compiled: codes", "compiled: product", "torch: codes", "torch: f32 product"), 0.0)
    for inputs, parts in SHAPES.values():
        groups = inputs // SIZE
        x = torch.randn(rows, inputs).bfloat16()
        matrices = torch.linalg.qr(torch.randn(len(parts), groups, SIZE, SIZE)).Q.contiguous()
        codes = [torch.randint(-16, 16, (groups, SIZE, part), dtype=torch.int8) for part in parts]
        scales = [torch.rand(groups, part) + 0.01 for part in parts]
        weights = [
            torch.cat([(c * s.unsqueeze(1)).flatten(0, 1), torch.randn(groups, c.shape[2])])
            for c, s in zip(codes, scales, strict=True)
        ]
        packed = [cpu.pack(c) for c in codes]
        packed_scales = [cpu.pack_scales(s, w[inputs:]) for s, w in zip(scales, weights, strict=True)]
        y = torch.empty(rows, sum(parts), dtype=torch.bfloat16)
        outs = y.split(parts, 1)
        ours = cpu.produce(x, matrices, BAND)
        theirs = reference.quantize_activations(rotation.rotate_groups(x.float(), matrices), BAND)

        def multiply(ours=ours, packed=packed, packed_scales=packed_scales, outs=outs) -> None:
            for n, out in enumerate(outs):
                cpu.multiply(ours.of(n), packed[n], packed_scales[n], BAND, out)

        def peer(x=x, matrices=matrices) -> None:
            reference.quantize_activations(rotation.rotate_groups(x.float(), matrices), BAND)

        def peer_product(theirs=theirs, weights=weights, outs=outs) -> None:
            for n, out in enumerate(outs):
                out.copy_(reference.multiply(theirs.of(n), weights[n], BAND))

        jobs = (lambda x=x, m=matrices: cpu.produce(x, m, BAND), multiply, peer, peer_product)
        for name, job in zip(total, jobs, strict=True):
            total[name] += milliseconds(job)
    return total


def main(every: list[int]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for rows in every:
        print(f"{rows} rows, ms of 30 layers: ", end="")
        print(", ".join(f"{name} {LAYERS * took:.1f}" for name, took in layer(rows).items()))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 8, 64, 512, 1024])
