// The prefill GEMMs that are built: every format and element, groups of 64 and 128, one scale a group or a token; rows in
// tiles where the modes have them, which is per token, and per group by int8.
#include "prefill.h"

#define PREFILL_ALL(FORMAT, format, ELEMENT, element)                         \
  PREFILL(FORMAT, format, ELEMENT, element, 128, group, false, ROW_MAJOR, )   \
  PREFILL(FORMAT, format, ELEMENT, element, 128, token, true, ROW_MAJOR, )    \
  PREFILL(FORMAT, format, ELEMENT, element, 64, group, false, ROW_MAJOR, )    \
  PREFILL(FORMAT, format, ELEMENT, element, 64, token, true, ROW_MAJOR, )     \
  PREFILL(FORMAT, format, ELEMENT, element, 128, token, true, TILED, _tiles)  \
  PREFILL(FORMAT, format, ELEMENT, element, 64, token, true, TILED, _tiles)
#define GROUP_TILES(FORMAT, format, ELEMENT, element)                         \
  PREFILL(FORMAT, format, ELEMENT, element, 128, group, false, TILED, _tiles) \
  PREFILL(FORMAT, format, ELEMENT, element, 64, group, false, TILED, _tiles)

PREFILL_ALL(INT4, int4, INT8, int8)
PREFILL_ALL(INT4, int4, E4M3, e4m3)
PREFILL_ALL(INT5, int5, INT8, int8)
PREFILL_ALL(INT5, int5, E4M3, e4m3)
PREFILL_ALL(MXFP4, mxfp4, E4M3, e4m3)
PREFILL_ALL(FOLDED, folded, E4M3, e4m3)
PREFILL_ALL(LLOYD, lloyd, E4M3, e4m3)

GROUP_TILES(INT4, int4, INT8, int8)
GROUP_TILES(INT5, int5, INT8, int8)

// The zero point in the epilogue, where there is one: by e4m3 rows the modes have it per token only.
#define EPILOGUE_TOKEN(FORMAT, format, ELEMENT, element)                \
  PREFILL_EPILOGUE(FORMAT, format, ELEMENT, element, 128, token, true) \
  PREFILL_EPILOGUE(FORMAT, format, ELEMENT, element, 64, token, true)
#define EPILOGUE_GROUP(FORMAT, format, ELEMENT, element)                 \
  PREFILL_EPILOGUE(FORMAT, format, ELEMENT, element, 128, group, false) \
  PREFILL_EPILOGUE(FORMAT, format, ELEMENT, element, 64, group, false)

EPILOGUE_TOKEN(INT4, int4, INT8, int8)
EPILOGUE_GROUP(INT4, int4, INT8, int8)
EPILOGUE_TOKEN(INT5, int5, INT8, int8)
EPILOGUE_GROUP(INT5, int5, INT8, int8)
EPILOGUE_TOKEN(INT5, int5, E4M3, e4m3)
EPILOGUE_TOKEN(LLOYD, lloyd, E4M3, e4m3)
