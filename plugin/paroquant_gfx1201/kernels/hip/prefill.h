// Prefill GEMM: many rows, so that the time is the matrix unit's.
//
// Arguments as of decode.h; scales f32 [P, G, M] per group or [P, M] per token; any M; codes in either order of rows.h.
// Zero points are corrected group by group, or after all of them by one f16 product of rank G.
//
// Grid (N / 128 rounded up, M / 128 rounded up): 8 waves, 4 along the outputs with 32 each and 2 along the rows with 64
// each. Every wave unpacks 16 outputs of the next group into LDS while all multiply this one; activation rows go from
// memory into the matrix unit's registers.
#pragma once
#include "fold.h"
#include "split.h"

constexpr int BLOCK_WAVES = 8, BLOCK_TILES = 8, WAVE_TILES = 2, WAVE_ROWS = 4, BLOCK_ROWS = 128;

// Adds the product of f16 row sums and `zeros`, f16 [N, groups rounded up to 16]: minus each group's scale * (zero point
// - midpoint). Row sums are of scaled codes where scales are per group, as reference.row_sums has them.
template <bool TOKEN>
DEVICE void add_zero_points(const v8h* zeros, const float* row_sums, const float* scales, int tile, const int* rows,
                            int groups, int M, int lane, float (*total)[WAVE_ROWS][8]) {
  int chunks = (groups + 15) / 16;
  for (int chunk = 0; chunk < chunks; chunk++) {
    v8h zero[WAVE_TILES];
    for (int t = 0; t < WAVE_TILES; t++)
      zero[t] = zeros[(static_cast<long>(tile + t) * 16 + lane % 16) * chunks * 2 + chunk * 2 + lane / 16];
#pragma unroll
    for (int r = 0; r < WAVE_ROWS; r++) {
      v8h sums;
      for (int i = 0; i < 8; i++) {
        int group = chunk * 16 + lane / 16 * 8 + i;
        long place = static_cast<long>(group < groups ? group : groups - 1) * M + rows[r];  // past the last, zeros are 0
        sums[i] = static_cast<_Float16>(row_sums[place] * (TOKEN ? 1.0f : scales[place]));
      }
#pragma unroll
      for (int t = 0; t < WAVE_TILES; t++) {
        v8f sum;
        for (int v = 0; v < 8; v++) sum[v] = total[t][r][v];
        sum = wmma_f16(zero[t], sums, sum);
        for (int v = 0; v < 8; v++) total[t][r][v] = sum[v];
      }
    }
  }
}

template <Format FORMAT, Element ELEMENT, int GROUP, bool TOKEN, ZeroPoint ZERO, Order ORDER>
DEVICE void multiply_block(const u8* codes, const float* scales, const float* row_sums, const v4i* weights,
                           const u32* plane, const u8* steps, const v8h* zeros, u16* y, int M, int N, int K, int second,
                           int third) {
  constexpr int WORDS = GROUP / 8, PARTS = WORDS / 4;  // of a lane and tile: bytes as words, and as 16-byte parts
  SHARED(v4i, staged, 2 * BLOCK_TILES * PARTS * WAVE);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP, tiles = N / 16;
  if constexpr (FORMAT != MXFP4) wave = same_in_wave(wave);  // MXFP4 spills under clang 22 where the compiler knows
  int unpacked = block_x() * BLOCK_TILES + wave;
  if (unpacked >= tiles) unpacked = tiles - 1;  // never stored
  int slot = wave % 4 * WAVE_TILES, tile = block_x() * BLOCK_TILES + slot;
  bool outside = tile >= tiles;
  if (outside) tile = tiles - WAVE_TILES;
  int rotation = (tile * 16 >= second) + (tile * 16 >= third);
  codes += static_cast<long>(rotation) * places_of<ORDER>(M) * K;
  scales += static_cast<long>(rotation) * (TOKEN ? 1 : groups) * M;
  row_sums += static_cast<long>(rotation) * groups * M;
  int rows[WAVE_ROWS];
  const u8* sources[WAVE_ROWS];
  for (int r = 0; r < WAVE_ROWS; r++) {
    int first = block_y() * BLOCK_ROWS + wave / 4 * 64 + r * 16, row = first + lane % 16;
    rows[r] = row < M ? row : M - 1;  // computed, never stored
    int tile_of_rows = first < M ? first : (M - 1) / 16 * 16;
    sources[r] = codes + static_cast<long>(ORDER == ROW_MAJOR ? rows[r] : tile_of_rows) * K;
  }

  v4i table = table_of<FORMAT>(plane, (unpacked * 16 >= second) + (unpacked * 16 >= third));
  Fragment<FORMAT, BYTES_OF<ELEMENT, ZERO>, GROUP> fragment;
  float total[WAVE_TILES][WAVE_ROWS][8] = {};
  fragment.load(weights, plane, 0, unpacked, N, lane);
  for (int group = 0; group < groups; group++) {
    v4i* buffer = staged + group % 2 * BLOCK_TILES * PARTS * WAVE;
    u32 own[WORDS];
    fragment.expand(table, own);
    for (int part = 0; part < PARTS; part++) {
      v4i words;
      for (int word = 0; word < 4; word++) words[word] = own[part * 4 + word];
      buffer[(wave * PARTS + part) * WAVE + lane] = words;
    }
    workgroup_barrier();  // the other buffer was read before the barrier of the group before
    if (group + 1 < groups) fragment.load(weights, plane, group + 1, unpacked, N, lane);
    u32 bytes[WAVE_TILES][WORDS];
    Steps<FORMAT, ELEMENT, GROUP, ZERO> folds[WAVE_TILES];
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
      load_rows<GROUP, ORDER>(sources[r], group, lane, values);
      float row_scale = TOKEN ? 1.0f : scales[static_cast<long>(group) * M + rows[r]];
      constexpr bool SUMS = HAS_ZERO_POINTS<FORMAT> && ZERO == LOOP;
      float sum_of_codes = !SUMS ? 0.0f : row_sums[static_cast<long>(group) * M + rows[r]];
#pragma unroll
      for (int t = 0; t < WAVE_TILES; t++)
        folds[t].template fold<TOKEN>(bytes[t], values, row_scale, sum_of_codes, total[t][r]);
    }
  }

  if constexpr (ZERO == EPILOGUE)
    add_zero_points<TOKEN>(zeros, row_sums, scales, tile, rows, groups, M, lane, total);
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
        scale_outputs<FORMAT>(steps, tile + t, lane, sum);
        store_outputs(y + static_cast<long>(row) * N + (tile + t) * 16 + lane / 16 * 8, sum);
      }
    }
  }
}

#define PREFILL(FORMAT, format, ELEMENT, element, GROUP, scale, TOKEN, ORDER, order)                                   \
  KERNEL(BLOCK_WAVES* WAVE)                                                                                            \
  prefill_##format##_##element##_g##GROUP##_##scale##order(                                                            \
      const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,               \
      const u8* steps, u16* y, int M, int N, int K, int second, int third) {                                           \
    multiply_block<FORMAT, ELEMENT, GROUP, TOKEN, LOOP, ORDER>(codes, scales, row_sums, weights, plane, steps,         \
                                                               nullptr, y, M, N, K, second, third);                    \
  }                                                                                                                    \
  EXPORT(prefill_##format##_##element##_g##GROUP##_##scale##order)

#define PREFILL_EPILOGUE(FORMAT, format, ELEMENT, element, GROUP, scale, TOKEN)                                        \
  KERNEL(BLOCK_WAVES* WAVE)                                                                                            \
  prefill_##format##_##element##_g##GROUP##_##scale##_tiles_epilogue(                                                  \
      const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,               \
      const u8* steps, const v8h* zeros, u16* y, int M, int N, int K, int second, int third) {                         \
    multiply_block<FORMAT, ELEMENT, GROUP, TOKEN, EPILOGUE, TILED>(codes, scales, row_sums, weights, plane, steps,     \
                                                                   zeros, y, M, N, K, second, third);                  \
  }                                                                                                                    \
  EXPORT(prefill_##format##_##element##_g##GROUP##_##scale##_tiles_epilogue)
