// The decode GEMMs that are built: every format and element, groups of 64 and 128, up to 16, 32 and 64 rows.
#include "decode.h"

#define DECODE_GROUPS(FORMAT, format, ELEMENT, element) \
  DECODE(FORMAT, format, ELEMENT, element, 128, 16)     \
  DECODE(FORMAT, format, ELEMENT, element, 128, 32)     \
  DECODE(FORMAT, format, ELEMENT, element, 128, 64)     \
  DECODE(FORMAT, format, ELEMENT, element, 64, 16)      \
  DECODE(FORMAT, format, ELEMENT, element, 64, 32)      \
  DECODE(FORMAT, format, ELEMENT, element, 64, 64)

DECODE_GROUPS(INT4, int4, INT8, int8)
DECODE_GROUPS(INT4, int4, E4M3, e4m3)
DECODE_GROUPS(INT5, int5, INT8, int8)
DECODE_GROUPS(INT5, int5, E4M3, e4m3)
DECODE_GROUPS(MXFP4, mxfp4, E4M3, e4m3)
DECODE_GROUPS(FOLDED, folded, E4M3, e4m3)
DECODE_GROUPS(LLOYD, lloyd, E4M3, e4m3)
