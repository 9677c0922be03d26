"""What a path is given to prepare: the projections of one linear layer as they are on this rank."""

from dataclasses import dataclass

import torch

from paroquant_gfx1201.formats.checkpoint import Spec
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection


@dataclass(frozen=True, eq=False)
class Weights:
    """One or several projections on the CPU, outputs one after the other, each behind a rotation of its own.

    All of one spec and K. dtype: of the rows in and out; device: where they are.
    """

    projections: list[Projection] | list[Mxfp4Projection]
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> Spec:
        """Format, bits, group size and number of rotations of every projection."""
        return self.projections[0].spec

    @property
    def inputs(self) -> int:
        """K."""
        return self.projections[0].inputs

    @property
    def widths(self) -> list[int]:
        """Outputs of each projection."""
        return [projection.outputs for projection in self.projections]

    @property
    def kind(self) -> str:
        """int4, int5, int4-lloyd or mxfp4."""
        return f"int{self.spec.bits}" if self.spec.format in ("awq", "int5-bitplane") else self.spec.format
