// The end of a product whose k is split over the waves of a workgroup, and over `shares` workgroups: waves' sums meet in
// LDS; the shares' in memory, where the last workgroup to arrive adds them in a fixed order.
//
// partial f32 [shares, M, N] and arrived int32, one for each block of outputs, zero before and after, where shares > 1.
#pragma once
#include "encode.h"

// 8 consecutive outputs as bf16.
DEVICE void store_outputs(u16* y, const float* sum) {
  v4i packed;
  for (int pair = 0; pair < 4; pair++)
    packed[pair] = encode_bf16(sum[2 * pair]) | encode_bf16(sum[2 * pair + 1]) << 16;
  *reinterpret_cast<v4i*>(y) = packed;
}

// total: a lane's sums of TILES x ROW_TILES tiles, 8 consecutive outputs of one row of each. block: of 16 * TILES outputs.
template <int WAVES, int TILES, int ROW_TILES>
DEVICE void add_up(const float (*total)[ROW_TILES][8], u16* y, float* partial, int* arrived, int block, int share,
                   int shares, int M, int N) {
  constexpr int WIDTH = 32, ELEMENTS = TILES * ROW_TILES * 8;
  SHARED(float, sums, WAVES * ELEMENTS * WIDTH);
  SHARED(int, before, 1);
  int lane = thread_id() % WIDTH, wave = thread_id() / WIDTH;
  for (int t = 0; t < TILES; t++)
    for (int r = 0; r < ROW_TILES; r++)
      for (int v = 0; v < 8; v++)
        sums[((wave * TILES + t) * ROW_TILES + r) * 8 * WIDTH + v * WIDTH + lane] = total[t][r][v];
  workgroup_barrier();

  // Each wave finishes whole tiles of 16 outputs x 16 rows.
  constexpr int TURNS = (TILES * ROW_TILES + WAVES - 1) / WAVES;
  float finished[TURNS][8];
  bool alone = shares == 1;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int index = turn * WAVES + wave;
    if (index >= TILES * ROW_TILES) break;
    float* sum = finished[turn];
    for (int v = 0; v < 8; v++) {
      const float* source = sums + index * 8 * WIDTH + v * WIDTH + lane;
      sum[v] = source[0];
      for (int other = 1; other < WAVES; other++) sum[v] += source[other * ELEMENTS * WIDTH];
    }
    int row = index % ROW_TILES * 16 + lane % 16, output = (block * TILES + index / ROW_TILES) * 16 + lane / 16 * 8;
    if (!alone && row < M && output < N) {
      float* place = partial + (static_cast<long>(share) * M + row) * N + output;
      for (int v = 0; v < 8; v++) place[v] = sum[v];
    }
  }
  if (!alone) {
    release_to_device();
    workgroup_barrier();
    if (thread_id() == 0) before[0] = arrive(arrived + block);
    workgroup_barrier();
    if (before[0] != shares - 1) return;
    acquire_from_device();
    if (thread_id() == 0) arrived[block] = 0;
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int index = turn * WAVES + wave;
    if (index >= TILES * ROW_TILES) break;
    float* sum = finished[turn];
    int row = index % ROW_TILES * 16 + lane % 16, output = (block * TILES + index / ROW_TILES) * 16 + lane / 16 * 8;
    if (row < M && output < N) {
      long place = static_cast<long>(row) * N + output;
      for (int v = 0; v < 8 && !alone; v++) {
        sum[v] = partial[place + v];
        for (int other = 1; other < shares; other++) sum[v] += partial[static_cast<long>(other) * M * N + place + v];
      }
      store_outputs(y + place, sum);
    }
  }
}
