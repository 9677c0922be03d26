// Orders of activation codes bytes [P, M, K] in memory: row after row, or in tiles of 16 rows as the matrix unit reads
// them, [P, M / 16 rounded up, K / 32, 32 lanes, 16]: lane l of a block has k 16 * (l / 16) .. + 15 of row l % 16, so that a
// wave's load is 512 bytes in a row. Rows past M are zeros there.
#pragma once
#include "device.h"

enum Order { ROW_MAJOR, TILED };

// Rows that have a place in memory.
template <Order ORDER>
DEVICE int places_of(int M) {
  return ORDER == ROW_MAJOR ? M : (M + 15) / 16 * 16;
}

// Where a lane's codes of VALUES consecutive channels from `channel` on lie in a rotation's; a lane's never leave a row's
// 16 bytes of a tile.
template <Order ORDER>
DEVICE long place_of(int row, int channel, int K) {
  if constexpr (ORDER == ROW_MAJOR) return static_cast<long>(row) * K + channel;
  return static_cast<long>(row / 16) * 16 * K + channel / 32 * 512 + channel % 32 / 16 * 256 + row % 16 * 16 + channel % 16;
}
