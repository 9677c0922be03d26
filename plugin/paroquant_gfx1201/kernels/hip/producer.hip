// The producers that are built: groups of 64 and 128, one or eight rotations, int8 and e4m3.
#include "producer.h"

PRODUCERS(128, 8, int8, INT8)
PRODUCERS(128, 8, e4m3, E4M3)
PRODUCERS(64, 8, int8, INT8)
PRODUCERS(64, 8, e4m3, E4M3)
PRODUCERS(128, 1, int8, INT8)
PRODUCERS(128, 1, e4m3, E4M3)
PRODUCERS(64, 1, int8, INT8)
PRODUCERS(64, 1, e4m3, E4M3)
