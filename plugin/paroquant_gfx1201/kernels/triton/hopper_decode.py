"""Decode GEMM on Hopper: the weights arrive through the bulk copy engine, several groups ahead of their use.

The portable kernel in ``decode`` computes the same. There, too few loads are under way to fill the memory's latency;
here a ring of STAGES groups in shared memory does. The weight codes are unpacked in registers, in the order of the
warpgroup's matrix instruction, and multiplied as int8 or e4m3; rows are read by it from shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paroquant_gfx1201.kernels.folded import LIFT
from paroquant_gfx1201.kernels.triton.hopper_unpack import BLOCKS, LEVELS, unpack_blocks, unpack_codes
from paroquant_gfx1201.kernels.triton.producer import QuantizedRows
from paroquant_gfx1201.kernels.triton.weights import FORMS, PackedWeight, processors

DROP = gl.constexpr(2.0**-LIFT)
# Renamed after Triton 3.6.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_values = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def share(N, groups, BLOCK_N: gl.constexpr):
    """This program's units of work, from begin to end; a unit is a group of a tile of outputs."""
    units = gl.cdiv(N, BLOCK_N) * groups
    program, programs = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    return (program * units // programs).to(gl.int32), ((program + 1) * units // programs).to(gl.int32)


@gluon.jit
def step_ring(slot, phase, STAGES: gl.constexpr):
    """The next slot of the ring, and its phase."""
    last = slot + 1 == STAGES
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_partition(
    nibbles, plane, steps, codes, words, fifths, scales, rows, sums, factors, full, empty,
    row_scales, row_sums, M, N, groups,
    BITS: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the program's units into the ring, the last tile first."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, BLOCK_M, lanes)
    begin, end = share(N, groups, BLOCK_N)
    slot, phase = begin * 0, begin * 0 + 1
    last = (end - 1) // groups
    for back in range(last - begin // groups + 1):
        tile = last - back
        stop = gl.minimum(end - tile * groups, groups)
        for group in range(gl.maximum(begin - tile * groups, 0), stop):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            copy_values(sums.index(slot), row_sums + group * M + row, mask=row < M)
            copy_values(factors.index(slot), row_scales + group * M + row, mask=row < M)
            async_copy.mbarrier_arrive(ready)
            mbarrier.expect(ready, BLOCK_N * (68 + 16 * (BITS - 4)) + BLOCK_M * 128)
            for part in gl.static_range(PARTS):
                place = (group * PARTS + part) * N + tile * BLOCK_N
                copy_block(nibbles, [place // (2 * PARTS), 0], ready, words.index(slot * PARTS + part))
                copy_block(steps, [place], ready, scales.index(slot * PARTS + part))
            if BITS == 5:
                copy_block(plane, [(group * N + tile * BLOCK_N) // 8, 0], ready, fifths.index(slot))
            copy_block(codes, [0, group * 128], ready, rows.index(slot))
            slot, phase = step_ring(slot, phase, STAGES)


@gluon.jit
def multiply_partition(
    words, fifths, scales, levels, tops, rows, sums, factors, full, empty, y, partial, arrived, M, N, groups,
    BITS: gl.constexpr, FORM: gl.constexpr, MIDPOINT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiplies what arrives. A tile is finished by the program that has its last group.

    That program works on the tile last, and the others, all of lower index, have worked on it first: it hardly waits,
    and never for a program that the device starts after it.
    """
    INTEGER: gl.constexpr = rows.dtype == gl.int8
    sums_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_of, 4)
    row_layout: gl.constexpr = gl.SliceLayout(0, sums_of)
    column_layout: gl.constexpr = gl.SliceLayout(1, sums_of)
    line_layout: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])

    begin, end = share(N, groups, BLOCK_N)
    row, column = gl.arange(0, BLOCK_M, row_layout), gl.arange(0, BLOCK_N, column_layout)
    # A thread's partial sums two by two, each warp's next to each other.
    by_column = (column & 7) * 8 + ((column >> 4) & (WARPS - 1)) * 64
    by_column += ((column >> 3) & 1) * (64 * WARPS) + column // (16 * WARPS) * (128 * WARPS)
    place = gl.expand_dims((row & 7) + (row >> 3) * (8 * BLOCK_N), 0) + gl.expand_dims(by_column, 1)
    one, two, three, four = begin, begin, begin, begin
    if FORM == LEVELS:
        table = levels.to(gl.pointer_type(gl.int32), bitcast=True)
        one, two, three, four = gl.load(table), gl.load(table + 1), gl.load(table + 2), gl.load(table + 3)
    none = gl.full([BLOCK_N, BLOCK_M], 0, gl.int32 if INTEGER else gl.float32, sums_of)

    slot, phase = begin * 0, begin * 0
    last = (end - 1) // groups
    for back in range(last - begin // groups + 1):
        tile = last - back
        start, stop = gl.maximum(begin - tile * groups, 0), gl.minimum(end - tile * groups, groups)
        total = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, sums_of)
        top = begin
        if FORM == BLOCKS:
            output = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, operand))
            top = gl.load(tops + output, mask=output < N, other=0).to(gl.int32)
        for _ in range(start, stop):
            mbarrier.wait(full.index(slot), phase)
            if FORM == BLOCKS:
                both = unpack_blocks(words, scales, slot, top, operand)
            else:
                both = unpack_codes(words, fifths, slot, one, two, three, four, BITS, FORM, INTEGER, operand)
            dots = warpgroup_mma(both, rows.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
            row_sum, row_scale = sums.index(slot).load(row_layout), factors.index(slot).load(row_layout)
            step = begin
            if FORM != BLOCKS:
                step = scales.index(slot).load(column_layout)
            dots = warpgroup_mma_wait(0, [dots])
            mbarrier.arrive(empty.index(slot), count=1)
            if FORM == BLOCKS:
                total += dots * gl.expand_dims(row_scale, 0)
            else:
                scale = (step & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
                zero = (step >> 16).to(gl.float32)
                if not INTEGER:
                    # e4m3 bytes of integers are 512 times less.
                    unit: gl.constexpr = 1.0 if FORM == LEVELS else 512.0
                    zero = (zero - MIDPOINT) * (1.0 / unit)
                    scale = scale * unit
                centred = dots.to(gl.float32) - gl.expand_dims(zero, 1) * gl.expand_dims(row_sum, 0)
                total += centred * (gl.expand_dims(scale, 1) * gl.expand_dims(row_scale, 0))
            slot, phase = step_ring(slot, phase, STAGES)
        if FORM == BLOCKS:
            biased = gl.convert_layout(top, column_layout)
            lifted = gl.where(biased == 0, 0x00400000, biased << 23).to(gl.float32, bitcast=True)
            total = total * DROP * gl.expand_dims(lifted, 1)
        if stop < groups:
            gl.store(partial + gl.program_id(0) * (BLOCK_N * BLOCK_M) + place, total)
            # Every thread's part must be written before the program counts as arrived.
            barrier()
            gl.atomic_add(arrived + tile, 1, sem="release", scope="gpu")
        else:
            units, programs = gl.cdiv(N, BLOCK_N) * groups, gl.num_programs(0)
            owner = (((tile * groups + 1).to(gl.int64) * programs - 1) // units).to(gl.int32)
            others = gl.program_id(0) - owner
            if others > 0:
                while gl.atomic_add(arrived + tile, 0, sem="acquire", scope="gpu") < others:
                    pass
                for other in range(owner, gl.program_id(0)):
                    total += gl.load(partial + other * (BLOCK_N * BLOCK_M) + place, cache_modifier=".cg")
                gl.store(arrived + tile, 0)
            finished = total.to(y.dtype.element_ty)
            if BLOCK_M >= 32:
                # Whole lines of y: many rows would otherwise be written in pieces of 16 bytes.
                finished = gl.convert_layout(finished, line_layout)
            kept: gl.constexpr = line_layout if BLOCK_M >= 32 else sums_of
            outputs = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, kept))
            token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, kept))
            keep = gl.expand_dims(outputs < N, 1) & gl.expand_dims(token < M, 0)
            gl.store(y + gl.expand_dims(token, 0) * N + gl.expand_dims(outputs, 1), finished, mask=keep)


@gluon.jit(do_not_specialize=["M"])
def hopper_decode_kernel(
    nibbles,
    plane,
    steps,
    levels,
    tops,
    codes,
    row_scales,
    row_sums,
    y,
    partial,
    arrived,
    M,
    N,
    groups,
    BITS: gl.constexpr,
    FORM: gl.constexpr,
    MIDPOINT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Each program has an equal share of the groups of all tiles of outputs.

    nibbles [K * N / 256, 128], plane [G * N / 8, 128], steps [G * N] and codes [M, K] are tensor descriptors.
    partial f32 [programs, BLOCK_N * BLOCK_M].
    """
    # MXFP4 is packed in groups of 64.
    PARTS: gl.constexpr = 2 if FORM == BLOCKS else 1
    words = gl.allocate_shared_memory(gl.uint8, [STAGES * PARTS, BLOCK_N // (2 * PARTS), 128], nibbles.layout)
    fifths = gl.allocate_shared_memory(gl.uint8, [STAGES if BITS == 5 else 1, BLOCK_N // 8, 128], plane.layout)
    scales = gl.allocate_shared_memory(steps.dtype, [STAGES * PARTS, BLOCK_N], steps.layout)
    rows = gl.allocate_shared_memory(codes.dtype, [STAGES, BLOCK_M, 128], codes.layout)
    factors_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], factors_layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], factors_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (words, fifths, scales, levels, tops, rows, sums, factors, full, empty, y, partial, arrived,
                 M, N, groups, BITS, FORM, MIDPOINT, BLOCK_M, BLOCK_N, STAGES, num_warps),
            ),
            (
                load_partition,
                (nibbles, plane, steps, codes, words, fifths, scales, rows, sums, factors,
                 full, empty, row_scales, row_sums, M, N, groups, BITS, PARTS, BLOCK_M, BLOCK_N, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True)
class HopperTiles:
    """Outputs of a tile, warps that multiply, depth of the ring, programs to a multiprocessor.

    registers: a thread's, on average over the program's two groups of warps; more do not fit the multiprocessor.
    """

    outputs: int
    warps: int
    stages: int
    programs: int
    registers: int


def tiles_for(rows: int, form: str) -> HopperTiles:
    """The fastest on an H200 (docs/benchmarks.md)."""
    if rows <= 32:
        return HopperTiles(64, 4, 4 if form in ("int4", "int5") else 6, 3, 80)
    return HopperTiles(64, 4, 5, 3, 80) if form in ("int5", "int4-lloyd") else HopperTiles(64, 4, 7, 2, 128)


def described(tensor: torch.Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
    """For copies of blocks."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.element_size(), rank=len(block)
    )
    return TensorDescriptor.from_tensor(tensor, block, layout)


def multiply(
    rows: QuantizedRows,
    weight: PackedWeight,
    dtype: torch.dtype,
    counters: Callable[[torch.device, int], torch.Tensor],
    tiles: HopperTiles | None = None,
) -> torch.Tensor:
    """y [M, N] of ``dtype``. ``counters``: int32, a zero for each tile of outputs, which it is left at."""
    count, device = len(rows.codes), rows.codes.device
    tiles = tiles or tiles_for(count, weight.form)
    block_m = max(8, triton.next_power_of_2(count))
    blocks = triton.cdiv(weight.outputs, tiles.outputs)
    groups, parts = weight.inputs // 128, 128 // weight.group_size
    programs = min(tiles.programs * processors(device), blocks * groups)
    y = torch.empty(count, weight.outputs, dtype=dtype, device=device)
    partial = torch.empty(programs * tiles.outputs * block_m, dtype=torch.float32, device=device)
    plane = weight.plane if weight.bits == 5 else weight.nibbles
    hopper_decode_kernel[(programs,)](
        described(weight.nibbles.view(-1, 128), [tiles.outputs // (2 * parts), 128], 128),
        described(plane.view(-1, 128), [tiles.outputs // 8, 128], 0),
        described(weight.steps.view(-1), [tiles.outputs], 0),
        weight.levels, weight.tops, described(rows.codes, [block_m, 128], 128),
        rows.scales, rows.row_sums, y, partial, counters(device, blocks), count, weight.outputs, groups,
        BITS=weight.bits, FORM=FORMS[weight.form], MIDPOINT=weight.midpoint,
        BLOCK_M=block_m, BLOCK_N=tiles.outputs, STAGES=tiles.stages, num_warps=tiles.warps, maxnreg=tiles.registers,
    )  # fmt: skip
    return y
