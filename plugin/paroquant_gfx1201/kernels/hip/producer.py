"""Activation producers: rotate, scale channels, find the peak, encode and sum codes, in one launch."""

from typing import Literal

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip import rows as orders
from paroquant_gfx1201.kernels.hip.launch import WAVE, Launch, Out

SOURCE = "producer.hip"
GROUP_WAVES = 8
MOST_TOKEN_INPUTS = 191 * 128
"""A row waits in LDS as bf16, beside 16 KB for the waves; a workgroup has 64 KB."""
COMPUTE_UNITS = 64
"""Of an R9700; a launch is spread over about four workgroups for each."""


def token_waves(rows: int, inputs: int) -> int:
    """Waves that share a row: few rows need many, as each wave's rotations follow one another.

    Source: the published measurements of such a kernel on an R9700 (32 up to 16 rows, 16 up to 64, else 8, and 16 for
    K >= 8192).
    """
    if rows <= 16:
        return 32
    return 16 if rows <= 64 or inputs >= 8192 else 8


def shares_of_rows(rows: int, waves: int, tables: int) -> int:
    """Workgroups that share the rows of one rotation: a wave loads it once and then takes many rows."""
    return max(1, min(-(-rows // waves), 4 * COMPUTE_UNITS // tables))


def quantize_rows(
    x: torch.Tensor,
    table: torch.Tensor,
    element: Literal["int8", "e4m3"],
    granularity: Literal["group", "token"],
    group_size: int,
    krot: int,
    tiles: bool = False,
) -> Launch:
    """The launch for x bf16 [M, K] and table int32 [P, G, words, 32] of ``layout.build``.

    Writes codes uint8 [P, M, K], or the ``tiles`` of ``rows`` that hold them; scales f32 [P, G, M] per group or
    [P, 1, M] per token; and row_sums f32 [P, G, M]: the sum of a group's codes. x must be finite, and stay so when
    rotated. Raises PluginError for another dtype or K, and for tiles that ``rows.refusal`` names.
    """
    rotations, groups = table.shape[:2]
    rows, inputs = x.shape
    if x.dtype != torch.bfloat16 or inputs != groups * group_size:
        raise PluginError(f"the producer takes bfloat16 rows of K={groups * group_size}, not {x.dtype} of K={inputs}")
    per_row = groups if granularity == "group" else 1
    kernel = f"{granularity}_{element}_g{group_size}_r{krot}{'_tiles' if tiles else ''}"
    if tiles and (reason := orders.refusal(element, granularity)):
        raise PluginError(reason)
    shape = orders.shape_of_tiles(rotations, rows, inputs) if tiles else (rotations, rows, inputs)
    buffers = (
        x,
        table,
        Out(shape, torch.uint8),
        Out((rotations, per_row, rows), torch.float32),
        Out((rotations, groups, rows), torch.float32),
    )
    if granularity == "token":
        if inputs > MOST_TOKEN_INPUTS:
            raise PluginError(f"a row of K={inputs} does not fit LDS: per token the producer takes {MOST_TOKEN_INPUTS}")
        waves = min(token_waves(rows, inputs), groups)
        places = shape[1] * orders.TILE_ROWS if tiles else rows
        return Launch(
            SOURCE, kernel, (places, rotations), waves * WAVE, (*buffers, rows, inputs, waves), dynamic_lds=2 * inputs
        )
    waves = min(GROUP_WAVES, rows)
    shares = shares_of_rows(rows, waves, groups * rotations)
    return Launch(SOURCE, kernel, (groups * rotations, shares), waves * WAVE, (*buffers, rows, inputs, waves, shares))
