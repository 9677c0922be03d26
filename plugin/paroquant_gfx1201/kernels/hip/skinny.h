// Skinny GEMM: few rows by a weight that stays bf16 and has few outputs, as the gate projections of GatedDeltaNet. Its
// bytes are few: what counts is that all of the GPU asks for them at once, so k is cut into many shares.
//
// x bf16 [M, K]; weight bf16 [N, K]; y bf16 [M, N], N a multiple of 8, K of 32; partial and arrived as of split.h.
//
// Grid (N / 16 rounded up, shares): a workgroup has 16 outputs and a share of the steps of 32 k, which its waves take in
// turns. Both operands go from memory into the matrix unit's registers: a lane holds 16 consecutive k of an output or row,
// of which the first of two instructions takes 8.
#pragma once
#include "split.h"

constexpr int SKINNY_WAVES = 4;

template <int ROW_TILES>
DEVICE void multiply_skinny(const v8s* x, const v8s* weight, u16* y, float* partial, int* arrived, int M, int N, int K,
                            int shares) {
  int lane = thread_id() % 32, wave = thread_id() / 32, steps = K / 32;
  int tile = block_x(), share = block_y();
  int output = tile * 16 + lane % 16;
  if (output >= N) output = N - 1;  // computed, never stored
  weight += static_cast<long>(output) * steps * 4 + lane / 16 * 2;
  const v8s* rows[ROW_TILES];
  for (int r = 0; r < ROW_TILES; r++) {
    int row = r * 16 + lane % 16;
    rows[r] = x + static_cast<long>(row < M ? row : M - 1) * steps * 4 + lane / 16 * 2;
  }
  v8f total[ROW_TILES] = {};
  int last = (share + 1) * steps / shares;
  for (int step = share * steps / shares + wave; step < last; step += SKINNY_WAVES) {
    v8s first = weight[step * 4], second = weight[step * 4 + 1];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      total[r] = wmma_bf16(first, rows[r][step * 4], total[r]);
      total[r] = wmma_bf16(second, rows[r][step * 4 + 1], total[r]);
    }
  }
  float sums[1][ROW_TILES][8];
  for (int r = 0; r < ROW_TILES; r++)
    for (int v = 0; v < 8; v++) sums[0][r][v] = total[r][v];
  add_up<SKINNY_WAVES, 1, ROW_TILES>(sums, y, partial, arrived, tile, share, shares, M, N);
}

#define SKINNY(ROWS)                                                                                                   \
  KERNEL(SKINNY_WAVES * 32)                                                                                            \
  skinny_bf16_m##ROWS(const v8s* x, const v8s* weight, u16* y, float* partial, int* arrived, int M, int N, int K,      \
                      int shares) {                                                                                    \
    multiply_skinny<ROWS / 16>(x, weight, y, partial, arrived, M, N, K, shares);                                       \
  }                                                                                                                    \
  EXPORT(skinny_bf16_m##ROWS)
