"""Prefill GEMM: many tokens, so that the time is the matrix unit's.

int8 rows: the weights are first expanded to int8, zero points subtracted, which is exact and costs
one pass over the packed weight; then one int32 dot per group, folded in f32 by both scales. e4m3 and
bf16 rows: nibbles are unpacked to bf16 in the loop and the zero point is the row-sum correction.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.triton.producer import QuantizedRows
from paroquant_gfx1201.kernels.triton.weights import (
    PackedWeight,
    float_operand,
    half_groups,
    inline_ptx,
    scale_and_zero,
)


@triton.jit
def expand_kernel(
    nibbles,
    plane,
    steps,
    expanded,
    N,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """int8 [G, N, g]: code - zero, in -31..31."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    place = tl.program_id(1) * N + columns
    half = tl.arange(0, GROUP // 2)
    low, high = half_groups(nibbles, plane, place, inside[:, None], GROUP, BITS, tl.int8, PTX)
    _, zero = scale_and_zero(tl.load(steps + place, mask=inside, other=0))
    zero = zero.to(tl.int8)[:, None]
    target = expanded + place.to(tl.int64)[:, None] * GROUP + half[None, :]
    tl.store(target, low - zero, mask=inside[:, None])
    tl.store(target + GROUP // 2, high - zero, mask=inside[:, None])


@triton.jit
def integer_kernel(
    codes,
    row_scales,
    expanded,
    steps,
    y,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of y from int8 rows and int8 weights."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    rows = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read those at the start again: no mask in the loop, and never stored.
    row, column = rows % M, columns % N
    channel = tl.arange(0, GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        left = tl.load(codes + row[:, None] * K + group * GROUP + channel[None, :])
        right = tl.load(expanded + (group * N + column).to(tl.int64)[:, None] * GROUP + channel[None, :])
        scale, _ = scale_and_zero(tl.load(steps + group * N + column))
        dots = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        if TOKEN:
            total += dots * scale[None, :]
        else:
            row_scale = tl.load(row_scales + group * M + row)
            total += dots * (row_scale[:, None] * scale[None, :])
    if TOKEN:
        total *= tl.load(row_scales + row)[:, None]
    keep = (rows < M)[:, None] & (columns < N)[None, :]
    target = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=keep)


@triton.jit
def float_kernel(
    codes,
    row_scales,
    row_sums,
    nibbles,
    plane,
    steps,
    y,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile of y from e4m3 or bf16 rows and packed weights. SCALES: 0 none, 1 per group, 2 per token."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    rows = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = rows % M, columns % N
    half = tl.arange(0, GROUP // 2)
    everything = tl.full((BLOCK_N, 1), 1, tl.int1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        place = group * N + column
        low, high = half_groups(nibbles, plane, place, everything, GROUP, BITS, OPERAND, PTX)
        source = codes + row[:, None] * K + group * GROUP + half[None, :]
        lower, upper = tl.load(source).to(OPERAND), tl.load(source + GROUP // 2).to(OPERAND)
        scale, zero = scale_and_zero(tl.load(steps + place))
        sums = tl.load(row_sums + group * M + row)
        dots = tl.dot(lower, tl.trans(low), input_precision="ieee")
        dots = tl.dot(upper, tl.trans(high), acc=dots, input_precision="ieee")
        centred = dots - sums[:, None] * (zero - (1 << (BITS - 1))).to(tl.float32)[None, :]
        if SCALES == 1:
            row_scale = tl.load(row_scales + group * M + row)
            total += centred * (row_scale[:, None] * scale[None, :])
        else:
            total += centred * scale[None, :]
    if SCALES == 2:
        total *= tl.load(row_scales + row)[:, None]
    keep = (rows < M)[:, None] & (columns < N)[None, :]
    target = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=keep)


@dataclass(frozen=True)
class PrefillTiles:
    """Rows and outputs of a tile, warps, and depth of the load pipeline."""

    rows: int
    outputs: int
    warps: int
    stages: int


# The fastest on an H200 (docs/benchmarks.md).
INTEGER_TILES = PrefillTiles(128, 64, 4, 4)
FLOAT_TILES = PrefillTiles(64, 128, 4, 3)


def expand(weight: PackedWeight) -> torch.Tensor:
    """int8 [G, N, g]: code - zero of every weight. One byte a weight, on the weight's device."""
    groups, outputs, size = weight.groups, weight.outputs, weight.group_size
    expanded = torch.empty(groups, outputs, size, dtype=torch.int8, device=weight.steps.device)
    expand_kernel[(triton.cdiv(outputs, 128), groups)](
        weight.nibbles, weight.plane, weight.steps, expanded, outputs,
        GROUP=size, BITS=weight.bits, BLOCK_N=128, PTX=inline_ptx(expanded.device), num_warps=4,
    )  # fmt: skip
    return expanded


def prefill(
    rows: QuantizedRows, weight: PackedWeight, dtype: torch.dtype = torch.bfloat16, tiles: PrefillTiles | None = None
) -> torch.Tensor:
    """y [M, N] of ``dtype`` for any M. Raises PluginError for another K."""
    count, inputs = rows.codes.shape
    if inputs != weight.inputs:
        raise PluginError(f"the weight has K={weight.inputs}, the rows have K={inputs}")
    outputs, size = weight.outputs, weight.group_size
    y = torch.empty(count, outputs, dtype=dtype, device=rows.codes.device)
    integer = rows.codes.dtype == torch.int8
    tiles = tiles or (INTEGER_TILES if integer else FLOAT_TILES)
    grid = (triton.cdiv(count, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)
    if integer:
        integer_kernel[grid](
            rows.codes, rows.scales, expand(weight), weight.steps, y, count, outputs, inputs,
            GROUP=size, TOKEN=rows.granularity == "token", BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs,
            STAGES=tiles.stages, num_warps=tiles.warps,
        )  # fmt: skip
        return y
    float_kernel[grid](
        rows.codes, rows.scales, rows.row_sums, weight.nibbles, weight.plane, weight.steps, y, count, outputs, inputs,
        GROUP=size, BITS=weight.bits, SCALES={"none": 0, "group": 1, "token": 2}[rows.granularity],
        OPERAND=float_operand(), BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, STAGES=tiles.stages,
        PTX=inline_ptx(y.device), num_warps=tiles.warps,
    )  # fmt: skip
    return y
