"""Prefill GEMM: many tokens, so that the time is the matrix unit's.

The weights are first expanded to what the rows are multiplied by, one pass over the packed weight: int8 with the zero
points subtracted, e4m3, or bf16 where e4m3 does not hold MXFP4. All are exact. Then one dot per group, folded in f32 by
both scales. Tiles are read through tensor descriptors: the bulk copy engine on Hopper, plain
loads elsewhere.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from paroquant_gfx1201.kernels.folded import BIAS, LIFT
from paroquant_gfx1201.kernels.triton.encoding import encode_e4m3, round_bfloat16
from paroquant_gfx1201.kernels.triton.prefill_tiles import PrefillTiles, tiles_for
from paroquant_gfx1201.kernels.triton.producer import QuantizedRows, widened
from paroquant_gfx1201.kernels.triton.unpack import (
    BLOCKS,
    block_scales,
    half_groups,
    load_group,
    minus_zero,
    scale_and_zero,
)
from paroquant_gfx1201.kernels.triton.weights import (
    FORMS,
    PackedWeight,
    bfloat16_operand,
    inline_ptx,
    operand,
    require_fit,
)

BLOCK_TERMS = tl.constexpr(64)
LIFTED = tl.constexpr(BIAS + LIFT)
"""e8m0 exponent of a block that has its output's largest, in e4m3."""
DROP = tl.constexpr(2.0**-LIFT)


@triton.jit
def expand_kernel(
    nibbles,
    plane,
    steps,
    levels,
    tops,
    expanded,
    N,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """[K / SIZE, N, SIZE] of code - zero, or of value - midpoint where not CENTRED; of MXFP4 the weights, as bits of
    bf16, or over 2^(top - 133) as e4m3.

    SIZE: a multiple of GROUP. WIDE: what e4m3 is made from.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    place = tl.program_id(1) * N + columns
    half = tl.arange(0, GROUP // 2)
    kind: tl.constexpr = expanded.dtype.element_ty
    word, fifth = load_group(nibbles, plane, place, inside[:, None], GROUP, BITS)
    low, high = half_groups(word, fifth, levels, GROUP, BITS, FORM, WIDE, PTX)
    if FORM == BLOCKS:
        step = tl.load(steps + place, mask=inside, other=0)
        if tl.int16 != kind:
            # Both exponents; neither sum leaves its byte.
            step = step.to(tl.int32) + (LIFTED - tl.load(tops + columns, mask=inside, other=0).to(tl.int32)) * 0x0101
        first, second = block_scales(step)
        low, high = low.to(tl.float32) * first[:, None], high.to(tl.float32) * second[:, None]
        if tl.int16 == kind:
            low, high = round_bfloat16(low), round_bfloat16(high)
    elif CENTRED:
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
    parts: tl.constexpr = SIZE // GROUP
    place = (tl.program_id(1) // parts * N + columns).to(tl.int64) * SIZE + tl.program_id(1) % parts * GROUP
    target = expanded + place[:, None] + half[None, :]
    tl.store(target, low, mask=inside[:, None])
    tl.store(target + GROUP // 2, high, mask=inside[:, None])


@triton.jit
def split(whole, terms, here, X, G, WIDTH, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """Store f32 [x, GROUPS] as first, first and second bf16 term, or as first, second and first; zeros past 3 G."""
    group = tl.arange(0, GROUPS)
    first = round_bfloat16(whole)
    second = round_bfloat16(whole - (first << 16).to(tl.float32, bitcast=True)).to(tl.int16)
    first = first.to(tl.int16)
    inside = (here < X)[:, None] & (group < G)[None, :]
    target = terms + here[:, None] * WIDTH + group[None, :]
    tl.store(target, first, mask=inside)
    tl.store(target + G, second if COLUMNS else first, mask=inside)
    tl.store(target + 2 * G, first if COLUMNS else second, mask=inside)
    tl.store(target + 3 * G, tl.zeros_like(first), mask=(here < X)[:, None] & (3 * G + group < WIDTH)[None, :])


@triton.jit
def split_kernel(
    row_scales, row_sums, steps, row_terms, column_terms, M, N, G, WIDTH,
    SCALED: tl.constexpr, MIDPOINT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bf16 terms [M, WIDTH] and [N, WIDTH], whose product is what the zero points of all groups add. GROUPS >= G.

    Rows: scale (where SCALED) times sum of codes; columns: scale times midpoint - zero point, which two terms hold
    exactly.
    """
    group = tl.arange(0, GROUPS)
    blocks = tl.cdiv(M, BLOCK)
    if tl.program_id(0) < blocks:
        here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = (here < M)[:, None] & (group < G)[None, :]
        place = group[None, :] * M + here[:, None]
        whole = tl.load(row_sums + place, mask=inside, other=0.0)
        if SCALED:
            whole *= tl.load(row_scales + place, mask=inside, other=0.0)
        split(whole, row_terms, here, M, G, WIDTH, False, GROUPS)
    else:
        here = (tl.program_id(0) - blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = (here < N)[:, None] & (group < G)[None, :]
        scale, zero = scale_and_zero(tl.load(steps + group[None, :] * N + here[:, None], mask=inside, other=0))
        split(scale * (MIDPOINT - zero.to(tl.float32)), column_terms, here, N, G, WIDTH, True, GROUPS)


@triton.jit
def tile_kernel(
    codes,
    expanded,
    step_tiles,
    row_terms,
    column_terms,
    row_scales,
    tops,
    y,
    M,
    N,
    K,
    terms,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    CENTRED: tl.constexpr,
    STEPPED: tl.constexpr,
    FOLDED: tl.constexpr,
    TERM: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of y. PER_GROUP: rows have a scale per ROW_GROUP inputs, else one per token. STEPPED: weights have one
    for each group; FOLDED: one for each output.

    codes [M, K], expanded [G * N, g], step_tiles, which are the steps in one dimension, and, where not CENTRED,
    row_terms [M, terms] and column_terms [N, terms] are tensor descriptors.
    Rows past M and columns past N read zeros, or another group's values, and are never stored.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles_m * BLOCK_M
    column = tl.program_id(0) // tiles_m * BLOCK_N
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    live = rows < M
    integer: tl.constexpr = tl.int8 == codes.dtype
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not CENTRED:
        for term in tl.range(0, terms, BLOCK_TERMS, num_stages=2):
            left = widened(row_terms.load([row, term]), TERM)
            right = widened(column_terms.load([column, term]), TERM)
            total = tl.dot(left, tl.trans(right), acc=total, input_precision="ieee")
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        left = codes.load([row, group * GROUP])
        right = expanded.load([group * N + column, 0])
        if STEPPED:
            scale, _ = scale_and_zero(step_tiles.load([group * N + column]))
        if PER_GROUP:
            row_scale = tl.load(row_scales + group * GROUP // ROW_GROUP * M + rows, mask=live, other=0.0)
        elif not STEPPED:
            row_scale = tl.load(row_scales + rows, mask=live, other=0.0)
        if tl.bfloat16 == right.dtype:
            left, right = left.to(tl.float32).to(TERM), widened(right, TERM)
        if integer:
            dots = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        else:
            dots = tl.dot(left, tl.trans(right), input_precision="ieee")
        if PER_GROUP and STEPPED:
            total += dots * (row_scale[:, None] * scale[None, :])
        elif STEPPED:
            total += dots * scale[None, :]
        else:
            # Products that are only added up would become one asynchronous chain, which Triton 3.6 gets wrong on Hopper
            # where rows are converted on their way: it converts the next while the last are being multiplied.
            total += dots * row_scale[:, None]
    if STEPPED and not PER_GROUP:
        total *= tl.load(row_scales + rows, mask=live, other=0.0)[:, None]
    if FOLDED:
        top, _ = block_scales(tl.load(tops + columns, mask=columns < N, other=0))
        total = total * DROP * top[None, :]
    target = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=live[:, None] & (columns < N)[None, :])


def expanded_type(weight: PackedWeight, codes: torch.dtype) -> torch.dtype:
    """What ``weight`` is expanded to for rows of ``codes``: their own type, but of MXFP4 that is not folded."""
    return torch.bfloat16 if weight.form == "mxfp4" and not weight.is_folded else codes


def keeps_zero_points(weight: PackedWeight, codes: torch.dtype) -> bool:
    """Whether ``expand`` leaves the zero point to the row sums.

    e4m3 holds every integer up to 16, and no 17; it holds every level, and not each of them less a zero point.
    """
    return weight.form == "int4-lloyd" or (codes == torch.float8_e4m3fn and weight.form == "int5")


def expand(weight: PackedWeight, codes: torch.dtype = torch.int8, size: int | None = None) -> torch.Tensor:
    """[K / size, N, size] of ``expanded_type``: code - zero of every weight, or value - midpoint (see
    ``keeps_zero_points``). Of MXFP4, which has no zero points, the weights themselves, or over 2^(top - 133).

    size: a multiple of the weight's group size, which it is if not given.
    """
    size, outputs = size or weight.group_size, weight.outputs
    kind = expanded_type(weight, codes)
    expanded = torch.empty(weight.inputs // size, outputs, size, dtype=kind, device=weight.steps.device)
    expand_kernel[(triton.cdiv(outputs, 64), weight.groups)](
        weight.nibbles, weight.plane, weight.steps, weight.levels, weight.tops,
        expanded.view(torch.int16) if kind == torch.bfloat16 else expanded, outputs,
        GROUP=weight.group_size, SIZE=size, BITS=weight.bits, FORM=FORMS[weight.form],
        CENTRED=not keeps_zero_points(weight, codes), WIDE=operand(codes), BLOCK_N=64,
        PTX=inline_ptx(expanded.device), num_warps=2,
    )  # fmt: skip
    return expanded


def zero_point_terms(rows: QuantizedRows, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [M, T] and [N, T], whose product is what ``expand`` leaves to the row sums; to 2^-16 of it."""
    count, outputs, groups = len(rows.codes), weight.outputs, weight.groups
    width = triton.cdiv(3 * groups, BLOCK_TERMS.value) * BLOCK_TERMS.value
    row_terms, column_terms = rows.row_sums.new_empty(count + outputs, width, dtype=torch.bfloat16).split(
        (count, outputs)
    )
    split_kernel[(triton.cdiv(count, 32) + triton.cdiv(outputs, 32),)](
        rows.scales, rows.row_sums, weight.steps, row_terms.view(torch.int16), column_terms.view(torch.int16),
        count, outputs, groups, width, SCALED=rows.granularity == "group", MIDPOINT=weight.midpoint,
        GROUPS=max(BLOCK_TERMS.value, triton.next_power_of_2(groups)), BLOCK=32, num_warps=4,
    )  # fmt: skip
    return row_terms, column_terms


def prefill(
    rows: QuantizedRows, weight: PackedWeight, dtype: torch.dtype = torch.bfloat16, tiles: PrefillTiles | None = None
) -> torch.Tensor:
    """y [M, N] of ``dtype`` for any M. Raises PluginError for what ``require_fit`` refuses."""
    require_fit(rows.codes, weight)
    count, inputs = rows.codes.shape
    outputs, kind, row_group = weight.outputs, rows.codes.dtype, inputs // len(rows.row_sums)
    stepped = weight.form != "mxfp4"
    size = row_group if weight.is_folded else weight.group_size
    expanded = expand(weight, kind, size).view(-1, size)
    tiles = tiles or tiles_for(expanded.dtype)
    y = torch.empty(count, outputs, dtype=dtype, device=rows.codes.device)
    centred = not keeps_zero_points(weight, kind)
    terms = (rows.codes, expanded) if centred else zero_point_terms(rows, weight)
    width = BLOCK_TERMS.value
    tile_kernel[(triton.cdiv(count, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
        TensorDescriptor.from_tensor(rows.codes, [tiles.rows, size]),
        TensorDescriptor.from_tensor(expanded, [tiles.outputs, size]),
        TensorDescriptor.from_tensor(weight.steps.view(-1), [tiles.outputs]),
        TensorDescriptor.from_tensor(terms[0], [tiles.rows, width]),
        TensorDescriptor.from_tensor(terms[1], [tiles.outputs, width]),
        rows.scales, weight.tops, y, count, outputs, inputs, terms[0].shape[1],
        GROUP=size, ROW_GROUP=row_group, CENTRED=centred, STEPPED=stepped, FOLDED=weight.is_folded,
        TERM=bfloat16_operand(), PER_GROUP=rows.granularity == "group",
        BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, STAGES=tiles.stages,
        num_warps=tiles.warps, **({"maxnreg": tiles.registers} if tiles.registers else {}),
    )  # fmt: skip
    return y
