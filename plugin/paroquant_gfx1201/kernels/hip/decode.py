"""Decode GEMM: few rows, so that the time is the time to read the weights once."""

from functools import cache

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.launch import WAVE, InOut, Launch, Out
from paroquant_gfx1201.kernels.hip.producer import COMPUTE_UNITS
from paroquant_gfx1201.kernels.hip.rows import sizes
from paroquant_gfx1201.kernels.hip.weights import TILE, FragmentWeight

SOURCE = "decode.hip"
WAVES = 4
ROWS = (16, 32, 64)
"""Rows that a kernel has registers for."""
WORKGROUPS = 4 * COMPUTE_UNITS
"""Enough of them to keep the memory busy; fewer tiles of outputs are split along K."""
NEVER = 1 << 30
"""An output that no rotation starts at."""


def shares_for(weight: FragmentWeight) -> int:
    """Workgroups that share the groups of one tile of outputs, each with at least two groups for each wave."""
    tiles, groups = weight.outputs // TILE, weight.inputs // weight.group_size
    return max(1, min(WORKGROUPS // tiles, groups // (2 * WAVES)))


@cache
def counters(device: torch.device, tiles: int) -> torch.Tensor:
    """Zeroed once; every launch leaves zeros. One stream at a time may use it."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def rotation_starts(weight: FragmentWeight) -> list[int]:
    """First outputs of the second and the third rotation."""
    return [*weight.starts[1:], NEVER, NEVER][:2]


def check_rows(
    codes: torch.Tensor, scales: torch.Tensor, weight: FragmentWeight, element: str, granularity: str
) -> None:
    """Raise PluginError unless the producer's codes, in either order of ``rows``, and scales fit the weight."""
    rotations, rows, inputs = sizes(codes, scales.shape[2])
    per_row = inputs // weight.group_size if granularity == "group" else 1
    if inputs != weight.inputs or rotations != len(weight.widths) or scales.shape != (rotations, per_row, rows):
        raise PluginError(
            f"the weight has K={weight.inputs} and {len(weight.widths)} rotations, the rows have K={inputs}, "
            f"{rotations} rotations and scales of shape {list(scales.shape)}"
        )
    if weight.format in ("mxfp4", "folded", "lloyd") and element != "e4m3":
        raise PluginError(f"{weight.format} weights are e4m3 values: the rows must be e4m3 too")


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_sums: torch.Tensor,
    weight: FragmentWeight,
    element: str,
    shares: int | None = None,
) -> Launch:
    """The launch for codes uint8 [P, M, K], scales and row_sums f32 [P, G, M], as the producer leaves them.

    P is the number of projections in ``weight``, whose outputs each take their own rotation's rows. Writes y bf16
    [M, N]; then, where K is split, f32 [shares, M, N] of partial sums and int32 [N / 32] arrival counters, which are
    zero before and after. Raises PluginError for more than 64 rows, another K or P, or int8 rows of e4m3 weights.
    """
    _, rows, inputs = codes.shape
    outputs = weight.outputs
    if not 0 < rows <= ROWS[-1]:
        raise PluginError(f"the decode GEMM takes 1 to {ROWS[-1]} rows, not {rows}")
    check_rows(codes, scales, weight, element, "group")
    shares = shares or shares_for(weight)
    size = next(size for size in ROWS if rows <= size)
    return Launch(
        SOURCE,
        f"decode_{weight.format}_{element}_g{weight.group_size}_m{size}",
        (outputs // TILE, shares),
        WAVES * WAVE,
        (
            codes,
            scales,
            row_sums,
            weight.codes,
            weight.levels if weight.format == "lloyd" else weight.plane,
            weight.steps,
            Out((rows, outputs), torch.bfloat16),
            Out((shares if shares > 1 else 0, rows, outputs), torch.float32),
            InOut(counters(codes.device, outputs // TILE)),
            *(rows, outputs, inputs, *rotation_starts(weight), shares),
        ),
    )
