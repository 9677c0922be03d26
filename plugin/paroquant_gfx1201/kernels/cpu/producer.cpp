// What goes in front of a product: activations rotated group by group in float32 (channel scales folded into the
// matrices), then int8 codes, their scales and their sums, as paroquant_gfx1201/reference.py defines them.

#include <cstdint>
#include <cstring>

#include "types.h"

namespace {

constexpr int64_t LARGEST_GROUP = 256;
constexpr int ROWS = 4, COLUMNS = 4;  // sixteen sums, four of a matrix's and one of x's fit 32 registers

// ROWS rows of COLUMNS times sixteen outputs of one group: x [ROWS][x_stride], matrix [size][size] as y = x @ matrix.
template <int COUNT, int WIDTH>
void rotate_tile(const float *x, int64_t size, const float *matrix, float *y) {
  Floats total[COUNT][WIDTH] = {};
  for (int64_t k = 0; k < size; ++k) {
    Floats of[WIDTH];
    for (int c = 0; c < WIDTH; ++c) of[c] = load(matrix + k * size + c * LANES);
    for (int m = 0; m < COUNT; ++m)
      for (int c = 0; c < WIDTH; ++c) total[m][c] += of[c] * x[m * size + k];
  }
  for (int m = 0; m < COUNT; ++m)
    for (int c = 0; c < WIDTH; ++c) store(y + m * size + c * LANES, total[m][c]);
}

// COUNT rows of one group, x and y [COUNT][size].
template <int COUNT>
void rotate(const float *x, int64_t size, const float *matrix, float *y) {
  int64_t column = 0;
  for (; column + COLUMNS * LANES <= size; column += COLUMNS * LANES)
    rotate_tile<COUNT, COLUMNS>(x, size, matrix + column, y + column);
  for (; column < size; column += LANES) rotate_tile<COUNT, 1>(x, size, matrix + column, y + column);
}

// The largest magnitude as the bits of a float, which order as magnitudes do, NaN above all.
inline uint32_t peak_bits(const float *value, int64_t count) {
  Words peaks = {};
  for (int64_t k = 0; k < count; k += LANES) {
    const Words bits = (Words)load(value + k) & 0x7fffffffu;
    peaks = bits > peaks ? bits : peaks;
  }
  uint32_t peak = 0;
  for (int n = 0; n < LANES; ++n) peak = peaks[n] > peak ? peaks[n] : peak;
  return peak;
}

inline float scale_of(uint32_t peak) {
  float value;
  std::memcpy(&value, &peak, 4);
  return value / 127.0f;
}

// int8 codes of one row of one group, round half to even; returns their sum. A scale of 0 gives codes of 0.
inline int32_t encode(const float *value, int64_t count, float scale, int8_t *codes) {
  const float step = scale > 0.0f ? scale : 1.0f;
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2**23: adding it leaves no bits behind the point
  const Floats most = Floats{} + 127.0f, least = Floats{} - 127.0f;
  Integers sums = {};
  for (int64_t k = 0; k < count; k += LANES) {
    Floats code = load(value + k) / step + ROUNDER - ROUNDER;
    code = code > most ? most : code;
    code = code < least ? least : code;
    code = code == code ? code : Floats{};  // the scale is NaN then, and all that it touches
    const Integers whole = __builtin_convertvector(code, Integers);
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(codes + k, &bytes, sizeof bytes);
    sums += whole;
  }
  int32_t sum = 0;
  for (int n = 0; n < LANES; ++n) sum += sums[n];
  return sum;
}

struct Problem {
  int64_t rows, groups, size, rotations;
  const float *matrices;  // [rotations][groups][size][size], y = x @ matrix
  int8_t *codes;          // [rotations][groups][rows][size]
  float *scales;          // [rotations][groups][rows] by group, [rotations][rows] by token
  float *sums;            // [rotations][groups][rows]
  float *rotated;         // [rotations][groups][rows][size] by token, null by group
};

template <int COUNT, typename Input>
void rows_of_a_group(const Problem &p, const Input *x, int64_t rotation, int64_t group, int64_t row) {
  float taken[COUNT * LARGEST_GROUP], turned[COUNT * LARGEST_GROUP];
  for (int m = 0; m < COUNT; ++m)
    for (int64_t k = 0; k < p.size; k += LANES)
      store(taken + m * p.size + k, load(x + (row + m) * p.groups * p.size + group * p.size + k));
  const int64_t which = rotation * p.groups + group, place = which * p.rows + row;
  float *out = p.rotated ? p.rotated + place * p.size : turned;
  rotate<COUNT>(taken, p.size, p.matrices + which * p.size * p.size, out);
  if (p.rotated) {  // by token: the second pass of the kernels reads what the first wrote as bfloat16
    for (int64_t k = 0; k < COUNT * p.size; k += LANES) store(out + k, (Floats)(rounded(load(out + k)) << 16));
    return;
  }
  for (int m = 0; m < COUNT; ++m) {
    const float scale = scale_of(peak_bits(out + m * p.size, p.size));
    p.scales[place + m] = scale;
    p.sums[place + m] = float(encode(out + m * p.size, p.size, scale, p.codes + (place + m) * p.size));
  }
}

template <typename Input>
void produce(const Problem &p, const Input *x) {
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t rotation = 0; rotation < p.rotations; ++rotation)
    for (int64_t group = 0; group < p.groups; ++group) {
      int64_t row = 0;
      for (; row + ROWS <= p.rows; row += ROWS) rows_of_a_group<ROWS>(p, x, rotation, group, row);
      for (; row < p.rows; ++row) rows_of_a_group<1>(p, x, rotation, group, row);
    }
  if (!p.rotated) return;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t rotation = 0; rotation < p.rotations; ++rotation)
    for (int64_t row = 0; row < p.rows; ++row) {
      uint32_t peak = 0;
      for (int64_t group = 0; group < p.groups; ++group) {
        const uint32_t of = peak_bits(p.rotated + ((rotation * p.groups + group) * p.rows + row) * p.size, p.size);
        peak = of > peak ? of : peak;
      }
      const float scale = scale_of(peak);
      p.scales[rotation * p.rows + row] = scale;
      for (int64_t group = 0; group < p.groups; ++group) {
        const int64_t place = (rotation * p.groups + group) * p.rows + row;
        p.sums[place] = float(encode(p.rotated + place * p.size, p.size, scale, p.codes + place * p.size));
      }
    }
}

}  // namespace

// x [rows][groups * size], bfloat16 (from_bf16) or float32; size a multiple of 16, at most 256. See Problem.
extern "C" void paroquant_produce(int64_t rows, int64_t groups, int64_t size, int64_t rotations, const void *x,
                                  int32_t from_bf16, const float *matrices, int8_t *codes, float *scales, float *sums,
                                  float *rotated) {
  const Problem p{rows, groups, size, rotations, matrices, codes, scales, sums, rotated};
  if (from_bf16)
    produce(p, static_cast<const BFloat16 *>(x));
  else
    produce(p, static_cast<const float *>(x));
}
