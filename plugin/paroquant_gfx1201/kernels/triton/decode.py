"""Decode GEMM: few tokens, so that the time is the time to read the weights.

Y^T = W A^T, so that the outputs are the long side of the matrix instruction. The groups of a tile of
outputs are shared among several programs; the last one to finish adds the partial sums in a fixed
order, which keeps one launch and a result that does not depend on timing.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.triton.decode_tiles import DecodeTiles, tiles_for
from paroquant_gfx1201.kernels.triton.producer import QuantizedRows
from paroquant_gfx1201.kernels.triton.unpack import (
    BLOCKS,
    block_scales,
    fragment_order,
    half_groups,
    load_group,
    scale_and_zero,
)
from paroquant_gfx1201.kernels.triton.weights import FORMS, PackedWeight, inline_ptx, operand, require_fit

MAX_ROWS = 64


@triton.jit
def load_step(
    codes,
    row_scales,
    row_sums,
    nibbles,
    plane,
    steps,
    rows,
    columns,
    M,
    N,
    K,
    group,
    last,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """What one group of the loop reads; a weight of scale 0 from ``last`` on."""
    half = tl.arange(0, GROUP // 2)
    live = (rows < M) & (group + tl.zeros_like(rows) < last)
    inside = (columns < N) & (group + tl.zeros_like(columns) < last)
    place = group * N + columns
    word, fifth = load_group(nibbles, plane, place, inside[:, None], GROUP, BITS)
    source = codes + rows[:, None] * K + group * GROUP + half[None, :]
    lower = tl.load(source, mask=live[:, None], other=0.0)
    upper = tl.load(source + GROUP // 2, mask=live[:, None], other=0.0)
    step = tl.load(steps + place, mask=inside, other=0)
    row_group = group * GROUP // ROW_GROUP
    sums = tl.load(row_sums + row_group * M + rows, mask=live, other=0.0)
    row_scale = tl.load(row_scales + row_group * M + rows, mask=live, other=0.0)
    return word, fifth, lower, upper, step, sums, row_scale


@triton.jit
def add_step(
    total,
    loaded,
    levels,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDPOINT: tl.constexpr,
    OPERAND: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """total f32 [n, m] plus the product of one group."""
    word, fifth, lower, upper, step, sums, row_scale = loaded
    low, high = half_groups(word, fifth, levels, GROUP, BITS, FORM, OPERAND, PTX)
    lower, upper = lower.to(OPERAND), upper.to(OPERAND)
    if WIDTH > 0:
        low, high = fragment_order(low, WIDTH), fragment_order(high, WIDTH)
        lower, upper = fragment_order(lower, WIDTH), fragment_order(upper, WIDTH)
    if FORM == BLOCKS:
        first, second = block_scales(step)
        halves = tl.dot(low, tl.trans(lower), input_precision="ieee") * first[:, None]
        halves += tl.dot(high, tl.trans(upper), input_precision="ieee") * second[:, None]
        total += halves * row_scale[None, :]
    else:
        scale, zero = scale_and_zero(step)
        if tl.int8 == OPERAND:
            dots = tl.dot(low, tl.trans(lower), out_dtype=tl.int32)
            dots = tl.dot(high, tl.trans(upper), acc=dots, out_dtype=tl.int32)
            # Integers below 2^24: f32 holds them, and their difference, exactly.
            centred = dots.to(tl.float32) - zero.to(tl.float32)[:, None] * sums[None, :]
        else:
            dots = tl.dot(low, tl.trans(lower), input_precision="ieee")
            dots = tl.dot(high, tl.trans(upper), acc=dots, input_precision="ieee")
            centred = dots - (zero.to(tl.float32) - MIDPOINT)[:, None] * sums[None, :]
        total += centred * (scale[:, None] * row_scale[None, :])
    return total


@triton.jit
def multiply_share(
    codes,
    row_scales,
    row_sums,
    nibbles,
    plane,
    steps,
    levels,
    y,
    partial,
    arrived,
    M,
    N,
    K,
    tile,
    first,
    last,
    share,
    shares,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDPOINT: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """Groups first..last of one tile of outputs, which is share number ``share`` of the tile's ``shares``."""
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in tl.range(first, last, TOGETHER, num_stages=STAGES):
        one = load_step(
            codes, row_scales, row_sums, nibbles, plane, steps, rows, columns, M, N, K, group, last,
            GROUP, ROW_GROUP, BITS,
        )  # fmt: skip
        if TOGETHER == 2:
            two = load_step(
                codes, row_scales, row_sums, nibbles, plane, steps, rows, columns, M, N, K, group + 1, last,
                GROUP, ROW_GROUP, BITS,
            )  # fmt: skip
        total = add_step(total, one, levels, GROUP, BITS, FORM, MIDPOINT, OPERAND, WIDTH, PTX)
        if TOGETHER == 2:
            total = add_step(total, two, levels, GROUP, BITS, FORM, MIDPOINT, OPERAND, WIDTH, PTX)
    keep = (columns < N)[:, None] & (rows < M)[None, :]
    target = rows[None, :] * N + columns[:, None]
    if shares == 1:
        tl.store(y + target, total.to(y.dtype.element_ty), mask=keep)
    else:
        tl.store(partial + share * M * N + target, total, mask=keep)
        # Every thread's part must be written before the program counts as arrived.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == shares - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in tl.range(0, shares, num_stages=1):
                total += tl.load(partial + other * M * N + target, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(y + target, total.to(y.dtype.element_ty), mask=keep)
            tl.store(arrived + tile, 0)


@triton.jit
def last_owner(unit, units, programs):
    """The program that works on ``unit``: program p has those from p * units // programs on."""
    return (((unit + 1).to(tl.int64) * programs - 1) // units).to(tl.int32)


# Its code for one row is slower than that for a few.
@triton.jit(do_not_specialize=["M"])
def decode_kernel(
    codes,
    row_scales,
    row_sums,
    nibbles,
    plane,
    steps,
    levels,
    y,
    partial,
    arrived,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    MIDPOINT: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):
    """One of SPLITS shares of a tile of outputs; or, with SPLITS 0, an equal share of the groups of all tiles.

    TOGETHER: groups of one iteration (1 or 2), whose loads are under way at once. WIDTH: of ``fragment_order``, or 0
    to leave K in its order.
    """
    groups = K // GROUP
    if SPLITS > 0:
        tile, share = tl.program_id(0), tl.program_id(1)
        multiply_share(
            codes, row_scales, row_sums, nibbles, plane, steps, levels, y, partial, arrived, M, N, K,
            tile, share * groups // SPLITS, (share + 1) * groups // SPLITS, share, SPLITS,
            GROUP, ROW_GROUP, BITS, FORM, MIDPOINT, OPERAND, BLOCK_M, BLOCK_N, STAGES, TOGETHER, WIDTH, PTX,
        )  # fmt: skip
    else:
        units = tl.cdiv(N, BLOCK_N) * groups
        program, programs = tl.program_id(0), tl.num_programs(0)
        begin = (program.to(tl.int64) * units // programs).to(tl.int32)
        end = ((program + 1).to(tl.int64) * units // programs).to(tl.int32)
        for tile in tl.range(begin // groups, tl.cdiv(end, groups), num_stages=1):
            unit = tile * groups
            owner = last_owner(unit, units, programs)
            shares = last_owner(unit + groups - 1, units, programs) - owner + 1
            multiply_share(
                codes, row_scales, row_sums, nibbles, plane, steps, levels, y, partial, arrived, M, N, K,
                tile, tl.maximum(begin - unit, 0), tl.minimum(end - unit, groups), program - owner, shares,
                GROUP, ROW_GROUP, BITS, FORM, MIDPOINT, OPERAND, BLOCK_M, BLOCK_N, STAGES, TOGETHER, WIDTH, PTX,
            )  # fmt: skip


@cache
def _counters(device: torch.device, tiles: int) -> torch.Tensor:
    """Zeroed once; every launch leaves zeros. One stream at a time may use it."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def on_hopper(rows: QuantizedRows, weight: PackedWeight) -> bool:
    """Whether ``hopper_decode`` takes the product: groups of 128, rows with a scale per group, and MXFP4 if folded."""
    device = rows.codes.device
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and (weight.group_size == 128 or weight.is_folded)
        and weight.inputs == 128 * len(rows.row_sums)
        and weight.outputs % 16 == 0
        and rows.granularity == "group"
    )


def decode(
    rows: QuantizedRows, weight: PackedWeight, dtype: torch.dtype = torch.bfloat16, tiles: DecodeTiles | None = None
) -> torch.Tensor:
    """y [M, N] of ``dtype`` for M <= 64 rows with one scale per group.

    With ``tiles`` by the kernel of this module on any card.

    Raises PluginError for more rows, one scale per token, and what ``require_fit`` refuses.
    """
    require_fit(rows.codes, weight)
    count = len(rows.codes)
    if count > MAX_ROWS or rows.granularity == "token":
        raise PluginError(
            f"decode takes at most {MAX_ROWS} rows with scales per group, "
            f"not {count} with scales per {rows.granularity}"
        )
    device = rows.codes.device
    if tiles is None and on_hopper(rows, weight):
        from paroquant_gfx1201.kernels.triton import hopper_decode

        return hopper_decode.multiply(rows, weight, dtype, _counters)
    tiles = tiles or tiles_for(count, weight.bits, rows.codes.dtype, device)
    blocks = triton.cdiv(weight.outputs, tiles.outputs)
    if tiles.even:
        grid = (min(tiles.programs, blocks * weight.groups),)
        # A tile has whole shares, and parts of two more.
        shares = grid[0] // blocks + 2
    else:
        shares = min(tiles.programs, weight.groups)
        grid = (blocks, shares)
    y = torch.empty(count, weight.outputs, dtype=dtype, device=device)
    partial = torch.empty((shares if shares > 1 else 0) * y.numel(), dtype=torch.float32, device=device)
    decode_kernel[grid](
        rows.codes, rows.scales, rows.row_sums, weight.nibbles, weight.plane, weight.steps, weight.levels, y, partial,
        _counters(device, blocks), count, weight.outputs, weight.inputs,
        GROUP=weight.group_size, ROW_GROUP=weight.inputs // len(rows.row_sums), BITS=weight.bits,
        FORM=FORMS[weight.form], MIDPOINT=weight.midpoint, OPERAND=operand(rows.codes.dtype),
        BLOCK_M=max(8, triton.next_power_of_2(count)), BLOCK_N=tiles.outputs,
        SPLITS=0 if tiles.even else shares, STAGES=tiles.stages, TOGETHER=tiles.together, WIDTH=tiles.width,
        PTX=inline_ptx(device),
        num_warps=tiles.warps,
    )  # fmt: skip
    return y
