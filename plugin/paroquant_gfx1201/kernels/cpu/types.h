// Sixteen floats at once, in whatever registers the machine has, and bfloat16 as torch rounds it.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
  uint16_t bits;
};

inline Floats load(const float *from) {
  Floats made;
  std::memcpy(&made, from, sizeof made);
  return made;
}
inline Floats load(const BFloat16 *from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
inline void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

// The upper halves of the words, rounded to nearest, ties to even; NaN becomes the quiet one.
inline Words rounded(Floats value) {
  const Words bits = (Words)value;
  const Words up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Words nan = (Words)(value != value);
  return (up & ~nan) | (nan & 0x7fc0u);
}
inline void store(BFloat16 *to, Floats value) {
  const Halves bits = __builtin_convertvector(rounded(value), Halves);
  std::memcpy(to, &bits, sizeof bits);
}

}  // namespace
