// y = sum over groups of s_a s_w dot(a, q - mid), minus the zero-scales times the row sums: int8 activations, weight
// codes of at most 5 bits. The dot of a group is exact in int32; groups are folded in float32 in their order, as the
// GPU kernels' loops do.
//
// Codes are stored as the four-byte dots read them, all groups of 16 outputs one after the other:
// [outputs / 16][groups][group_size / 4][16][4], unsigned and without the midpoint taken off, which is done once a group
// by the sum of the activations. Beside them [outputs / 16][groups][2][16]: scales, and zero-scales.

#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>

namespace {

using Ints = __m512i;

inline Ints splat(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints load_codes(const uint8_t *from) { return _mm512_loadu_si512(from); }
inline Ints dot4(Ints sum, Ints codes, int32_t four_activations) {
  // _mm512_dpbusd_epi32, for which GCC 12 copies the sum before and after.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(splat(four_activations)));
  return sum;
}
inline Floats to_floats(Ints value) { return (Floats)_mm512_cvtepi32_ps(value); }

}  // namespace

#else

namespace {

using Ints = Integers;

inline Ints splat(int32_t value) { return Ints{} + value; }
inline Ints load_codes(const uint8_t *from) {
  Ints made;
  std::memcpy(&made, from, sizeof made);
  return made;
}
inline Ints dot4(Ints sum, Ints codes, int32_t four_activations) {
  for (int k = 0; k < 4; ++k) sum += (codes >> (8 * k) & 255) * int32_t(int8_t(four_activations >> (8 * k)));
  return sum;
}
inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

}  // namespace

#endif

namespace {

struct Problem {
  int64_t rows, groups, group_size, outputs;
  const int8_t *activations;     // [groups][rows][group_size]
  const float *group_scales;     // [groups][rows], or null
  const float *token_scales;     // [rows], or null
  const float *sums;             // [groups][rows]: of the codes
  const float *corrections;      // [groups][rows]: what the zero-scales are multiplied by
  const uint8_t *codes;          // see above
  const float *scales;           // see above
  int32_t midpoint;
  int64_t y_stride;
};

// ROWS rows of COLUMNS times sixteen outputs, from `row` and from block `block` of 16.
template <int ROWS, int COLUMNS, typename Output>
void tile(const Problem &p, int64_t row, int64_t block, Output *y) {
  Floats total[ROWS][COLUMNS] = {};
  const int64_t fours = p.group_size / 4;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int8_t *a = p.activations + (group * p.rows + row) * p.group_size;
    const int64_t place = group * p.rows + row;
    const uint8_t *w[COLUMNS];
    Ints dots[ROWS][COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) w[c] = p.codes + ((block + c) * p.groups + group) * fours * 4 * LANES;
    for (int m = 0; m < ROWS; ++m)
      for (int c = 0; c < COLUMNS; ++c) dots[m][c] = splat(-p.midpoint * int32_t(p.sums[place + m]));
    for (int64_t k = 0; k < fours; ++k) {
      Ints weights[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) weights[c] = load_codes(w[c] + k * 4 * LANES);
      for (int m = 0; m < ROWS; ++m) {
        int32_t four;
        std::memcpy(&four, a + m * p.group_size + 4 * k, 4);
        for (int c = 0; c < COLUMNS; ++c) dots[m][c] = dot4(dots[m][c], weights[c], four);
      }
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const float *of = p.scales + ((block + c) * p.groups + group) * 2 * LANES;
      const Floats scale = load(of), zero_scale = load(of + LANES);
      for (int m = 0; m < ROWS; ++m) {
        const Floats by = scale * (p.group_scales ? p.group_scales[place + m] : 1.0f);
        total[m][c] += to_floats(dots[m][c]) * by;
        total[m][c] += zero_scale * p.corrections[place + m];
      }
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int c = 0; c < COLUMNS; ++c) {
      const Floats value = p.token_scales ? total[m][c] * p.token_scales[row + m] : total[m][c];
      store(y + (row + m) * p.y_stride + (block + c) * LANES, value);
    }
}

constexpr int ROWS = 6;  // twelve sums of dots, twelve of groups and two weights fit 32 registers

template <int COLUMNS, typename Output>
void column(const Problem &p, int64_t block, Output *y) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) tile<ROWS, COLUMNS>(p, row, block, y);
  switch (p.rows - row) {
    case 5: return tile<5, COLUMNS>(p, row, block, y);
    case 4: return tile<4, COLUMNS>(p, row, block, y);
    case 3: return tile<3, COLUMNS>(p, row, block, y);
    case 2: return tile<2, COLUMNS>(p, row, block, y);
    case 1: return tile<1, COLUMNS>(p, row, block, y);
  }
}

template <typename Output>
void product(const Problem &p, Output *y) {
  const int64_t blocks = p.outputs / LANES;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; block += 2) {
    if (block + 2 <= blocks)
      column<2>(p, block, y);
    else
      column<1>(p, block, y);
  }
}

}  // namespace

// y [rows][y_stride], float32 or (as_bf16) bfloat16, of which `outputs` columns are written; outputs a multiple of 16,
// group_size of 4. Exactly one of group_scales and token_scales.
extern "C" void paroquant_product(int64_t rows, int64_t groups, int64_t group_size, int64_t outputs,
                                  const int8_t *activations, const float *group_scales, const float *token_scales,
                                  const float *sums, const float *corrections, const uint8_t *codes,
                                  const float *scales, int32_t midpoint, int32_t as_bf16, int64_t y_stride, void *y) {
  const Problem p{rows,        groups, group_size, outputs, activations, group_scales, token_scales, sums,
                  corrections, codes,  scales,     midpoint, y_stride};
  if (as_bf16)
    product(p, static_cast<BFloat16 *>(y));
  else
    product(p, static_cast<float *>(y));
}
