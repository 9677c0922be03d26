"""What a path is: code that takes some layers, prepares their weights once, and multiplies rows by them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paroquant_gfx1201.modes import Band, Order, ZeroPoint
from paroquant_gfx1201.paths.weights import Weights
from paroquant_gfx1201.reference import Activations


@dataclass(frozen=True, eq=False)
class Product:
    """y [M, N]; how it was summed, ``int32`` or ``f32``; and, for CHECK mode, each rotation's rows on the CPU."""

    y: torch.Tensor
    sums: str
    activations: Callable[[], list[Activations]]


Prepared = Callable[[torch.Tensor, Band], Product]
"""Weights ready to multiply: called with rows [M, K], M > 0, and the numerics of their band."""


class Path(Protocol):
    """One way to multiply a layer."""

    @property
    def name(self) -> str:
        """What the attestation and RADIANCE_PQ_PATH call it."""
        ...

    def refusal(self, weights: Weights, band: Band) -> str:
        """Why it does not multiply ``weights`` with the numerics of ``band``; empty where it does."""
        ...

    def form(self, weights: Weights) -> str:
        """What its kernels multiply: the format, or what it makes of that."""
        ...

    def zero_point(self, band: Band) -> ZeroPoint:
        """The form in which it corrects the zero point there."""
        ...

    def order(self, band: Band) -> Order:
        """How it lays activation codes out there."""
        ...

    def prepare(self, weights: Weights, epilogue: bool) -> Prepared:
        """Bring the weights to their device in the path's own layout; ``epilogue``: a band corrects zeros there."""
        ...
