// The skinny GEMMs that are built: up to 16, 32 and 64 rows.
#include "skinny.h"

SKINNY(16)
SKINNY(32)
SKINNY(64)
