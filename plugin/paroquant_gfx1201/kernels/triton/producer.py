"""Activation producer: rotate, scale channels, find the peak, encode and sum codes.

One launch per group; per token two, as the scale needs the peak of the whole row: the first parks the rotated row.

The rotation of a group is one matrix product. The matrix, f32 with the channel scales folded in as
the reference has it, is split into three bf16 terms whose sum is the f32 value; activations are
bf16, so every product is exact and only the f32 sum over the group rounds. Encoding is integer
arithmetic and correctly rounded division: codes, scales and sums are the reference's bit for bit
for the same rotated values.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.triton.encoding import encode, round_bfloat16, scale_of, steps_of
from paroquant_gfx1201.kernels.triton.weights import INTERPRETED, bfloat16_operand, inline_ptx, processors

TERMS = 3
ELEMENTS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rotated rows as the GEMMs read them; ``quantize_rows`` gives them a leading dimension P.

    codes int8 or float8_e4m3fn [M, K]; scales f32 [G, M] per group, or [1, M] per token; row_sums f32 [G, M]: the sum
    of a group's codes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_sums: torch.Tensor

    @property
    def granularity(self) -> Literal["group", "token"]:
        """What one scale belongs to."""
        return "group" if self.scales.shape[-2] == self.row_sums.shape[-2] else "token"

    def of(self, rotation_index: int) -> "QuantizedRows":
        """Those of one rotation."""
        return QuantizedRows(self.codes[rotation_index], self.scales[rotation_index], self.row_sums[rotation_index])


def split_rotation(matrices: torch.Tensor) -> torch.Tensor:
    """bf16 [P, G, 3, g, g] from f32 [P, G, g, g]: terms whose sum is the matrix, largest first."""
    terms, rest = [], matrices.float()
    for _ in range(TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.stack(terms, 2).contiguous()


@triton.jit
def widened(tile, OPERAND: tl.constexpr):
    """A bf16 tile as what the product multiplies; through its bits, as the interpreter's cast loses subnormals."""
    if tl.float32 == OPERAND:
        tile = (tile.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tile


@triton.jit
def load_tile(x, rows, live, K, group, GROUP: tl.constexpr):
    """bf16 [rows, g]."""
    channel = tl.arange(0, GROUP)
    return tl.load(x + rows[:, None] * K + group * GROUP + channel[None, :], mask=live[:, None], other=0.0)


@triton.jit
def rotated_tile(tile, first, second, third, OPERAND: tl.constexpr):
    """f32 [rows, g]: the smallest term is summed first."""
    tile = widened(tile, OPERAND)
    total = tl.dot(tile, tl.trans(widened(third, OPERAND)), input_precision="ieee")
    total = tl.dot(tile, tl.trans(widened(second, OPERAND)), acc=total, input_precision="ieee")
    return tl.dot(tile, tl.trans(widened(first, OPERAND)), acc=total, input_precision="ieee")


@triton.jit
def group_kernel(
    x,
    matrices,
    codes,
    scales,
    row_sums,
    M,
    K,
    blocks_per_program,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    OPERAND: tl.constexpr,
    PARK: tl.constexpr,
    FUSED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One group of one rotation, for consecutive blocks of rows.

    PARK: in place of codes the rotated rows as bf16, in place of scales their largest magnitudes, and no sums.
    """
    groups = K // GROUP
    index = tl.program_id(0)
    group, rotation = index % groups, index // groups
    channel = tl.arange(0, GROUP)
    square = matrices + index * 3 * GROUP * GROUP + channel[:, None] * GROUP + channel[None, :]
    first, second = tl.load(square), tl.load(square + GROUP * GROUP)
    third = tl.load(square + 2 * GROUP * GROUP)
    start = tl.program_id(1) * blocks_per_program
    end = min(start + blocks_per_program, tl.cdiv(M, BLOCK_M))
    rows = start * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = load_tile(x, rows, rows < M, K, group, GROUP)
    for block in tl.range(start, end, num_stages=STAGES):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        live = rows < M
        # The next block's rows are under way while this one's are rotated and encoded.
        ahead = rows + BLOCK_M
        following = load_tile(x, ahead, (ahead < M) & (ahead < end * BLOCK_M), K, group, GROUP)
        rotated = rotated_tile(tile, first, second, third, OPERAND)
        tile = following
        target = codes + (rotation * M + rows)[:, None].to(tl.int64) * K + group * GROUP + channel[None, :]
        if PARK:
            bits = round_bfloat16(rotated)
            rounded = (bits << 16).to(tl.float32, bitcast=True)
            tl.store(target, bits.to(tl.int16), mask=live[:, None])
            tl.store(scales + index * M + rows, tl.max(tl.abs(rounded), 1), mask=live)
        else:
            peak = tl.max(tl.abs(rotated), 1)
            scale = scale_of(peak, INT8)
            byte, sums = encode(steps_of(rotated, peak, scale, FUSED), INT8, HARDWARE)
            tl.store(target, byte, mask=live[:, None])
            tl.store(scales + index * M + rows, scale, mask=live)
            tl.store(row_sums + index * M + rows, sums, mask=live)


@triton.jit
def token_kernel(
    parked,
    peaks,
    codes,
    scales,
    row_sums,
    M,
    K,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INT8: tl.constexpr,
    FUSED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One group of a block of rows, parked as bf16: the scale is that of the peaks of all groups. GROUPS >= G."""
    groups = K // GROUP
    index = tl.program_id(1)
    group, rotation = index % groups, index // groups
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < M
    channel, every = tl.arange(0, GROUP), tl.arange(0, GROUPS)
    line = (rotation * M + rows)[:, None].to(tl.int64) * K + group * GROUP + channel[None, :]
    bits = tl.load(parked + line, mask=live[:, None], other=0).to(tl.int32)
    part = peaks + (rotation * groups + every)[:, None] * M + rows[None, :]
    peak = tl.max(tl.load(part, mask=(every < groups)[:, None] & live[None, :], other=0.0), 0)
    scale = scale_of(peak, INT8)
    byte, sums = encode(steps_of((bits << 16).to(tl.float32, bitcast=True), peak, scale, FUSED), INT8, HARDWARE)
    tl.store(codes + line, byte, mask=live[:, None])
    tl.store(row_sums + index * M + rows, sums, mask=live)
    if group == 0:
        tl.store(scales + rotation * M + rows, scale, mask=live)


@dataclass(frozen=True)
class ProducerTiles:
    """Rows of a block, warps, depth of the load pipeline, and how many programs to spread the rotation over."""

    rows: int
    warps: int
    stages: int
    programs: int


TOKEN_ROWS = 16
"""Rows of a program that encodes parked rows."""


def tiles_for(count: int, device: torch.device) -> ProducerTiles:
    """The tiles that were fastest on an H200 (docs/benchmarks.md); on AMD, HIP_ROWS."""
    programs = (4 if count <= 64 else 2) * processors(device)
    if torch.version.hip is not None:
        return ProducerTiles(HIP_ROWS, 8, 1, programs)
    if count <= 64:
        return ProducerTiles(16 if count <= 16 else 32, 8, 1, programs)
    return ProducerTiles(64, 4, 1, programs)


HIP_ROWS = 32
"""Of a block, for 8 warps: spill nothing on gfx1201. Not timed: no such card was at hand."""


def quantize_rows(
    x: torch.Tensor,
    terms: torch.Tensor,
    element: Literal["int8", "e4m3"],
    granularity: Literal["group", "token"] = "group",
    tiles: ProducerTiles | None = None,
) -> QuantizedRows:
    """Rotate x bf16 [M, K] by ``split_rotation``'s terms bf16 [P, G, 3, g, g] and encode.

    Raises PluginError for another dtype or another K.
    """
    rotations, groups, _, size, _ = terms.shape
    count, inputs = x.shape
    if x.dtype != torch.bfloat16 or inputs != groups * size:
        raise PluginError(f"the producer takes bfloat16 rows of K={groups * size}, not {x.dtype} {list(x.shape)}")
    x = x.contiguous()
    by_token = granularity == "token"
    codes = torch.empty(rotations, count, inputs, dtype=ELEMENTS[element], device=x.device)
    scales = torch.empty(rotations, 1 if by_token else groups, count, dtype=torch.float32, device=x.device)
    row_sums = torch.empty(rotations, groups, count, dtype=torch.float32, device=x.device)
    rotated, factors = codes, scales
    if by_token:
        rotated = torch.empty(rotations, count, inputs, dtype=torch.bfloat16, device=x.device)
        factors = torch.empty_like(row_sums)
    tiles = tiles or tiles_for(count, x.device)
    blocks = triton.cdiv(count, tiles.rows)
    # A program reads its matrix once and then many rows.
    shares = min(blocks, max(1, tiles.programs // (groups * rotations)))
    per_program = triton.cdiv(blocks, shares)
    group_kernel[(groups * rotations, triton.cdiv(blocks, per_program))](
        x, terms, rotated.view(torch.int16 if by_token else torch.int8), factors, row_sums,
        count, inputs, per_program, GROUP=size, INT8=element == "int8", OPERAND=bfloat16_operand(),
        PARK=by_token, FUSED=not INTERPRETED, HARDWARE=inline_ptx(x.device),
        BLOCK_M=tiles.rows, STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    if by_token:
        token_kernel[(triton.cdiv(count, TOKEN_ROWS), groups * rotations)](
            rotated.view(torch.int16), factors, codes.view(torch.int8), scales, row_sums, count, inputs,
            GROUP=size, GROUPS=triton.next_power_of_2(groups), INT8=element == "int8", FUSED=not INTERPRETED,
            HARDWARE=inline_ptx(x.device), BLOCK_M=TOKEN_ROWS, num_warps=4,
        )  # fmt: skip
    return QuantizedRows(codes, scales, row_sums)
