"""How the portable decode kernel cuts its work, by device and by number of rows."""

from dataclasses import dataclass

import torch

from paroquant_gfx1201.kernels.triton.weights import processors


@dataclass(frozen=True)
class DecodeTiles:
    """How the work is cut.

    outputs of a tile; programs: shares of each tile's groups, or, where ``even``, of the groups of all tiles; warps;
    depth of the load pipeline; TOGETHER and WIDTH of the kernel.
    """

    outputs: int
    programs: int
    warps: int
    stages: int
    together: int = 1
    width: int = 0
    even: bool = False


def tiles_for(rows: int, bits: int, codes: torch.dtype, device: torch.device) -> DecodeTiles:
    """The tiles that were fastest on an H200 (docs/benchmarks.md); on AMD, those of ``hip_tiles``."""
    if torch.version.hip is not None:
        return hip_tiles(rows)
    integer = codes == torch.int8
    if rows > 16:
        if bits == 4 and integer:
            return DecodeTiles(128, 2 * processors(device), 4, 3, even=True)
        return DecodeTiles(32, 8 * processors(device), 1, 1, width=4, even=True)
    if integer:
        return DecodeTiles(128, 3, 4, 3) if bits == 4 else DecodeTiles(32, 3, 1, 1, together=2, width=4)
    return DecodeTiles(64, 5, 1, 1 if bits == 5 else 2, width=4)


def hip_tiles(rows: int) -> DecodeTiles:
    """Tiles that spill nothing on gfx1201, with Triton 3.6 and 3.9. Not timed: no such card was at hand."""
    return DecodeTiles(64, 4, 4, 1) if rows <= 16 else DecodeTiles(64, 4, 16, 1)
