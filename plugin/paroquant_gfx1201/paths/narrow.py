"""Linear layers that a checkpoint leaves bf16 and that have few outputs, as GatedDeltaNet's gate projections.

On gfx1201 the skinny GEMM multiplies up to 64 rows of them by their weight, and torch more rows.
"""

import torch

from paroquant_gfx1201.kernels.hip import skinny
from paroquant_gfx1201.kernels.hip.decode import ROWS, counters
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.paths import hip

PATH = "hip_gfx1201"
MOST_ROWS = ROWS[-1]


def is_asked(mode: Mode, device: torch.device) -> bool:
    """Whether the path comes into question there: on a GPU, or where RADIANCE_PQ_PATH names it."""
    return mode.path == PATH or (mode.path == "auto" and device.type != "cpu")


def refusal(weight: torch.Tensor, mode: Mode) -> str:
    """Why it does not multiply by ``weight`` [N, K]; empty where it does."""
    if not mode.skinny:
        return "RADIANCE_SKINNY_GEMM=0"
    if (found := hip.architecture(weight.device)) != hip.TARGET:
        return f"it runs on {hip.TARGET}, not on {found}"
    return skinny.refusal(*weight.shape, weight.dtype) or hip.reason_against_launching()


def prepare(weight: torch.Tensor) -> None:
    """Make the launches' counters before the first of them, which may be the one that a graph captures."""
    counters(weight.device, -(-len(weight) // skinny.TILE))


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y bf16 [M, N] of rows bf16 [M, K], any M, by a weight [N, K] that ``refusal`` does not refuse."""
    if not 0 < len(rows) <= MOST_ROWS:
        return torch.nn.functional.linear(rows, weight)
    return hip.run(skinny.skinny(rows.contiguous(), weight), rows.device)[0]
