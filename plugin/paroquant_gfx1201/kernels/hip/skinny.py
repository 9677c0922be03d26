"""Skinny GEMM: few rows by a bf16 weight of few outputs, as the gate projections of GatedDeltaNet."""

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.decode import ROWS, counters
from paroquant_gfx1201.kernels.hip.launch import WAVE, InOut, Launch, Out
from paroquant_gfx1201.kernels.hip.producer import COMPUTE_UNITS

SOURCE = "skinny.hip"
WAVES = 4
STEP = 32
"""k of a wave's turn: two matrix instructions."""
TILE = 16
MOST_OUTPUTS = 1280
"""Wider weights have enough tiles to fill a GPU without splitting K, and a library that does better."""


def shares_for(outputs: int, inputs: int) -> int:
    """Workgroups that share the k of a tile of outputs: about two for each compute unit, a step for each wave."""
    tiles = -(-outputs // TILE)
    return max(1, min(2 * COMPUTE_UNITS // tiles, inputs // (STEP * WAVES)))


def refusal(outputs: int, inputs: int, dtype: torch.dtype) -> str:
    """Why it does not multiply by a weight [N, K] of ``dtype``; empty where it does."""
    if dtype != torch.bfloat16:
        return f"the skinny GEMM multiplies bfloat16, not {str(dtype)[6:]}"
    if inputs % STEP:
        return f"the skinny GEMM takes K in multiples of {STEP}, not K={inputs}"
    if outputs % 8 or outputs > MOST_OUTPUTS:
        return f"the skinny GEMM takes up to {MOST_OUTPUTS} outputs in multiples of 8, not N={outputs}"
    return ""


def skinny(x: torch.Tensor, weight: torch.Tensor, shares: int | None = None) -> Launch:
    """The launch for x bf16 [M, K] and weight bf16 [N, K], M up to 64, N a multiple of 8 and K of 32.

    Writes y bf16 [M, N]; then, where K is split, f32 [shares, M, N] of partial sums and the arrival counters, which are
    zero before and after. Raises PluginError for another dtype or shape.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    if weight.shape[1] != inputs or x.dtype != weight.dtype:
        raise PluginError(f"the weight is {weight.dtype} of K={weight.shape[1]}, the rows are {x.dtype} of K={inputs}")
    if reason := refusal(outputs, inputs, weight.dtype):
        raise PluginError(reason)
    if not 0 < rows <= ROWS[-1]:
        raise PluginError(f"the skinny GEMM takes 1 to {ROWS[-1]} rows, not {rows}")
    shares = shares or shares_for(outputs, inputs)
    tiles = -(-outputs // TILE)
    size = next(size for size in ROWS if rows <= size)
    return Launch(
        SOURCE,
        f"skinny_bf16_m{size}",
        (tiles, shares),
        WAVES * WAVE,
        (
            x,
            weight,
            Out((rows, outputs), torch.bfloat16),
            Out((shares if shares > 1 else 0, rows, outputs), torch.float32),
            InOut(counters(x.device, tiles)),
            *(rows, outputs, inputs, shares),
        ),
    )
