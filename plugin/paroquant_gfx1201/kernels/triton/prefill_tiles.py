"""How the prefill kernel cuts its work, by device and by what it multiplies."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillTiles:
    """Rows and outputs of a tile, warps, depth of the load pipeline, and the registers a thread may have (CUDA)."""

    rows: int
    outputs: int
    warps: int
    stages: int
    registers: int | None = None


def tiles_for(expanded: torch.dtype) -> PrefillTiles:
    """The fastest on an H200 (docs/benchmarks.md); on AMD, HIP_TILES."""
    if torch.version.hip is not None:
        return HIP_TILES
    if expanded == torch.bfloat16:
        return PrefillTiles(128, 128, 8, 3)
    # With 168 registers three programs fit a multiprocessor.
    return PrefillTiles(128, 64, 4, 3, 168)


HIP_TILES = PrefillTiles(64, 64, 16, 1)
"""Spill nothing on gfx1201 with Triton 3.6 and 3.9; with 8 warps, 3.6 spills. Not timed: no such card was at hand."""
