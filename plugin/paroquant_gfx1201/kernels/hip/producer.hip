// The producers that are built: groups of 64 and 128, one or eight rotations, int8 and e4m3. In tiles only where the prefill
// GEMM reads tiles: any row per token, int8 rows per group.
#include "producer.h"

PRODUCERS(128, 8, int8, INT8)
PRODUCERS(128, 8, e4m3, E4M3)
PRODUCERS(64, 8, int8, INT8)
PRODUCERS(64, 8, e4m3, E4M3)
PRODUCERS(128, 1, int8, INT8)
PRODUCERS(128, 1, e4m3, E4M3)
PRODUCERS(64, 1, int8, INT8)
PRODUCERS(64, 1, e4m3, E4M3)

BY_GROUP(128, 8, int8, INT8, TILED, _tiles)
BY_GROUP(64, 8, int8, INT8, TILED, _tiles)
BY_GROUP(128, 1, int8, INT8, TILED, _tiles)
BY_GROUP(64, 1, int8, INT8, TILED, _tiles)
