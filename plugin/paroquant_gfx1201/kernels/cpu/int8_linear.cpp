// y = sum over groups of s_a s_w dot(a, q - mid), minus the zero-scales times the row sums: int8 activations, weight
// codes of at most 5 bits. The dot of a group is exact in int32; groups are folded in float32 in their order, as the
// GPU kernels' loops do.
//
// Codes are stored as the four-byte dots read them: [groups][outputs / 16][group_size / 4][16][4], unsigned and without
// the midpoint taken off, which is done once a group by the sum of the activations.

#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>

namespace {

constexpr int LANES = 16;

using Ints = __m512i;
using Floats = __m512;

inline Ints splat(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints dot4(Ints sum, const uint8_t *codes, int32_t four_activations) {
  return _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(codes), splat(four_activations));
}
inline Floats load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Floats value) { _mm512_storeu_ps(to, value); }
inline Floats product(Ints dots, Floats scales) { return _mm512_mul_ps(_mm512_cvtepi32_ps(dots), scales); }
inline Floats scaled(Floats value, float by) { return _mm512_mul_ps(value, _mm512_set1_ps(by)); }
inline Floats plus_scaled(Floats sum, Floats value, float by) {
  return _mm512_fmadd_ps(value, _mm512_set1_ps(by), sum);
}
inline Floats zero() { return _mm512_setzero_ps(); }

}  // namespace

#else

namespace {

constexpr int LANES = 16;

struct Ints {
  int32_t lane[LANES];
};
struct Floats {
  float lane[LANES];
};

inline Ints splat(int32_t value) {
  Ints made;
  for (int n = 0; n < LANES; ++n) made.lane[n] = value;
  return made;
}
inline Ints dot4(Ints sum, const uint8_t *codes, int32_t four_activations) {
  int8_t a[4];
  std::memcpy(a, &four_activations, 4);
  for (int n = 0; n < LANES; ++n)
    for (int k = 0; k < 4; ++k) sum.lane[n] += int32_t(codes[4 * n + k]) * a[k];
  return sum;
}
inline Floats load(const float *from) {
  Floats made;
  std::memcpy(made.lane, from, sizeof made.lane);
  return made;
}
inline void store(float *to, Floats value) { std::memcpy(to, value.lane, sizeof value.lane); }
inline Floats product(Ints dots, Floats scales) {
  for (int n = 0; n < LANES; ++n) scales.lane[n] *= float(dots.lane[n]);
  return scales;
}
inline Floats scaled(Floats value, float by) {
  for (int n = 0; n < LANES; ++n) value.lane[n] *= by;
  return value;
}
inline Floats plus_scaled(Floats sum, Floats value, float by) {
  for (int n = 0; n < LANES; ++n) sum.lane[n] += value.lane[n] * by;
  return sum;
}
inline Floats zero() { return Floats{}; }

}  // namespace

#endif

namespace {

struct Shape {
  int64_t rows, groups, group_size, outputs;
};

// Sixteen outputs of ROWS rows. Activations [groups][rows][group_size], their scales and row sums [groups][rows]
// (token_scales: [rows]); weight scales and zero-scales [groups][outputs].
template <int ROWS>
void block(const Shape &shape, int64_t row, int64_t output, const int8_t *activations, const float *group_scales,
           const float *token_scales, const float *row_sums, const uint8_t *codes, const float *scales,
           const float *zero_scales, int32_t midpoint, float *y) {
  Floats sums[ROWS];
  for (int m = 0; m < ROWS; ++m) sums[m] = zero();
  const int64_t fours = shape.group_size / 4, blocks = shape.outputs / LANES;
  for (int64_t group = 0; group < shape.groups; ++group) {
    const int8_t *a = activations + (group * shape.rows + row) * shape.group_size;
    const uint8_t *w = codes + (group * blocks + output / LANES) * fours * 4 * LANES;
    Ints dots[ROWS];
    for (int m = 0; m < ROWS; ++m) {
      int32_t total = 0;
      for (int64_t k = 0; k < shape.group_size; ++k) total += a[m * shape.group_size + k];
      dots[m] = splat(-midpoint * total);
    }
    for (int64_t k = 0; k < fours; ++k) {
      for (int m = 0; m < ROWS; ++m) {
        int32_t four;
        std::memcpy(&four, a + m * shape.group_size + 4 * k, 4);
        dots[m] = dot4(dots[m], w + k * 4 * LANES, four);
      }
    }
    const Floats weight_scale = load(scales + group * shape.outputs + output);
    const Floats zero_scale = load(zero_scales + group * shape.outputs + output);
    for (int m = 0; m < ROWS; ++m) {
      const float by = group_scales ? group_scales[group * shape.rows + row + m] : 1.0f;
      sums[m] = plus_scaled(sums[m], product(dots[m], weight_scale), by);
      sums[m] = plus_scaled(sums[m], zero_scale, row_sums[group * shape.rows + row + m]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    const Floats value = token_scales ? scaled(sums[m], token_scales[row + m]) : sums[m];
    store(y + (row + m) * shape.outputs + output, value);
  }
}

}  // namespace

// y float32 [rows][outputs]; outputs a multiple of 16, group_size of 4. Exactly one of group_scales and token_scales.
extern "C" void paroquant_int8_linear(int64_t rows, int64_t groups, int64_t group_size, int64_t outputs,
                                      const int8_t *activations, const float *group_scales, const float *token_scales,
                                      const float *row_sums, const uint8_t *codes, const float *scales,
                                      const float *zero_scales, int32_t midpoint, float *y) {
  const Shape shape{rows, groups, group_size, outputs};
  constexpr int ROWS = 8;
#pragma omp parallel for schedule(static)
  for (int64_t output = 0; output < outputs; output += LANES) {
    int64_t row = 0;
#define BLOCK(N)                                                                                                    \
  block<N>(shape, row, output, activations, group_scales, token_scales, row_sums, codes, scales, zero_scales, midpoint, y)
    for (; row + ROWS <= rows; row += ROWS) BLOCK(ROWS);
    if (row + 4 <= rows) BLOCK(4), row += 4;
    if (row + 2 <= rows) BLOCK(2), row += 2;
    if (row < rows) BLOCK(1);
#undef BLOCK
  }
}
