// Decode GEMM: few rows, so that the time is the time to read the weights once.
//
// codes bytes [P, M, K]; scales, row_sums f32 [P, G, M]; weights as weights.FragmentWeight, whose levels LLOYD has as its
// plane; y bf16 [M, N]; partial f32 [shares, M, N] and arrived int32 [N / 32], zero before and after, where shares > 1.
//
// Grid (N / 32, shares): a workgroup has 32 outputs of one rotation and a share of the groups, which its waves take in
// turns.
#pragma once
#include "fold.h"
#include "split.h"

constexpr int TILES = 2, WAVES = 4;  // of 16 outputs; of a workgroup

template <Format FORMAT, Element ELEMENT, int GROUP, int ROW_TILES>
DEVICE void multiply(const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,
                     const u8* steps, u16* y, float* partial, int* arrived, int M, int N, int K, int second,
                     int third, int shares) {
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP;
  int tile = block_x(), share = block_y();
  int rotation = (tile * 16 * TILES >= second) + (tile * 16 * TILES >= third);
  codes += static_cast<long>(rotation) * M * K;
  scales += static_cast<long>(rotation) * groups * M;
  row_sums += static_cast<long>(rotation) * groups * M;

  v4i table = table_of<FORMAT>(plane, rotation);
  float total[TILES][ROW_TILES][8] = {};
  int last = (share + 1) * groups / shares;
  for (int group = share * groups / shares + wave; group < last; group += WAVES) {
    u32 bytes[TILES][GROUP / 8];
    Steps<FORMAT, ELEMENT, GROUP> folds[TILES];
    for (int t = 0; t < TILES; t++) {
      Fragment<FORMAT, BYTES_OF<ELEMENT, LOOP>, GROUP> fragment;
      fragment.load(weights, plane, group, tile * TILES + t, N, lane);
      fragment.expand(table, bytes[t]);
      folds[t].load(steps, group, tile * TILES + t, N, lane);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      // Or all rows are loaded at once, and the registers do not hold them.
      if (r > 0 || (FORMAT == LLOYD && ROW_TILES > 2)) keep_order();
      int row = r * 16 + lane % 16;
      if (row >= M) row = M - 1;  // computed, never stored
      v4i rows[GROUP / 32];
      load_rows<GROUP>(codes + static_cast<long>(row) * K, group, lane, rows);
      float row_scale = scales[static_cast<long>(group) * M + row];
      float sum_of_codes = !HAS_ZERO_POINTS<FORMAT> ? 0.0f : row_sums[static_cast<long>(group) * M + row];
#pragma unroll
      for (int t = 0; t < TILES; t++)
        folds[t].template fold<false>(bytes[t], rows, row_scale, sum_of_codes, total[t][r]);
    }
  }
  for (int t = 0; t < TILES; t++)
    for (int r = 0; r < ROW_TILES; r++) scale_outputs<FORMAT>(steps, tile * TILES + t, lane, total[t][r]);

  add_up<WAVES, TILES, ROW_TILES>(total, y, partial, arrived, tile, share, shares, M, N);
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
