// Prefill GEMM: many rows, so that the time is the matrix unit's.
//
// Arguments as of decode.h; scales f32 [P, G, M] per group or [P, M] per token; any M.
//
// Grid (N / 128 rounded up, M / 128 rounded up): 8 waves, 4 along the outputs with 32 each and 2 along the rows with 64
// each. Every wave unpacks 16 outputs of the next group into LDS while all multiply this one; activation rows go from
// memory into the matrix unit's registers.
#pragma once
#include "fold.h"

constexpr int BLOCK_WAVES = 8, BLOCK_TILES = 8, WAVE_TILES = 2, WAVE_ROWS = 4, BLOCK_ROWS = 128;

template <Format FORMAT, Element ELEMENT, int GROUP, bool TOKEN>
DEVICE void multiply_block(const u8* codes, const float* scales, const float* row_sums, const v4i* weights,
                           const u32* plane, const u8* steps, u16* y, int M, int N, int K, int second, int third) {
  constexpr int WORDS = GROUP / 8, PARTS = WORDS / 4;  // of a lane and tile: bytes as words, and as 16-byte parts
  SHARED(v4i, staged, 2 * BLOCK_TILES * PARTS * WAVE);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP, tiles = N / 16;
  int unpacked = block_x() * BLOCK_TILES + wave;
  if (unpacked >= tiles) unpacked = tiles - 1;  // never stored
  int slot = wave % 4 * WAVE_TILES, tile = block_x() * BLOCK_TILES + slot;
  bool outside = tile >= tiles;
  if (outside) tile = tiles - WAVE_TILES;
  int rotation = (tile * 16 >= second) + (tile * 16 >= third);
  codes += static_cast<long>(rotation) * M * K;
  scales += static_cast<long>(rotation) * (TOKEN ? 1 : groups) * M;
  row_sums += static_cast<long>(rotation) * groups * M;
  int rows[WAVE_ROWS];
  for (int r = 0; r < WAVE_ROWS; r++) {
    int row = block_y() * BLOCK_ROWS + wave / 4 * 64 + r * 16 + lane % 16;
    rows[r] = row < M ? row : M - 1;  // computed, never stored
  }

  Fragment<FORMAT, ELEMENT == INT8, GROUP> fragment;
  float total[WAVE_TILES][WAVE_ROWS][8] = {};
  fragment.load(weights, plane, 0, unpacked, N, lane);
  for (int group = 0; group < groups; group++) {
    v4i* buffer = staged + group % 2 * BLOCK_TILES * PARTS * WAVE;
    u32 own[WORDS];
    fragment.expand(own);
    for (int part = 0; part < PARTS; part++) {
      v4i words;
      for (int word = 0; word < 4; word++) words[word] = own[part * 4 + word];
      buffer[(wave * PARTS + part) * WAVE + lane] = words;
    }
    workgroup_barrier();  // the other buffer was read before the barrier of the group before
    if (group + 1 < groups) fragment.load(weights, plane, group + 1, unpacked, N, lane);
    u32 bytes[WAVE_TILES][WORDS];
    Steps<FORMAT, ELEMENT, GROUP> folds[WAVE_TILES];
    for (int t = 0; t < WAVE_TILES; t++) {
      folds[t].load(steps, group, tile + t, N, lane);
      for (int part = 0; part < PARTS; part++) {
        v4i words = buffer[((slot + t) * PARTS + part) * WAVE + lane];
        for (int word = 0; word < 4; word++) bytes[t][part * 4 + word] = words[word];
      }
    }
#pragma unroll
    for (int r = 0; r < WAVE_ROWS; r++) {
      if (r > 0) keep_order();
      v4i values[GROUP / 32];
      load_rows<GROUP>(codes + static_cast<long>(rows[r]) * K, group, lane, values);
      float row_scale = TOKEN ? 1.0f : scales[static_cast<long>(group) * M + rows[r]];
      float sum_of_codes = FORMAT == MXFP4 ? 0.0f : row_sums[static_cast<long>(group) * M + rows[r]];
#pragma unroll
      for (int t = 0; t < WAVE_TILES; t++) folds[t].fold(bytes[t], values, row_scale, sum_of_codes, total[t][r]);
    }
  }

  if (outside) return;
#pragma unroll
  for (int r = 0; r < WAVE_ROWS; r++) {
    int row = block_y() * BLOCK_ROWS + wave / 4 * 64 + r * 16 + lane % 16;
    if (row < M) {
      float row_scale = TOKEN ? scales[row] : 1.0f;
#pragma unroll
      for (int t = 0; t < WAVE_TILES; t++) {
        float sum[8];
        for (int v = 0; v < 8; v++) sum[v] = total[t][r][v] * row_scale;
        store_outputs(y + static_cast<long>(row) * N + (tile + t) * 16 + lane / 16 * 8, sum);
      }
    }
  }
}

#define PREFILL(FORMAT, format, ELEMENT, element, GROUP, scale, TOKEN)                                                 \
  KERNEL(BLOCK_WAVES* WAVE)                                                                                            \
  prefill_##format##_##element##_g##GROUP##_##scale(                                                                   \
      const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,               \
      const u8* steps, u16* y, int M, int N, int K, int second, int third) {                                           \
    multiply_block<FORMAT, ELEMENT, GROUP, TOKEN>(codes, scales, row_sums, weights, plane, steps, y, M, N, K, second,  \
                                                  third);                                                              \
  }                                                                                                                    \
  EXPORT(prefill_##format##_##element##_g##GROUP##_##scale)
