"""A projection in the layout that the kernels read, and the kernel pieces that unpack it.

Group by group, each group's rows of one output next to each other, so that a tile of outputs of one
group is one contiguous piece of memory. The two nibbles of a byte lie half a group apart, and the
eight bits of a plane byte an eighth of a group apart: unpacking yields whole half groups and no
interleaving.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.projection import Projection

INTERPRETED = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs these kernels: decided when they are defined."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """Codes of bits 4 or 5 in groups of g along K, G = K / g.

    nibbles uint8 [G, N, g/2]: code k of a group in the low half of byte k, code k + g/2 in the high.
    plane uint8 [G, N, g/8]: fifth bit of code k in bit k // (g/8) of byte k % (g/8); [0] for int4.
    steps int32 [G, N]: the f16 scale's bits, and the zero point (0..31) in bits 16 and up.
    """

    nibbles: torch.Tensor
    plane: torch.Tensor
    steps: torch.Tensor
    bits: int

    @property
    def groups(self) -> int:
        """G."""
        return self.nibbles.shape[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.nibbles.shape[1]

    @property
    def group_size(self) -> int:
        """g."""
        return self.nibbles.shape[2] * 2

    @property
    def inputs(self) -> int:
        """K."""
        return self.groups * self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads of it."""
        return self.nibbles.nbytes + self.plane.nbytes + self.steps.nbytes

    def to(self, device: torch.device | str) -> "PackedWeight":
        """A copy on ``device``."""
        return PackedWeight(self.nibbles.to(device), self.plane.to(device), self.steps.to(device), self.bits)


def pack_codes(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> PackedWeight:
    """codes uint8 [K, N], zeros uint8 [G, N], scales f16 [G, N]; any device."""
    groups, outputs = zeros.shape
    by_group = codes.view(groups, -1, outputs).transpose(1, 2)
    low, high = (by_group & 15).chunk(2, dim=2)
    plane = codes.new_empty(0)
    if bits == 5:
        eighths = (by_group >> 4).reshape(groups, outputs, 8, -1)
        plane = eighths[:, :, 0].clone()
        for bit in range(1, 8):
            plane |= eighths[:, :, bit] << bit
    steps = (scales.view(torch.int16).int() & 0xFFFF) | (zeros.int() << 16)
    return PackedWeight((low | (high << 4)).contiguous(), plane.contiguous(), steps.contiguous(), bits)


def pack(projection: Projection) -> PackedWeight:
    """Pack an int4 or int5 projection. Raises PluginError for Lloyd levels, which are no integers."""
    spec = projection.spec
    if spec.lloyd:
        raise PluginError("the Triton kernels multiply integer codes: int4-lloyd has no Triton kernel")
    return pack_codes(projection.codes, projection.zeros, projection.scales, spec.bits)


# Four bytes to a register. Byte-wise arithmetic in Triton costs an extraction and an insertion for each byte, which on
# Hopper is more time than the weights take to arrive.
NIBBLES = """
and.b32 {low}, {word}, 0x0F0F0F0F;
shr.u32 {high}, {word}, 4;
and.b32 {high}, {high}, 0x0F0F0F0F;
"""
PLANE = """
shr.u32 bit, {plane}, {shift};
lop3.b32 {high}, bit, 0x10101010, {high}, 0xEA;
sub.u32 left, 4, {shift};
shl.b32 bit, {plane}, left;
lop3.b32 {low}, bit, 0x10101010, {low}, 0xEA;
"""
# A byte 0x64 above a code makes it the f16 number 1024 + code; the same plus the midpoint is subtracted, exactly.
FLOATS = """
prmt.b32 {first}, {bytes}, above, 0x4140;
prmt.b32 {second}, {bytes}, above, 0x4342;
sub.rn.f16x2 {first}, {first}, offset;
sub.rn.f16x2 {second}, {second}, offset;
"""


# Bytes 128 + code less the zero point never borrow from each other; the top bit turned over is the sign.
MINUS_ZERO = tl.constexpr(
    "{ .reg .b32 biased; or.b32 biased, $1, 0x80808080; sub.u32 biased, biased, $2; xor.b32 $0, biased, 0x80808080; }"
)


def _assembly(bits: int, integer: bool) -> str:
    """Unpacking of four nibble bytes to int8 codes, or to f16 code - midpoint."""
    word = 2 if integer else 4
    low, high = ("$0", "$1") if integer else ("low", "high")
    text = NIBBLES.format(low=low, high=high, word=f"${word}")
    if bits == 5:
        text += PLANE.format(low=low, high=high, plane=f"${word + 1}", shift=f"${word + 2}")
    if not integer:
        text += f"mov.b32 above, 0x64646464; mov.b32 offset, {(0x6400 + (1 << (bits - 1))) * 0x00010001};"
        text += FLOATS.format(first="$0", second="$1", bytes="low")
        text += FLOATS.format(first="$2", second="$3", bytes="high")
    return "{ .reg .b32 low, high, left, bit, above, offset;" + text.replace("\n", " ") + "}"


INT4_INTEGER = tl.constexpr(_assembly(4, True))
INT5_INTEGER = tl.constexpr(_assembly(5, True))
INT4_FLOAT16 = tl.constexpr(_assembly(4, False))
INT5_FLOAT16 = tl.constexpr(_assembly(5, False))


@triton.jit
def load_group(nibbles, plane, place, keep, GROUP: tl.constexpr, BITS: tl.constexpr):
    """uint8 [n, g/2] twice: the nibbles of a group and, for int5, the plane byte that completes each.

    place int [n]: index of (group, output); keep bool [n, 1]: others are read as code 0.
    """
    half = tl.arange(0, GROUP // 2)
    # Read once: what else is in the L2 is worth more.
    word = tl.load(
        nibbles + place[:, None] * (GROUP // 2) + half[None, :], mask=keep, other=0, eviction_policy="evict_first"
    )
    fifth = word
    if BITS == 5:
        fifth = tl.load(
            plane + place[:, None] * (GROUP // 8) + half[None, :] % (GROUP // 8),
            mask=keep,
            other=0,
            eviction_policy="evict_first",
        )
    return word, fifth


@triton.jit
def half_groups(word, fifth, GROUP: tl.constexpr, BITS: tl.constexpr, OPERAND: tl.constexpr, PTX: tl.constexpr):
    """Two tiles [n, g/2]: the codes of a group's lower and upper half, from what ``load_group`` gives.

    OPERAND int8: the codes; else code - midpoint in that type.
    """
    shift = (tl.arange(0, GROUP // 2) // (GROUP // 8))[None, :]
    if PTX:
        # All four bytes have one shift; as bytes, they would have to be cut out of their register again.
        shift = shift.to(tl.int32)
        if BITS == 4:
            if tl.int8 == OPERAND:
                low, high = tl.inline_asm_elementwise(
                    INT4_INTEGER, "=r,=r,r", [word], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
                )
            else:
                low, high = tl.inline_asm_elementwise(
                    INT4_FLOAT16, "=r,=r,=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
                )
        else:
            if tl.int8 == OPERAND:
                low, high = tl.inline_asm_elementwise(
                    INT5_INTEGER,
                    "=r,=r,r,r,r,r,r,r",
                    [word, fifth, shift],
                    dtype=(tl.int8, tl.int8),
                    is_pure=True,
                    pack=4,
                )
            else:
                low, high = tl.inline_asm_elementwise(
                    INT5_FLOAT16,
                    "=r,=r,=r,=r,r,r,r,r,r,r",
                    [word, fifth, shift],
                    dtype=(tl.float16, tl.float16),
                    is_pure=True,
                    pack=4,
                )
    else:
        low = (word & 15).to(tl.int32)
        high = (word >> 4).to(tl.int32)
        if BITS == 5:
            bits = fifth.to(tl.int32)
            low |= ((bits >> shift) & 1) << 4
            high |= ((bits >> (shift + 4)) & 1) << 4
        if tl.int8 == OPERAND:
            low = low.to(tl.int8)
            high = high.to(tl.int8)
        else:
            low = (low - (1 << (BITS - 1))).to(tl.float32).to(OPERAND)
            high = (high - (1 << (BITS - 1))).to(tl.float32).to(OPERAND)
    return low, high


@triton.jit
def minus_zero(codes, zero, PTX: tl.constexpr):
    """int8 codes [n, k] minus the zero points int32 [n]."""
    if PTX:
        fourfold = tl.broadcast_to((zero * 0x01010101)[:, None], codes.shape)
        codes = tl.inline_asm_elementwise(
            MINUS_ZERO, "=r,r,r,r,r,r", [codes, fourfold], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        codes -= zero.to(tl.int8)[:, None]
    return codes


@triton.jit
def scale_and_zero(steps):
    """f32 scale and int32 zero point of PackedWeight.steps."""
    scale = (steps & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, steps >> 16


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def inline_ptx(device: torch.device) -> bool:
    """Whether kernels on ``device`` take the hand-written unpacking, and CUDA's conversion to e4m3."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@triton.jit
def fragment_order(tile, WIDTH: tl.constexpr):
    """[n, k] with k reordered so that a thread's contiguous k of memory are its k of the matrix instruction.

    Of the four threads that share a row of a fragment, thread c holds WIDTH elements from each run of 4 * WIDTH. Both
    operands of a product are reordered alike, which leaves the product as it is.
    """
    rows: tl.constexpr = tile.shape[0]
    inputs: tl.constexpr = tile.shape[1]
    by_thread = tl.reshape(tile, (rows, 4, inputs // (4 * WIDTH), WIDTH))
    return tl.reshape(tl.permute(by_thread, (0, 2, 1, 3)), (rows, inputs))


def operand(codes: torch.dtype) -> tl.dtype:
    """What rows of ``codes`` are multiplied as: the narrowest type that holds them and the weight codes exactly.

    f32 for e4m3 rows in the interpreter.
    """
    if codes == torch.int8:
        return tl.int8
    return tl.float32 if INTERPRETED else tl.float16


def bfloat16_operand() -> tl.dtype:
    """What bf16 tiles are multiplied as: f32 in the interpreter, which has no bf16 product."""
    return tl.float32 if INTERPRETED else tl.bfloat16
