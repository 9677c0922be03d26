"""Weight codes unpacked in the registers of Hopper's matrix instruction, as int8 codes or as e4m3 numbers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paroquant_gfx1201.kernels.triton.unpack import INT4_INTEGER, INT5_INTEGER

# e4m3 bytes 0 to 16 are 0 to 16 times 2^-9: a code above the midpoint less the midpoint is its low bits, and one below
# is the sign and the midpoint less its low bits, 16 - low = (low ^ 15) + 1.
FLOATS = {
    4: """{
        .reg .b32 below, turn, part;
        shr.u32 below, $2, 3;
        lop3.b32 below, below, 0x01010101, 0, 0x0C;
        mul.lo.u32 turn, below, 0x87;
        lop3.b32 part, $2, 0x07070707, turn, 0x6A;
        add.u32 $0, part, below;
        shr.u32 below, $2, 7;
        lop3.b32 below, below, 0x01010101, 0, 0x0C;
        mul.lo.u32 turn, below, 0x87;
        shr.u32 part, $2, 4;
        lop3.b32 part, part, 0x07070707, turn, 0x6A;
        add.u32 $1, part, below;
    }""",
    5: """{
        .reg .b32 below, turn, part;
        shr.u32 below, $3, $4;
        lop3.b32 part, below, 0x01010101, 0, 0x0C;
        mul.lo.u32 turn, part, 0x8F;
        lop3.b32 turn, $2, 0x0F0F0F0F, turn, 0x6A;
        add.u32 $0, turn, part;
        shr.u32 below, below, 4;
        lop3.b32 below, below, 0x01010101, 0, 0x0C;
        mul.lo.u32 turn, below, 0x8F;
        shr.u32 part, $2, 4;
        lop3.b32 part, part, 0x0F0F0F0F, turn, 0x6A;
        add.u32 $1, part, below;
    }""",
}
INT4_FLOAT = gl.constexpr(FLOATS[4].replace("\n", " "))
INT5_FLOAT = gl.constexpr(FLOATS[5].replace("\n", " "))


@gluon.constexpr_function
def fragment_layout(outputs, warps):
    """[outputs, 4, 16] in the registers of the matrix instruction's left operand, 16 bytes of k a fragment half."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0], [0, 1, 0], [0, 2, 0]]
    rows = 16
    warp_bases = []
    while rows < 16 * warps:
        warp_bases.append([rows, 0, 0])
        rows *= 2
    while rows < outputs:
        registers.append([rows, 0, 0])
        rows *= 2
    lanes = [[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [outputs, 4, 16])


@gluon.jit
def unpack(word, fifth, shift, BITS: gl.constexpr, INTEGER: gl.constexpr):
    """int8 twice, of a group's lower and upper half: codes, or e4m3 bytes of (code - midpoint) / 512."""
    if BITS == 4:
        text: gl.constexpr = INT4_INTEGER if INTEGER else INT4_FLOAT
        low, high = gl.inline_asm_elementwise(text, "=r,=r,r", [word], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    else:
        text: gl.constexpr = INT5_INTEGER if INTEGER else INT5_FLOAT
        low, high = gl.inline_asm_elementwise(
            text, "=r,=r,r,r,r,r,r,r", [word, fifth, shift], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    return low, high
