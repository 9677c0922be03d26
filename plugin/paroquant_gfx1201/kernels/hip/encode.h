// From rotated values to codes: correctly rounded quotients, then int8 or e4m3, four codes to a word.
#pragma once
#include "device.h"

enum Element { INT8, E4M3 };

constexpr float INT8_MOST = 127.0f, E4M3_MOST = 448.0f;
constexpr float SMALL = 0x1p-90f, LIFT = 0x1p64f;

// 1 / value: one Newton step on the instruction's estimate. The few mantissas for which that is not the nearest float
// give correctly rounded quotients all the same: tests/plugin/test_hip_encode.py tries every dividend of them.
DEVICE float reciprocal(float value) {
  float estimate = reciprocal_estimate(value);
  return __builtin_fmaf(__builtin_fmaf(-value, estimate, 1.0f), estimate, estimate);
}

// value / divisor correctly rounded, where the quotient is at least 2^-11 and divisor >= SMALL (Markstein, 1990).
DEVICE float quotient(float value, float divisor, float reciprocal) {
  float near = value * reciprocal;
  return __builtin_fmaf(__builtin_fmaf(-divisor, near, value), reciprocal, near);
}

// The codes' step for a group or row whose largest magnitude is `peak`.
template <Element ELEMENT>
DEVICE float scale_of(float peak) {
  return ELEMENT == INT8 ? peak / INT8_MOST : peak * (1.0f / E4M3_MOST);
}

// Nearest integer in -127..127, ties to even, in the low byte: adding 1.5 * 2^23 leaves no bits for a fraction.
DEVICE u32 encode_int8(float step) {
  return __builtin_bit_cast(u32, clamp(step, -INT8_MOST, INT8_MOST) + 12582912.0f);
}

// Two e4m3 codes, ties to even, clamped; a NaN is 0. May hold -0, see `plain_zeros`.
DEVICE u32 encode_e4m3_pair(float first, float second) {
  first = first == first ? clamp(first, -E4M3_MOST, E4M3_MOST) : 0.0f;
  second = second == second ? clamp(second, -E4M3_MOST, E4M3_MOST) : 0.0f;
  return convert_e4m3_pair(first, second);
}

// Clears the sign of the bytes that are -0.
DEVICE u32 plain_zeros(u32 word) {
  return word & (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | 0x7f7f7f7f);
}

// COUNT values (2 or 4) over `divisor` as codes, the first in the lowest byte. `sum` gets the sum of the codes, of e4m3
// times 512: integers, so that no order of additions matters.
template <Element ELEMENT, int COUNT>
DEVICE u32 encode(const float* values, float divisor, float reciprocal, int& sum) {
  float steps[4] = {};
  for (int i = 0; i < COUNT; i++) steps[i] = quotient(values[i], divisor, reciprocal);
  if constexpr (ELEMENT == INT8) {
    u32 word = permute_bytes(encode_int8(steps[1]), encode_int8(steps[0]), 0x0c0c0400);
    if constexpr (COUNT == 4)
      word |= permute_bytes(encode_int8(steps[3]), encode_int8(steps[2]), 0x04000c0c);
    sum = sum_of_bytes(word);
    return word;
  } else {
    u32 word = encode_e4m3_pair(steps[0], steps[1]);
    if constexpr (COUNT == 4) word |= encode_e4m3_pair(steps[2], steps[3]) << 16;
    word = plain_zeros(word);
    float total = e4m3_value<0>(word) + e4m3_value<1>(word);
    if constexpr (COUNT == 4) total += e4m3_value<2>(word) + e4m3_value<3>(word);
    sum = static_cast<int>(total * 512.0f);
    return word;
  }
}

// Row sum f32 from the wave's sum of `encode`'s: one rounding.
template <Element ELEMENT>
DEVICE float row_sum(int sum) {
  return static_cast<float>(sum) * (ELEMENT == INT8 ? 1.0f : 0x1p-9f);
}

// bf16 nearest to a finite value, ties to even, in the low half.
DEVICE u32 encode_bf16(float value) {
  u32 bits = __builtin_bit_cast(u32, value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DEVICE u32 wave_max(u32 value) {
  value = __builtin_elementwise_max(value, lane_xor<1>(value));
  value = __builtin_elementwise_max(value, lane_xor<2>(value));
  value = __builtin_elementwise_max(value, lane_xor<4>(value));
  value = __builtin_elementwise_max(value, lane_xor<8>(value));
  return __builtin_elementwise_max(value, lane_xor<16>(value));
}

DEVICE int wave_sum(int value) {
  value += lane_xor<1>(value);
  value += lane_xor<2>(value);
  value += lane_xor<4>(value);
  value += lane_xor<8>(value);
  return value + lane_xor<16>(value);
}

// How a whole group or row is divided by its scale: what is too small for exact residuals is lifted, by a power of two.
struct Divisor {
  float divisor, reciprocal;
  bool lifted;
};

DEVICE Divisor divisor_of(float scale) {
  Divisor result;
  result.divisor = scale > 0.0f ? scale : 1.0f;
  result.lifted = result.divisor < SMALL;
  if (result.lifted) result.divisor *= LIFT;
  result.reciprocal = reciprocal(result.divisor);
  return result;
}

template <Element ELEMENT, int COUNT>
DEVICE u32 encode(float* values, const Divisor& by, int& sum) {
  if (by.lifted)
    for (int i = 0; i < COUNT; i++) values[i] *= LIFT;
  return encode<ELEMENT, COUNT>(values, by.divisor, by.reciprocal, sum);
}
