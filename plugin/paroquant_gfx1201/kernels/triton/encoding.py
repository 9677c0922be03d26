"""Rotated activations to codes: scales, quotients, and integer round-to-nearest-even encoders."""

import triton
import triton.language as tl


@triton.jit
def round_bfloat16(value):
    """Bits (0..65535) of the bf16 nearest to a finite f32, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def encode_int8(step):
    """The nearest integer, ties to even, clamped to +-127."""
    # Adding 1.5 * 2^23 leaves no fraction bits, so the f32 addition itself rounds half to even, and the integer is in
    # the low bits of the sum: the conversion would take longer.
    clamped = tl.minimum(tl.maximum(step, -127.0), 127.0)
    return (clamped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode_e4m3(step):
    """Byte of the nearest e4m3 (OCP, finite), ties to even, clamped to +-448, no -0; and its value * 512."""
    bits = step.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has an ulp of 2^-9, e4m3's subnormal step.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(magnitude < 0x3C800000, small, normal)
    exponent = byte >> 3
    value = tl.where(exponent == 0, byte, (8 + (byte & 7)) << tl.maximum(exponent - 1, 0))
    negative = bits < 0
    return byte | ((negative & (byte != 0)).to(tl.int32) << 7), tl.where(negative, -value, value)


@triton.jit
def encode(step, INT8: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes as int8 bytes [rows, g], and the f32 sum of each row's codes. HARDWARE: by the e4m3 conversion of CUDA."""
    if INT8:
        whole = encode_int8(step)
        byte, sums = whole.to(tl.int8), tl.sum(whole, 1).to(tl.float32)
    elif HARDWARE:
        # It saturates and rounds ties to even.
        code = step.to(tl.float8e4nv)
        value = code.to(tl.float32)
        byte = tl.where(value == 0.0, 0, code.to(tl.int8, bitcast=True))
        # Multiples of 2^-9 below 2^15 in any order: exact. The last sum rounds once, as a conversion would.
        rows: tl.constexpr = step.shape[0]
        halves: tl.constexpr = step.shape[1] // 2
        sums = tl.sum(tl.sum(tl.reshape(value, (rows, 2, halves)), 2), 1)
    else:
        whole, value = encode_e4m3(step)
        byte, sums = whole.to(tl.int8), tl.sum(value, 1).to(tl.float32) * 0.001953125
    return byte, sums


@triton.jit
def scale_of(peak, INT8: tl.constexpr):
    """amax / 127 correctly rounded, or amax times f32(1 / 448)."""
    # Triton compiles only the branch taken, which a conditional expression does not promise.
    if INT8:  # noqa: SIM108
        scale = tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32))
    else:
        scale = peak * 0.0022321429569274187
    return scale


@triton.jit
def steps_of(rotated, peak, scale, FUSED: tl.constexpr):
    """rotated / scale, rounded correctly; rotated itself for a row of scale 0.

    FUSED: by the rounded reciprocal and one corrected product (Markstein, 1990), which is the correctly rounded
    quotient where nothing underflows. A power of two brings the row's peak to 1..2 first; what still underflows is
    smaller than half of the smallest code.
    """
    if FUSED:
        exponent = (peak.to(tl.int32, bitcast=True) >> 23) & 0xFF
        power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        divisor = tl.where(scale > 0, scale * power, 1.0)
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]
        scaled = rotated * power[:, None]
        quotient = scaled * inverse
        rest = tl.fma(-quotient, tl.broadcast_to(divisor[:, None], scaled.shape), scaled)
        steps = tl.fma(rest, tl.broadcast_to(inverse, scaled.shape), quotient)
    else:
        divisor = tl.where(scale > 0, scale, 1.0)
        steps = tl.div_rn(rotated, tl.broadcast_to(divisor[:, None], rotated.shape))
    return steps
