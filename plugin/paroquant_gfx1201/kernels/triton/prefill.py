"""Prefill GEMM: many tokens, so that the time is the matrix unit's.

The weights are first expanded to what the rows are multiplied by, one pass over the packed weight: int8 or bf16 with
the zero points subtracted, e4m3 for e4m3 rows. All are exact. Then one dot per group, folded in f32 by both scales.
Tiles are read through tensor descriptors: the bulk copy engine on Hopper, plain loads elsewhere.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.triton.producer import QuantizedRows, encode_e4m3, widened
from paroquant_gfx1201.kernels.triton.weights import (
    PackedWeight,
    half_groups,
    inline_ptx,
    load_group,
    minus_zero,
    operand,
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
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """[G, N, g] of code - zero, or of code - midpoint where not CENTRED; -31..31.

    WIDE: what bf16 and e4m3 are made from.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    place = tl.program_id(1) * N + columns
    half = tl.arange(0, GROUP // 2)
    kind: tl.constexpr = expanded.dtype.element_ty
    word, fifth = load_group(nibbles, plane, place, inside[:, None], GROUP, BITS)
    low, high = half_groups(word, fifth, GROUP, BITS, WIDE, PTX)
    if CENTRED:
        _, zero = scale_and_zero(tl.load(steps + place, mask=inside, other=0))
        if tl.int8 == kind:
            low, high = minus_zero(low, zero, PTX), minus_zero(high, zero, PTX)
        else:
            zero = (zero - (1 << (BITS - 1))).to(tl.float32).to(WIDE)[:, None]
            low, high = low - zero, high - zero
    if PTX or tl.float8e4nv != kind:
        low, high = low.to(kind), high.to(kind)
    else:
        # Elsewhere the conversion is software, and in the interpreter wrong.
        low, _ = encode_e4m3(low.to(tl.float32))
        high, _ = encode_e4m3(high.to(tl.float32))
        low, high = low.to(tl.int8).to(kind, bitcast=True), high.to(tl.int8).to(kind, bitcast=True)
    target = expanded + place.to(tl.int64)[:, None] * GROUP + half[None, :]
    tl.store(target, low, mask=inside[:, None])
    tl.store(target + GROUP // 2, high, mask=inside[:, None])


@triton.jit
def tile_kernel(
    codes,
    expanded,
    step_tiles,
    row_scales,
    row_sums,
    y,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of y. SCALES of the rows: 0 none, 1 per group, 2 per token.

    codes [M, K], expanded [G * N, g] and step_tiles, which are the steps in one dimension, are tensor descriptors.
    Rows past M and columns past N read zeros, or another group's values, and are never stored.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles_m * BLOCK_M
    column = tl.program_id(0) // tiles_m * BLOCK_N
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    live = rows < M
    integer: tl.constexpr = tl.int8 == codes.dtype
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        left = codes.load([row, group * GROUP])
        right = expanded.load([group * N + column, 0])
        scale, zero = scale_and_zero(step_tiles.load([group * N + column]))
        if tl.bfloat16 == codes.dtype:
            left, right = widened(left, WIDE), widened(right, WIDE)
        if integer:
            dots = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        else:
            dots = tl.dot(left, tl.trans(right), input_precision="ieee")
        if not CENTRED:
            sums = tl.load(row_sums + group * M + rows, mask=live, other=0.0)
            dots -= sums[:, None] * (zero - (1 << (BITS - 1))).to(tl.float32)[None, :]
        if SCALES == 1:
            row_scale = tl.load(row_scales + group * M + rows, mask=live, other=0.0)
            total += dots * (row_scale[:, None] * scale[None, :])
        else:
            total += dots * scale[None, :]
    if SCALES == 2:
        total *= tl.load(row_scales + rows, mask=live, other=0.0)[:, None]
    target = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=live[:, None] & (columns < N)[None, :])


@dataclass(frozen=True)
class PrefillTiles:
    """Rows and outputs of a tile, warps, depth of the load pipeline, and the registers a thread may have (CUDA)."""

    rows: int
    outputs: int
    warps: int
    stages: int
    registers: int | None = None


def tiles_for(codes: torch.dtype) -> PrefillTiles:
    """The fastest on an H200 (docs/benchmarks.md); on AMD, HIP_TILES."""
    if torch.version.hip is not None:
        return HIP_TILES
    if codes == torch.bfloat16:
        return PrefillTiles(128, 128, 8, 3)
    # With 168 registers three programs fit a multiprocessor.
    return PrefillTiles(128, 64, 4, 3, 168)


HIP_TILES = PrefillTiles(64, 64, 8, 1)
"""Spill nothing on gfx1201. Not timed: no such card was at hand."""


def keeps_zero_points(codes: torch.dtype, bits: int) -> bool:
    """Whether ``expand`` leaves the zero point to the row sums: e4m3 holds every integer up to 16, and no 17."""
    return codes == torch.float8_e4m3fn and bits == 5


def expand(weight: PackedWeight, codes: torch.dtype = torch.int8) -> torch.Tensor:
    """[G, N, g] of type ``codes``: code - zero of every weight, or code - midpoint (see ``keeps_zero_points``)."""
    groups, outputs, size = weight.groups, weight.outputs, weight.group_size
    expanded = torch.empty(groups, outputs, size, dtype=codes, device=weight.steps.device)
    expand_kernel[(triton.cdiv(outputs, 128), groups)](
        weight.nibbles, weight.plane, weight.steps, expanded, outputs,
        GROUP=size, BITS=weight.bits, CENTRED=not keeps_zero_points(codes, weight.bits),
        WIDE=operand(codes), BLOCK_N=128, PTX=inline_ptx(expanded.device), num_warps=4,
    )  # fmt: skip
    return expanded


def prefill(
    rows: QuantizedRows, weight: PackedWeight, dtype: torch.dtype = torch.bfloat16, tiles: PrefillTiles | None = None
) -> torch.Tensor:
    """y [M, N] of ``dtype`` for any M. Raises PluginError for another K."""
    count, inputs = rows.codes.shape
    if inputs != weight.inputs:
        raise PluginError(f"the weight has K={weight.inputs}, the rows have K={inputs}")
    outputs, size, kind = weight.outputs, weight.group_size, rows.codes.dtype
    tiles = tiles or tiles_for(kind)
    y = torch.empty(count, outputs, dtype=dtype, device=rows.codes.device)
    expanded = expand(weight, kind).view(-1, size)
    tile_kernel[(triton.cdiv(count, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
        TensorDescriptor.from_tensor(rows.codes, [tiles.rows, size]),
        TensorDescriptor.from_tensor(expanded, [tiles.outputs, size]),
        TensorDescriptor.from_tensor(weight.steps.view(-1), [tiles.outputs]),
        rows.scales, rows.row_sums, y, count, outputs, inputs,
        GROUP=size, BITS=weight.bits, CENTRED=not keeps_zero_points(kind, weight.bits),
        WIDE=operand(kind), SCALES={"none": 0, "group": 1, "token": 2}[rows.granularity],
        BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, STAGES=tiles.stages, num_warps=tiles.warps,
        **({"maxnreg": tiles.registers} if tiles.registers else {}),
    )  # fmt: skip
    return y
