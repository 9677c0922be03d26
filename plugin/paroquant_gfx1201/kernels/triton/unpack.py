"""Kernel pieces that turn packed weights into what a product multiplies."""

import triton
import triton.language as tl

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
# e2m1 in the upper bits of f16 is 2^-14 of its value, subnormals included.
E2M1 = """
and.b32 first, {bytes}, 0x07070707;
shl.b32 first, first, 1;
and.b32 second, {bytes}, 0x08080808;
shl.b32 second, second, 4;
or.b32 first, first, second;
prmt.b32 {low}, first, zero, 0x1404;
prmt.b32 {high}, first, zero, 0x3424;
mul.rn.f16x2 {low}, {low}, power;
mul.rn.f16x2 {high}, {high}, power;
"""
# Four codes, a byte each, become a selector of nibbles.
SELECTOR = """
shr.u32 pick, {bytes}, 4;
or.b32 pick, pick, {bytes};
prmt.b32 pick, pick, pick, 0x0020;
and.b32 pick, pick, 0x7777;
"""
# Of sixteen e4m3 bytes in four registers; the codes' top bits choose between halves.
LOOK_UP = (
    SELECTOR
    + """
prmt.b32 first, {table[0]}, {table[1]}, pick;
prmt.b32 second, {table[2]}, {table[3]}, pick;
shl.b32 upper, {bytes}, 4;
prmt.b32 upper, upper, upper, 0xBA98;
lop3.b32 {out}, first, second, upper, 0xD8;
"""
)
WIDEN = """
mov.b32 {{one, two}}, first;
cvt.rn.f16x2.e4m3x2 {low}, one;
cvt.rn.f16x2.e4m3x2 {high}, two;
"""
INTEGER, LEVELS, BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What weight codes are: integers; names of levels, with a scale and zero point per group; e2m1, with a scale for each
half of a group."""


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


def _float_assembly(text: str) -> str:
    """Unpacking of four nibble bytes to f16 by ``text``, for the lower and for the upper codes."""
    head = "{ .reg .b32 below, above, first, second, pick, upper, zero, power; .reg .b16 one, two;"
    head += " mov.b32 zero, 0; mov.b32 power, 0x74007400;"
    body = NIBBLES.format(low="below", high="above", word="$4")
    levels = {"table": ("$5", "$9", "$13", "$17"), "out": "first"}
    body += text.format(bytes="below", low="$0", high="$1", **levels)
    body += text.format(bytes="above", low="$2", high="$3", **levels)
    return head + body.replace("\n", " ") + "}"


E2M1_FLOAT16 = tl.constexpr(_float_assembly(E2M1))
LEVELS_FLOAT16 = tl.constexpr(_float_assembly(LOOK_UP + WIDEN))


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
def e2m1_value(code, OPERAND: tl.constexpr):
    """What uint8 codes 0..15 are worth: in the upper bits of f16, 2^-14 of it, subnormals included."""
    bits = (code.to(tl.int32) & 7) << 9 | (code.to(tl.int32) & 8) << 12
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(OPERAND) * 16384.0


@triton.jit
def half_groups(
    word,
    fifth,
    levels,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    OPERAND: tl.constexpr,
    PTX: tl.constexpr,
):
    """Two tiles [n, g/2]: the codes of a group's lower and upper half, from what ``load_group`` gives.

    OPERAND int8: the codes; else code - midpoint in that type, which of LEVELS is what ``levels`` e4m3 [16] has for the
    code, and of BLOCKS the code's e2m1 value.
    """
    shift = (tl.arange(0, GROUP // 2) // (GROUP // 8))[None, :]
    # All four bytes have one shift; as bytes, they would have to be cut out of their register again.
    wide = [word, fifth, shift.to(tl.int32)]
    if PTX and tl.int8 == OPERAND:
        # Triton takes the types of the results as they are written here, and no constants for them.
        if BITS == 4:
            low, high = tl.inline_asm_elementwise(INT4_INTEGER, "=r,=r,r", [word], (tl.int8, tl.int8), True, 4)
        else:
            low, high = tl.inline_asm_elementwise(INT5_INTEGER, "=r,=r,r,r,r,r,r,r", wide, (tl.int8, tl.int8), True, 4)
    elif PTX:
        if FORM == LEVELS:
            table = levels.to(tl.pointer_type(tl.int32))
            wide = [word, tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)]
            text: tl.constexpr = LEVELS_FLOAT16
            inputs: tl.constexpr = ",r" * 17
        elif BITS == 5:
            text: tl.constexpr = INT5_FLOAT16
            inputs: tl.constexpr = ",r" * 6
        else:
            wide = [word]
            text: tl.constexpr = E2M1_FLOAT16 if FORM == BLOCKS else INT4_FLOAT16
            inputs: tl.constexpr = ",r"
        low, high = tl.inline_asm_elementwise(
            text, "=r,=r,=r,=r" + inputs, wide, (tl.float16, tl.float16), is_pure=True, pack=4
        )
    elif FORM == LEVELS:
        low = tl.load(levels + (word & 15).to(tl.int32)).to(OPERAND)
        high = tl.load(levels + (word >> 4).to(tl.int32)).to(OPERAND)
    elif FORM == BLOCKS:
        low, high = e2m1_value(word & 15, OPERAND), e2m1_value(word >> 4, OPERAND)
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


@triton.jit
def block_scales(exponents):
    """f32 2^(e - 127) of the e8m0 bytes of a group's lower and upper half, from PackedWeight.steps of MXFP4."""
    low, high = exponents.to(tl.int32) & 255, (exponents.to(tl.int32) >> 8) & 255
    # 2^-127 is subnormal.
    low = tl.where(low == 0, 0x00400000, low << 23).to(tl.float32, bitcast=True)
    high = tl.where(high == 0, 0x00400000, high << 23).to(tl.float32, bitcast=True)
    return low, high
