"""CHECK mode: each layer's output against float64 of the same codes, on live inputs, while serving.

``RADIANCE_PQ_CHECKALL=1``. The error is relative, |y - y64| / |y64| (Frobenius over at most MAX_ROWS
rows of a call). Rows of zeros, as a server's profiling pass may send, prove nothing and are left out.
"""

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.reference import Activations

MAX_ROWS = 256
"""Rows of a call that are compared: with reference.same_codes' chunks, what bounds the memory."""


NOT_FINITE = sys.float_info.max
"""Error of an output that holds NaN or infinity: above every bound, and still a number in JSON."""


@dataclass
class Worst:
    """The largest error of one path so far, where it was, and how much was compared."""

    relative_error: float
    layer: str
    rows: int
    compared_calls: int
    compared_rows: int
    layers: int


class Checker:
    """Collects the worst error of each path of this process."""

    def __init__(self) -> None:
        self._worst: dict[str, Worst] = {}
        self._seen: set[tuple[str, str]] = set()

    def compare(
        self,
        path: str,
        layer: str,
        y: torch.Tensor,
        activations: Activations,
        weight: torch.Tensor,
        offsets: torch.Tensor,
    ) -> bool:
        """Compare y [M, N], as the path returned it, with float64; whether there is something new to report.

        activations, weight and offsets are what the path multiplied (see reference.PreparedWeight).
        """
        live = activations.codes.ne(0).any(-1).any(0).nonzero().flatten()[:MAX_ROWS]
        if not len(live):
            return False
        part = Activations(activations.codes[:, live], activations.scales[:, live], activations.row_sums[:, live])
        expected = reference.same_codes(part, weight, offsets)
        norm = expected.norm()
        if norm == 0:
            return False
        error = ((y[live].double() - expected).norm() / norm).item()
        known = self._worst.get(path)
        first = (path, layer) not in self._seen
        self._seen.add((path, layer))
        layers = sum(seen == path for seen, _ in self._seen)
        if not math.isfinite(error):
            error = NOT_FINITE
        worse = known is None or error > known.relative_error
        if worse:
            calls, rows = (known.compared_calls, known.compared_rows) if known else (0, 0)
            known = Worst(error, layer, len(y), calls, rows, layers)
            self._worst[path] = known
        known.compared_calls += 1
        known.compared_rows += len(live)
        known.layers = layers
        return worse or first

    def document(self) -> dict[str, Any]:
        """Path to its worst, as plain JSON."""
        return {path: asdict(worst) for path, worst in sorted(self._worst.items())}
