// The fused producers that are built: eight rotations, scales per group.
#include "fused.h"

#define FUSED(GROUP, ELEMENT, element)                         \
  COMBINED(SILU_MUL, silu_mul, GROUP, ELEMENT, element)         \
  COMBINED(SIGMOID_GATE, sigmoid_gate, GROUP, ELEMENT, element) \
  COMBINED(GATED_NORM, gated_norm, GROUP, ELEMENT, element)     \
  ADD_NORM(GROUP, ELEMENT, element)

FUSED(128, INT8, int8)
FUSED(128, E4M3, e4m3)
FUSED(64, INT8, int8)
FUSED(64, E4M3, e4m3)
