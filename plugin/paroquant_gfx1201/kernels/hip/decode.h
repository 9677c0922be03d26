// Decode GEMM: few rows, so that the time is the time to read the weights once.
//
// codes bytes [P, M, K]; scales, row_sums f32 [P, G, M]; weights as weights.FragmentWeight; y bf16 [M, N];
// partial f32 [shares, M, N] and arrived int32 [N / 32], zero before and after, where shares > 1.
//
// Grid (N / 32, shares): a workgroup has 32 outputs of one rotation and a share of the groups, which its waves take in
// turns. Their sums meet in LDS; the shares' in memory, where the last workgroup to arrive adds them in a fixed order.
#pragma once
#include "fold.h"

constexpr int TILES = 2, WAVES = 4;  // of 16 outputs; of a workgroup

template <Format FORMAT, Element ELEMENT, int GROUP, int ROW_TILES>
DEVICE void multiply(const u8* codes, const float* scales, const float* row_sums, const v4i* weights, const u32* plane,
                     const u8* steps, u16* y, float* partial, int* arrived, int M, int N, int K, int second,
                     int third, int shares) {
  constexpr int ELEMENTS = TILES * ROW_TILES * 8;
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
    u32 bytes[TILES][GROUP / 8];
    Steps<FORMAT, ELEMENT, GROUP> folds[TILES];
    for (int t = 0; t < TILES; t++) {
      Fragment<FORMAT, ELEMENT == INT8, GROUP> fragment;
      fragment.load(weights, plane, group, tile * TILES + t, N, lane);
      fragment.expand(bytes[t]);
      folds[t].load(steps, group, tile * TILES + t, N, lane);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      if (r > 0) keep_order();  // or all rows are loaded at once, and the registers do not hold them
      int row = r * 16 + lane % 16;
      if (row >= M) row = M - 1;  // computed, never stored
      v4i rows[GROUP / 32];
      load_rows<GROUP>(codes + static_cast<long>(row) * K, group, lane, rows);
      float row_scale = scales[static_cast<long>(group) * M + row];
      float sum_of_codes = FORMAT == MXFP4 ? 0.0f : row_sums[static_cast<long>(group) * M + row];
#pragma unroll
      for (int t = 0; t < TILES; t++) folds[t].fold(bytes[t], rows, row_scale, sum_of_codes, total[t][r]);
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
      store_outputs(y + place, sum);
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
