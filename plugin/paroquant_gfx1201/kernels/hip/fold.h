// One group's product of 16 outputs and 16 rows, and how it is folded into f32 sums. Outputs are the rows of the matrix
// instruction: a lane holds 8 consecutive outputs of one activation row.
#pragma once
#include "encode.h"
#include "rotate.h"
#include "rows.h"
#include "weights.h"

template <Element ELEMENT>
struct Sum {
  using type = v8f;
};
template <>
struct Sum<INT8> {
  using type = v8i;
};

template <Bytes BYTES, class Sums>
DEVICE Sums add_product(Sums sum, v2i weights, v2i rows) {
  if constexpr (BYTES == FLOATS)
    return wmma_e4m3(weights, rows, sum);
  else if constexpr (BYTES == SIGNED)
    return wmma_i8_i8(weights, rows, sum);
  else
    return wmma_u8_i8(weights, rows, sum);
}

// With the zero point in the loop codes may stay unsigned: the row sum takes their midpoint out along with it.
enum ZeroPoint { LOOP, EPILOGUE };
template <Element ELEMENT, ZeroPoint ZERO>
constexpr Bytes BYTES_OF = ELEMENT == E4M3 ? FLOATS : ZERO == LOOP ? UNSIGNED : SIGNED;

DEVICE v2i operand(const u32* bytes, int block, int instruction) {
  const u32* word = bytes + block * 4 + instruction * 2;
  return v2i{static_cast<int>(word[0]), static_cast<int>(word[1])};
}

// A lane's bytes of a group of one activation row: of its row, or of the tile that has it.
template <int GROUP, Order ORDER = ROW_MAJOR>
DEVICE void load_rows(const u8* from, int group, int lane, v4i* rows) {
  const u8* source = from + group * GROUP * (ORDER == ROW_MAJOR ? 1 : 16);
  u32 place = ORDER == ROW_MAJOR ? lane / 16 * 16 : lane * 16;
  for (int block = 0; block < GROUP / 32; block++)
    rows[block] = *reinterpret_cast<const v4i*>(source + place + block * (ORDER == ROW_MAJOR ? 32 : 512));
}

// A lane's weights of one group and 16 outputs: packed, and as bytes. fifth: FOLDED's shifts in the first word.
template <Format FORMAT, Bytes BYTES, int GROUP>
struct Fragment {
  static constexpr int QUADS = GROUP / 64;
  v4i nibbles[QUADS];
  u32 fifth[QUADS];

  METHOD void load(const v4i* codes, const u32* plane, int group, int tile, int N, int lane) {
    long place = static_cast<long>(group) * (N / 16) + tile;
    for (int quad = 0; quad < QUADS; quad++) {
      nibbles[quad] = load_once(codes + (place * QUADS + quad) * WAVE + lane);
      fifth[quad] = FORMAT == INT5 ? load_once(plane + (place * WAVE + lane) * QUADS + quad) : 0;
    }
    if constexpr (FORMAT == FOLDED) fifth[0] = load_once(plane + static_cast<long>(group) * N + tile * 16 + lane % 16);
  }

  METHOD void expand(v4i table, u32* bytes) const {
    for (int quad = 0; quad < QUADS; quad++) {
      if constexpr (FORMAT == FOLDED)
        unpack_folded(nibbles[quad], fifth[0], quad, bytes + 8 * quad);
      else
        unpack<FORMAT, BYTES>(nibbles[quad], fifth[quad], table, bytes + 8 * quad);
    }
  }
};

// The 16 values of a projection's codes, for LLOYD: tables int32 [P, 4].
template <Format FORMAT>
DEVICE v4i table_of(const u32* tables, int rotation) {
  if constexpr (FORMAT == LLOYD) return reinterpret_cast<const v4i*>(tables)[rotation];
  return v4i{};
}

// FOLDED: the sums of a lane's 8 outputs times their scales.
template <Format FORMAT>
DEVICE void scale_outputs(const u8* steps, int tile, int lane, float* sum) {
  if constexpr (FORMAT == FOLDED) {
    const float* scales = reinterpret_cast<const float*>(steps) + tile * 16 + lane / 16 * 8;
    for (int v = 0; v < 8; v++) sum[v] *= scales[v];
  }
}

// What a lane folds the sums of its 8 outputs with: scales and zero points, or MXFP4's exponents of each block.
template <Format FORMAT, Element ELEMENT, int GROUP, ZeroPoint ZERO = LOOP>
struct Steps {
  static constexpr int BLOCKS = GROUP / 32;
  static constexpr Bytes BYTES = BYTES_OF<ELEMENT, ZERO>;
  v4i steps[2];
  v2i exponents[BLOCKS];

  METHOD void load(const u8* source, int group, int tile, int N, int lane) {
    int output = tile * 16 + lane / 16 * 8;
    if constexpr (FORMAT == MXFP4) {
      for (int block = 0; block < BLOCKS; block++)
        exponents[block] =
            *reinterpret_cast<const v2i*>(source + (static_cast<long>(group) * BLOCKS + block) * N + output);
    } else if constexpr (FORMAT != FOLDED) {
      const v4i* words = reinterpret_cast<const v4i*>(source + (static_cast<long>(group) * N + output) * 4);
      steps[0] = words[0];
      steps[1] = words[1];
    }
  }

  // Adds the group's part to `total`. bytes: a lane's weights, 4 words of each block; rows: its activations. TOKEN: the
  // rows have no scale here.
  template <bool TOKEN>
  METHOD void fold(const u32* bytes, const v4i* rows, float row_scale, float sum_of_codes, float* total) {
    if constexpr (FORMAT == FOLDED) {
      v8f sum = {};
      for (int v = 0; v < 8 && TOKEN; v++) sum[v] = total[v];
      for (int block = 0; block < BLOCKS; block++) {
        sum = add_product<BYTES>(sum, operand(bytes, block, 0), rows[block].xy);
        sum = add_product<BYTES>(sum, operand(bytes, block, 1), rows[block].zw);
      }
      for (int v = 0; v < 8; v++) total[v] = TOKEN ? sum[v] : __builtin_fmaf(sum[v], row_scale, total[v]);
    } else if constexpr (FORMAT == MXFP4) {
      float scaled[8] = {};
      for (int block = 0; block < BLOCKS; block++) {
        forget(exponents[block]);  // or their scales stay in registers for the next tile of rows
        v8f sum = {};
        sum = add_product<BYTES>(sum, operand(bytes, block, 0), rows[block].xy);
        sum = add_product<BYTES>(sum, operand(bytes, block, 1), rows[block].zw);
        for (int v = 0; v < 8; v++)
          scaled[v] = __builtin_fmaf(sum[v], from_e8m0(exponents[block][v / 4] >> 8 * (v % 4) & 0xff), scaled[v]);
      }
      for (int v = 0; v < 8; v++) total[v] = __builtin_fmaf(scaled[v], row_scale * BYTE_SCALE<FORMAT>, total[v]);
    } else {
      typename Sum<ELEMENT>::type sum = {};
      for (int block = 0; block < BLOCKS; block++) {
        sum = add_product<BYTES>(sum, operand(bytes, block, 0), rows[block].xy);
        sum = add_product<BYTES>(sum, operand(bytes, block, 1), rows[block].zw);
      }
      for (int v = 0; v < 8; v++) {
        u32 step = steps[v / 4][v % 4];
        float scale = from_f16(step & 0xffff), centred;
        if constexpr (ZERO == EPILOGUE) {
          centred = static_cast<float>(sum[v]);
          if constexpr (ELEMENT == E4M3) scale *= BYTE_SCALE<FORMAT>;
        } else if constexpr (ELEMENT == INT8) {
          // Integers below 2^24: exact, and so is their difference.
          int zero = step >> 16;
          centred = static_cast<float>(sum[v] - zero * static_cast<int>(sum_of_codes));
        } else {
          float zero = (static_cast<float>(step >> 16) - E4M3_ORIGIN<FORMAT>) / BYTE_SCALE<FORMAT>;
          centred = __builtin_fmaf(-zero, sum_of_codes, sum[v]);
          scale *= BYTE_SCALE<FORMAT>;
        }
        total[v] = __builtin_fmaf(centred, scale * row_scale, total[v]);
      }
    }
  }
};
