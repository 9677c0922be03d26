// What the kernels use of a gfx1201, computed on the CPU; ../hip/device.h is the same for the GPU. Layouts of matrix
// fragments and behaviour of instructions: AMD, "RDNA4" Instruction Set Architecture, sections 7.12 and 16.
#pragma once
#include <cmath>

#ifdef SIMT_DRIVER
#include "driver.h"
#else
#include "main.h"
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using v2i = int __attribute__((ext_vector_type(2)));
using v4i = int __attribute__((ext_vector_type(4)));
using v8i = int __attribute__((ext_vector_type(8)));
using v8f = float __attribute__((ext_vector_type(8)));
using v8s = short __attribute__((ext_vector_type(8)));  // bf16, as bits
using v8h = _Float16 __attribute__((ext_vector_type(8)));

#define DEVICE inline
#define METHOD inline
#define KERNEL(most_threads) void
#define SHARED(type, name, count) type* name = static_cast<type*>(simt::shared(__COUNTER__, (count) * sizeof(type)))
#define DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(simt::shared(__COUNTER__, simt::machine.dynamic_bytes))

inline int thread_id() { return simt::machine.lane; }
inline int block_x() { return simt::machine.block.x; }
inline int block_y() { return simt::machine.block.y; }
inline int block_z() { return simt::machine.block.z; }
inline void workgroup_barrier(simt::Site site = simt::here()) { simt::barrier(site); }

// Lanes of a wave run in lockstep on the GPU; here this is where they are known to be at the same place.
inline void wave_sync(simt::Site site = simt::here()) {
  simt::meet(site, [](u32*) {}, [](auto&, auto&) {}, [](auto&, u32*) {});
}

// The value of the lane whose number differs in the bits of MASK.
template <int MASK>
inline u32 lane_xor(u32 value, simt::Site site = simt::here()) {
  static_assert(MASK == 1 || MASK == 2 || MASK == 4 || MASK == 8 || MASK == 16);
  u32 other = 0;
  simt::meet(
      site, [&](u32* in) { in[0] = value; }, [](auto&, auto&) {},
      [&](auto& in, u32*) { other = in[simt::lane_of_wave() ^ MASK][0]; });
  return other;
}

// `value`, which has to be the same in each lane of a wave.
inline int same_in_wave(int value, simt::Site site = simt::here()) {
  simt::meet(
      site, [&](u32* in) { in[0] = static_cast<u32>(value); }, [](auto&, auto&) {},
      [&](auto& in, u32*) {
        if (in[0][0] != static_cast<u32>(value)) simt::fault("same_in_wave: %d in a lane, %d in the first", value, in[0][0]);
      });
  return value;
}

// OCP e4m3. The instruction gives NaN for what is past the range, like 0x7f for a NaN.
inline float decode_e4m3(u8 code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float value = exponent == 15 && mantissa == 7 ? NAN
                : exponent                      ? ldexpf(8 + mantissa, exponent - 10)
                                                : ldexpf(mantissa, -9);
  return code >> 7 ? -value : value;
}

inline u8 convert_e4m3(float value) {
  u32 bits = __builtin_bit_cast(u32, value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x43e80000) return 0x7f | sign;  // past 464, the middle between 448 and what 480 would be
  if (magnitude < 0x3c800000) {                    // below 2^-6: 2^14 has an ulp of 2^-9, the subnormal step
    float shifted = __builtin_bit_cast(float, magnitude) + 16384.0f;
    return (__builtin_bit_cast(u32, shifted) & 15) | sign;
  }
  return (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3)) | sign;
}

// v_cvt_pk_fp8_f32: two codes in the low half.
inline u32 convert_e4m3_pair(float first, float second) { return convert_e4m3(first) | convert_e4m3(second) << 8; }

// v_cvt_f32_fp8
template <int BYTE>
inline float e4m3_value(u32 word) {
  return decode_e4m3(word >> 8 * BYTE & 0xff);
}

namespace simt {
// Eight values of a lane to an operand, of as many bits as fill it.
template <class Number, class Operand, class Sum, class Left, class Right>
inline Sum multiply(Site site, Operand a, Operand b, Sum c, Left left, Right right) {
  constexpr int HELD = sizeof(Operand) / 4, BITS = HELD * 4, TO_A_WORD = 32 / BITS;
  static_assert(2 * HELD + 8 <= WORDS);
  Sum d;
  meet(
      site,
      [&](u32* in) {
        memcpy(in, &a, 4 * HELD);
        memcpy(in + HELD, &b, 4 * HELD);
        memcpy(in + 2 * HELD, &c, 32);
      },
      [&](auto& in, auto& out) {
        Number rows[16][16], columns[16][16];
        for (int lane = 0; lane < WIDTH; lane++)  // lane holds k = 8 * (lane / 16) + i of row, or column, lane % 16
          for (int i = 0; i < 8; i++) {
            auto field = [&](const u32* words) { return words[i / TO_A_WORD] >> BITS * (i % TO_A_WORD) & ((1 << BITS) - 1); };
            rows[lane % 16][lane / 16 * 8 + i] = left(field(in[lane]));
            columns[lane % 16][lane / 16 * 8 + i] = right(field(in[lane] + HELD));
          }
        for (int lane = 0; lane < WIDTH; lane++)
          for (int v = 0; v < 8; v++) {  // element v is row v + 8 * (lane / 16), column lane % 16
            Number sum = 0;
            for (int k = 0; k < 16; k++) sum += rows[v + lane / 16 * 8][k] * columns[lane % 16][k];
            auto addend = c[0];
            memcpy(&addend, &in[lane][2 * HELD + v], 4);
            decltype(addend) total = sum + addend;
            memcpy(&out[lane][v], &total, 4);
          }
      },
      [&](auto&, u32* out) { memcpy(&d, out, 32); });
  return d;
}
inline const double* e4m3_table() {
  static double table[256];
  if (table[1] == 0)
    for (int code = 0; code < 256; code++) table[code] = decode_e4m3(code);
  return table;
}
}  // namespace simt

// a and b bytes of e4m3; products exact, summed in double, rounded once. The GPU's order of sums is its own.
inline v8f wmma_e4m3(v2i a, v2i b, v8f c, simt::Site site = simt::here()) {
  const double* table = simt::e4m3_table();
  auto value = [table](u32 code) { return table[code]; };
  return simt::multiply<double>(site, a, b, c, value, value);
}

// a unsigned bytes, b signed bytes.
inline v8i wmma_u8_i8(v2i a, v2i b, v8i c, simt::Site site = simt::here()) {
  return simt::multiply<int>(
      site, a, b, c, [](u32 code) { return static_cast<int>(code); },
      [](u32 code) { return static_cast<int>(static_cast<signed char>(code)); });
}

// a and b signed bytes.
inline v8i wmma_i8_i8(v2i a, v2i b, v8i c, simt::Site site = simt::here()) {
  auto value = [](u32 code) { return static_cast<int>(static_cast<signed char>(code)); };
  return simt::multiply<int>(site, a, b, c, value, value);
}

// a and b f16; products exact, summed in double, rounded once.
inline v8f wmma_f16(v8h a, v8h b, v8f c, simt::Site site = simt::here()) {
  auto value = [](u32 half) { return static_cast<double>(__builtin_bit_cast(_Float16, static_cast<u16>(half))); };
  return simt::multiply<double>(site, a, b, c, value, value);
}

// a and b bf16; products exact, summed in double, rounded once.
inline v8f wmma_bf16(v8s a, v8s b, v8f c, simt::Site site = simt::here()) {
  auto value = [](u32 half) { return static_cast<double>(__builtin_bit_cast(float, half << 16)); };
  return simt::multiply<double>(site, a, b, c, value, value);
}

// v_perm_b32: each byte of the selector takes a byte of low (0..3) or high (4..7), or is 0 (12) or 0xff (13).
inline u32 permute_bytes(u32 high, u32 low, u32 selector) {
  uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 select = selector >> 8 * i & 0xff;
    if (select > 7 && select != 12 && select != 13) simt::fault("permute_bytes: selector %u is not emulated", select);
    result |= (select > 7 ? (select == 13 ? 0xff : 0) : static_cast<u32>(both >> 8 * select & 0xff)) << 8 * i;
  }
  return result;
}

// v_rcp_f32 is within one ulp; the machine's poison says on which side, so that nothing may depend on it.
inline float reciprocal_estimate(float value) {
  float exact = 1.0f / value;
  return nextafterf(exact, simt::machine.backwards ? INFINITY : 0.0f);
}

// v_rsq_f32 and v_exp_f32 are within one ulp; here they are as near as the C library's.
inline float inverse_root_estimate(float value) { return 1.0f / sqrtf(value); }
inline float exp2_estimate(float value) { return exp2f(value); }

inline float clamp(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

inline int sum_of_bytes(u32 word) {
  int sum = 0;
  for (int i = 0; i < 4; i++) sum += static_cast<signed char>(word >> 8 * i);
  return sum;
}

template <class Vector>
inline Vector load_once(const Vector* source) {
  return *source;
}

// Makes what this workgroup wrote visible to others, and counts it: the count before.
inline int arrive(int* counter) {
  int before = *counter;
  *counter = before + 1;
  return before;
}
inline void release_to_device() {}
inline void acquire_from_device() {}
inline void keep_order() {}
template <class Value>
inline void forget(Value&) {}
