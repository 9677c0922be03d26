"""On-disk formats: ParoQuant int4 (AWQ words) and int5-bitplane."""

from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec

__all__ = ["FormatSpec", "Projection"]
