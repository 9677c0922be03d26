"""Weight codes unpacked in the registers of Hopper's matrix instruction, as int8 codes or as e4m3 numbers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paroquant_gfx1201.kernels.triton import unpack
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
# Of eight e4m3 bytes in two registers; the codes' top bits are signs.
MAGNITUDE = (
    unpack.SELECTOR
    + """
    prmt.b32 first, {low}, {high}, pick;
    shl.b32 upper, {bytes}, 4;
    lop3.b32 {out}, upper, 0x80808080, first, 0xEA;
"""
)


def _halves(lower: str, upper: str) -> gl.constexpr:
    """``lower`` for the codes in the low nibbles of $2, and ``upper`` for those in the high ones."""
    text = "{ .reg .b32 below, above, pick, first, second, upper;"
    text += unpack.NIBBLES.format(low="below", high="above", word="$2") + lower + upper + "}"
    return gl.constexpr(text.replace("\n", " "))


TABLE = ("$3", "$7", "$11", "$15")
LEVELS_FLOAT = _halves(
    unpack.LOOK_UP.format(bytes="below", out="$0", table=TABLE),
    unpack.LOOK_UP.format(bytes="above", out="$1", table=TABLE),
)
BLOCKS_FLOAT = _halves(
    MAGNITUDE.format(bytes="below", low=TABLE[0], high=TABLE[1], out="$0"),
    MAGNITUDE.format(bytes="above", low=TABLE[2], high=TABLE[3], out="$1"),
)
SMALL, LARGE = gl.constexpr(0x6C686000), gl.constexpr(0x7C787470)
"""e4m3 bytes of e2m1's eight magnitudes times 2^LIFT, which ``kernels.folded`` has."""
LEVELS, BLOCKS = gl.constexpr(unpack.LEVELS.value), gl.constexpr(unpack.BLOCKS.value)
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
def unpack_codes(
    words, fifths, slot, first, second, third, fourth,
    BITS: gl.constexpr, FORM: gl.constexpr, INTEGER: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """[BLOCK_N, 128] of a slot of the ring: int8 codes, or e4m3 (code - midpoint) / 512.

    Of LEVELS, what the sixteen e4m3 bytes in ``first`` to ``fourth`` have for the code.
    """
    outputs: gl.constexpr = words.shape[1] * 2
    word = words.index(slot).reshape([outputs, 64]).load(operand)
    if FORM == LEVELS:
        low, high = gl.inline_asm_elementwise(
            LEVELS_FLOAT,
            "=&r,=r" + ",r" * 17,
            [word, first, second, third, fourth],
            dtype=(gl.int8, gl.int8),
            is_pure=True,
            pack=4,
        )
    elif BITS == 4:
        text: gl.constexpr = INT4_INTEGER if INTEGER else INT4_FLOAT
        low, high = gl.inline_asm_elementwise(text, "=r,=r,r", [word], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    else:
        fragment: gl.constexpr = fragment_layout(outputs, gl.num_warps())
        whole = fifths.index(slot).reshape([outputs, 16]).load(gl.SliceLayout(1, fragment))
        eighth = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(0, fragment)))
        eighths = gl.expand_dims(gl.expand_dims(eighth, 1), 0) + gl.full([outputs, 4, 16], 0, gl.int32, fragment)
        bits, _ = gl.broadcast(gl.expand_dims(whole, 1), eighths)
        fifth = gl.convert_layout(bits.reshape([outputs, 64]), operand, assert_trivial=True)
        shift = gl.convert_layout(eighths.reshape([outputs, 64]), operand, assert_trivial=True)
        text: gl.constexpr = INT5_INTEGER if INTEGER else INT5_FLOAT
        low, high = gl.inline_asm_elementwise(
            text, "=r,=r,r,r,r,r,r,r", [word, fifth, shift], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    return as_operand(beside(low, high), INTEGER, operand)


@gluon.jit
def unpack_blocks(words, scales, slot, top, operand: gl.constexpr):
    """e4m3 [BLOCK_N, 128] of a slot of the ring: MXFP4 over 2^(top - 133), two groups of 64. top int32 [BLOCK_N]."""
    first = unpack_pair(words.index(2 * slot), scales.index(2 * slot), top, operand)
    second = unpack_pair(words.index(2 * slot + 1), scales.index(2 * slot + 1), top, operand)
    return as_operand(beside(first, second), False, operand)


@gluon.jit
def unpack_pair(words, exponents, top, operand: gl.constexpr):
    """e4m3 bytes [BLOCK_N, 64] of two blocks."""
    outputs: gl.constexpr = words.shape[0] * 4
    word = words.reshape([outputs, 32]).load(operand)
    both = exponents.load(top.type.layout).to(gl.int32)
    none = gl.full([outputs, 32], 0, gl.int32, operand)
    small, large = magnitudes(top - (both & 255))
    other_small, other_large = magnitudes(top - ((both >> 8) & 255))
    low, high = gl.inline_asm_elementwise(
        BLOCKS_FLOAT,
        "=&r,=r" + ",r" * 17,
        [
            word,
            gl.expand_dims(small, 1) + none,
            gl.expand_dims(large, 1) + none,
            gl.expand_dims(other_small, 1) + none,
            gl.expand_dims(other_large, 1) + none,
        ],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return beside(low, high)


@gluon.jit
def magnitudes(below):
    """e2m1's magnitudes in e4m3, of a block that lies ``below`` the largest of its output: eight bytes in two words.

    e4m3's exponents are lowered; the half lies 12 below in the subnormals, where its byte is 4 and not 0.
    """
    return SMALL - below * 0x08080800 + gl.where(below == 12, 0x0400, 0), LARGE - below * 0x08080808


@gluon.jit
def beside(low, high):
    """[n, 2 k]: a thread's registers in another order, which costs nothing."""
    return gl.join(low, high).permute(0, 2, 1).reshape([low.shape[0], 2 * low.shape[1]])


@gluon.jit
def as_operand(bytes, INTEGER: gl.constexpr, operand: gl.constexpr):
    """int8, or its bytes as e4m3, as the matrix instruction takes it."""
    if not INTEGER:
        bytes = bytes.to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(bytes, operand)
