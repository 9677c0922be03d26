"""Orders of activation codes in memory: row after row, or in tiles as the prefill GEMM's lanes read them.

codes uint8 [P, M, K], or [P, T, K/32, 32, 16] with T = M / 16 rounded up: entry l of a block of 32 inputs holds inputs
16 * (l // 16) .. + 15 of row l % 16 of its tile. Rows past M are zeros. Both hold the same codes.
"""

import torch
from torch.nn.functional import pad

from paroquant_gfx1201.errors import PluginError

TILE_ROWS, BLOCK = 16, 32


def refusal(element: str, granularity: str) -> str:
    """Why no kernel writes or reads such rows in tiles; empty where they do."""
    if (element, granularity) == ("e4m3", "group"):
        return "no kernel takes e4m3 rows with a scale per group in tiles"
    return ""


def shape_of_tiles(rotations: int, rows: int, inputs: int) -> tuple[int, ...]:
    """Of the tiles that hold [P, M, K]."""
    return (rotations, -(-rows // TILE_ROWS), inputs // BLOCK, 2 * TILE_ROWS, BLOCK // 2)


def in_tiles(codes: torch.Tensor) -> bool:
    """Whether codes of a producer are in tiles."""
    return codes.dim() == 5


def sizes(codes: torch.Tensor, rows: int) -> tuple[int, int, int]:
    """P, M and K of codes in either order. Raises PluginError where they are not of ``rows`` rows."""
    if in_tiles(codes):
        inputs = codes.shape[2] * BLOCK
        if codes.shape == shape_of_tiles(len(codes), rows, inputs):
            return len(codes), rows, inputs
    elif codes.dim() == 3 and codes.shape[1] == rows:
        return len(codes), rows, codes.shape[2]
    raise PluginError(f"codes of shape {list(codes.shape)} are not of {rows} rows")


def to_tiles(codes: torch.Tensor) -> torch.Tensor:
    """[P, M, K] as tiles."""
    rotations, rows, inputs = codes.shape
    filled = pad(codes, (0, 0, 0, -rows % TILE_ROWS))
    split = filled.view(rotations, -1, TILE_ROWS, inputs // BLOCK, 2, BLOCK // 2)
    return split.permute(0, 1, 3, 4, 2, 5).reshape(shape_of_tiles(rotations, rows, inputs))


def from_tiles(tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """[P, M, K] of tiles."""
    rotations, count, blocks = tiles.shape[:3]
    split = tiles.view(rotations, count, blocks, 2, TILE_ROWS, BLOCK // 2).permute(0, 1, 4, 2, 3, 5)
    return split.reshape(rotations, count * TILE_ROWS, blocks * BLOCK)[:, :rows]
