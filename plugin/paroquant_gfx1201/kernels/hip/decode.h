// Decode GEMM: few rows, so that the time is the time to read the weights once.
//
// codes bytes [P, M, K]; scales, row_sums f32 [P, G, M]; weights as weights.FragmentWeight; y bf16 [M, N];
// partial f32 [shares, M, N] and arrived int32 [N / 32], zero before and after, where shares > 1.
//
// Grid (N / 32, shares): a workgroup has 32 outputs of one rotation and a share of the groups, which its waves take in
// turns. Their sums meet in LDS; the shares' in memory, where the last workgroup to arrive adds them in a fixed order.
// The outputs are the rows of the matrix instruction: a lane holds 8 consecutive outputs of one activation row.
#pragma once
#include "encode.h"
#include "rotate.h"
#include "weights.h"

constexpr int TILES = 2, WAVES = 4;  // of 16 outputs; of a workgroup

template <Element ELEMENT>
struct Sum {
  using type = v8f;
};
template <>
struct Sum<INT8> {
  using type = v8i;
};

DEVICE v8i add_product(v8i sum, v2i weights, v2i rows) { return wmma_u8_i8(weights, rows, sum); }
DEVICE v8f add_product(v8f sum, v2i weights, v2i rows) { return wmma_e4m3(weights, rows, sum); }

// The weights of one group and 16 outputs as bytes, and what their sums are folded with.
template <Format FORMAT, Element ELEMENT, int GROUP>
struct Fragment {
  static constexpr int QUADS = GROUP / 64, BLOCKS = GROUP / 32;
  u32 bytes[QUADS * 8];
  v4i steps[2];  // of the lane's 8 outputs; for MXFP4 exponents
  v2i exponents[BLOCKS];

  METHOD void load(const v4i* codes, const u32* plane, const void* scales, int group, int tile, int N, int lane) {
    long place = static_cast<long>(group) * (N / 16) + tile;
    for (int quad = 0; quad < QUADS; quad++) {
      v4i nibbles = load_once(codes + (place * QUADS + quad) * WAVE + lane);
      u32 fifth = FORMAT == INT5 ? load_once(plane + (place * WAVE + lane) * QUADS + quad) : 0;
      unpack<FORMAT, ELEMENT == INT8>(nibbles, fifth, bytes + 8 * quad);
    }
    int output = tile * 16 + lane / 16 * 8;
    if constexpr (FORMAT == MXFP4) {
      for (int block = 0; block < BLOCKS; block++)
        exponents[block] = *reinterpret_cast<const v2i*>(static_cast<const u8*>(scales) +
                                                         (static_cast<long>(group) * BLOCKS + block) * N + output);
    } else {
      const v4i* source = reinterpret_cast<const v4i*>(static_cast<const u32*>(scales) + static_cast<long>(group) * N + output);
      steps[0] = source[0];
      steps[1] = source[1];
    }
  }

  METHOD v2i operand(int block, int instruction) const {
    const u32* word = bytes + block * 4 + instruction * 2;
    return v2i{static_cast<int>(word[0]), static_cast<int>(word[1])};
  }

  // Adds this group's part of 16 outputs x 16 rows. `rows`: a lane's 16 bytes of each block.
  METHOD void fold(const v4i* rows, float row_scale, float sum_of_codes, float* total) {
    if constexpr (FORMAT == MXFP4) {
      float scaled[8] = {};
      for (int block = 0; block < BLOCKS; block++) {
        forget(exponents[block]);  // or their scales stay in registers for the next tile of rows
        v8f sum = {};
        sum = add_product(sum, operand(block, 0), rows[block].xy);
        sum = add_product(sum, operand(block, 1), rows[block].zw);
        for (int v = 0; v < 8; v++)
          scaled[v] = __builtin_fmaf(sum[v], from_e8m0(exponents[block][v / 4] >> 8 * (v % 4) & 0xff), scaled[v]);
      }
      for (int v = 0; v < 8; v++) total[v] = __builtin_fmaf(scaled[v], row_scale * BYTE_SCALE<FORMAT>, total[v]);
    } else {
      typename Sum<ELEMENT>::type sum = {};
      for (int block = 0; block < BLOCKS; block++) {
        sum = add_product(sum, operand(block, 0), rows[block].xy);
        sum = add_product(sum, operand(block, 1), rows[block].zw);
      }
      for (int v = 0; v < 8; v++) {
        u32 step = steps[v / 4][v % 4];
        float scale = from_f16(step & 0xffff), centred;
        if constexpr (ELEMENT == INT8) {
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

template <Format FORMAT, Element ELEMENT, int GROUP, int ROW_TILES>
DEVICE void multiply(const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,
                     const void* steps, u16* y, float* partial, int* arrived, int M, int N, int K, int second,
                     int third, int shares) {
  constexpr int BLOCKS = GROUP / 32, ELEMENTS = TILES * ROW_TILES * 8;
  SHARED(float, sums, WAVES * ELEMENTS * WAVE);
  SHARED(int, before, 1);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP;
  int tile = block_x(), share = block_y();
  int rotation = (tile * 16 * TILES >= second) + (tile * 16 * TILES >= third);
  codes += static_cast<long>(rotation) * M * K;
  scales += static_cast<long>(rotation) * groups * M;
  row_sums += static_cast<long>(rotation) * groups * M;

  float total[TILES][ROW_TILES][8] = {};
  int last = (share + 1) * groups / shares;
  for (int group = share * groups / shares + wave; group < last; group += WAVES) {
    Fragment<FORMAT, ELEMENT, GROUP> fragments[TILES];
    for (int t = 0; t < TILES; t++) fragments[t].load(weights, plane, steps, group, tile * TILES + t, N, lane);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      if (r > 0) keep_order();  // or all rows are loaded at once, and the registers do not hold them
      int row = r * 16 + lane % 16;
      if (row >= M) row = M - 1;  // computed, never stored
      v4i rows[BLOCKS];
      const u8* source = codes + static_cast<long>(row) * K + group * GROUP + lane / 16 * 16;
      for (int block = 0; block < BLOCKS; block++) rows[block] = *reinterpret_cast<const v4i*>(source + block * 32);
      float row_scale = scales[static_cast<long>(group) * M + row];
      float sum_of_codes = FORMAT == MXFP4 ? 0.0f : row_sums[static_cast<long>(group) * M + row];
#pragma unroll
      for (int t = 0; t < TILES; t++) fragments[t].fold(rows, row_scale, sum_of_codes, total[t][r]);
    }
  }

  for (int t = 0; t < TILES; t++)
    for (int r = 0; r < ROW_TILES; r++)
      for (int v = 0; v < 8; v++)
        sums[((wave * TILES + t) * ROW_TILES + r) * 8 * WAVE + v * WAVE + lane] = total[t][r][v];
  workgroup_barrier();

  // Each wave finishes whole tiles of 16 outputs x 16 rows: a lane has 8 consecutive outputs of one row.
  constexpr int TURNS = (TILES * ROW_TILES + WAVES - 1) / WAVES;
  float finished[TURNS][8];
  bool alone = shares == 1;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int index = turn * WAVES + wave;
    if (index >= TILES * ROW_TILES) break;
    float* sum = finished[turn];
    for (int v = 0; v < 8; v++) {
      const float* source = sums + index * 8 * WAVE + v * WAVE + lane;
      sum[v] = source[0];
      for (int other = 1; other < WAVES; other++) sum[v] += source[other * ELEMENTS * WAVE];
    }
    int row = index % ROW_TILES * 16 + lane % 16;
    if (!alone && row < M) {
      long place = static_cast<long>(row) * N + (tile * TILES + index / ROW_TILES) * 16 + lane / 16 * 8;
      for (int v = 0; v < 8; v++) partial[static_cast<long>(share) * M * N + place + v] = sum[v];
    }
  }
  if (!alone) {
    release_to_device();
    workgroup_barrier();
    if (thread_id() == 0) before[0] = arrive(arrived + tile);
    workgroup_barrier();
    if (before[0] != shares - 1) return;
    acquire_from_device();
    if (thread_id() == 0) arrived[tile] = 0;
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int index = turn * WAVES + wave;
    if (index >= TILES * ROW_TILES) break;
    float* sum = finished[turn];
    int row = index % ROW_TILES * 16 + lane % 16;
    if (row < M) {
      long place = static_cast<long>(row) * N + (tile * TILES + index / ROW_TILES) * 16 + lane / 16 * 8;
      for (int v = 0; v < 8 && !alone; v++) {
        sum[v] = partial[place + v];
        for (int other = 1; other < shares; other++) sum[v] += partial[static_cast<long>(other) * M * N + place + v];
      }
      v4i packed;
      for (int pair = 0; pair < 4; pair++)
        packed[pair] = encode_bf16(sum[2 * pair]) | encode_bf16(sum[2 * pair + 1]) << 16;
      *reinterpret_cast<v4i*>(y + place) = packed;
    }
  }
}

#define DECODE(FORMAT, format, ELEMENT, element, GROUP, ROWS)                                                          \
  KERNEL(WAVES* WAVE)                                                                                                  \
  decode_##format##_##element##_g##GROUP##_m##ROWS(                                                                    \
      const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,               \
      const u8* steps, u16* y, float* partial, int* arrived, int M, int N, int K, int second, int third, int shares) { \
    multiply<FORMAT, ELEMENT, GROUP, ROWS / 16>(codes, scales, row_sums, weights, plane, steps, y, partial, arrived,   \
                                                M, N, K, second, third, shares);                                       \
  }                                                                                                                    \
  EXPORT(decode_##format##_##element##_g##GROUP##_m##ROWS)
