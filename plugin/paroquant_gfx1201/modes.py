"""How activations are quantized, as one value read from the environment.

A forward of M tokens is in one of two bands. The *decode band* (M <= decode_max_m) always uses one
activation scale per group and corrects the zero point inside the loop. The *prefill band* uses what
the knobs say.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from paroquant_gfx1201 import knobs
from paroquant_gfx1201.errors import PluginError

Element = Literal["int8", "e4m3"]
Granularity = Literal["group", "token"]
ZeroPoint = Literal["loop", "epilogue"]
BandName = Literal["decode", "prefill"]
Order = Literal["rows", "tiles"]


FLOAT_CODES = ("int4-lloyd", "mxfp4")
"""Formats whose code values only an fp8 matrix unit can multiply."""


@dataclass(frozen=True)
class Band:
    """Numerics of one band: activation element, scale granularity, form of the zero-point term.

    order: how a path with kernels for it lays activation codes out; it changes no value.
    """

    element: Element
    granularity: Granularity
    zero_point: ZeroPoint
    order: Order = "rows"


@dataclass(frozen=True)
class Mode:
    """The activation path of a process."""

    enabled: bool
    element: Element
    decode_max_m: int
    prefill_granularity: Granularity
    prefill_zero_point: ZeroPoint
    prefill_order: Order
    fragment_order: bool
    check: bool
    path: str = "auto"
    """The only path that layers may take, or ``auto``: the first that takes them."""
    skinny: bool = True
    """Whether bf16 layers of few outputs may be ours."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Mode":
        """Read RADIANCE_*; raises PluginError for a value or a combination that has no meaning."""
        on = {name: knobs.switch(environment, name) for name in knobs.SWITCHES}
        int8, per_group = on["RADIANCE_PQ_I8"], on["RADIANCE_PQ_PG"]
        per_token, epilogue = on["RADIANCE_PQ_PTOK"], on["RADIANCE_PQ_ZPE"]
        if per_group and not int8:
            raise PluginError("RADIANCE_PQ_PG=1 needs RADIANCE_PQ_I8=1: the tiled per-group band is int8 only")
        if epilogue and not on["RADIANCE_PQ_ATILED"]:
            raise PluginError("RADIANCE_PQ_ZPE=1 needs RADIANCE_PQ_ATILED=1: only the tiled band has an epilogue")
        if epilogue and not (per_group or per_token):
            raise PluginError(
                "RADIANCE_PQ_ZPE=1 needs RADIANCE_PQ_PG=1 or RADIANCE_PQ_PTOK=1: "
                "the row-major per-group band has no epilogue"
            )
        return cls(
            enabled=on["RADIANCE_PAROQUANT"],
            element="int8" if int8 else "e4m3",
            decode_max_m=knobs.integer(environment, "RADIANCE_PQ_DECODE_MAX_M"),
            prefill_granularity="token" if per_token and not per_group else "group",
            prefill_zero_point="epilogue" if epilogue else "loop",
            prefill_order="tiles" if on["RADIANCE_PQ_ATILED"] and (per_group or per_token) else "rows",
            fragment_order=on["RADIANCE_PQ_WPERM"],
            check=on["RADIANCE_PQ_CHECKALL"],
            path=knobs.choice(environment, "RADIANCE_PQ_PATH"),
            skinny=knobs.choice(environment, "RADIANCE_SKINNY_GEMM") != "0",
        )

    def band_name(self, tokens: int) -> BandName:
        """Which band a forward over ``tokens`` rows is in."""
        return "decode" if tokens <= self.decode_max_m else "prefill"

    @property
    def bands(self) -> dict[BandName, Band]:
        """The numerics of both bands."""
        return {
            "decode": Band(self.element, "group", "loop"),
            "prefill": Band(self.element, self.prefill_granularity, self.prefill_zero_point, self.prefill_order),
        }

    def band(self, tokens: int) -> Band:
        """The numerics of a forward over ``tokens`` rows."""
        return self.bands[self.band_name(tokens)]

    def check_format(self, bits: int, name: str) -> None:
        """Raise PluginError when a checkpoint of ``bits`` in format ``name`` cannot run in this mode."""
        if bits == 5 and not self.fragment_order:
            raise PluginError(
                "RADIANCE_PQ_WPERM=0 cannot load an int5 checkpoint: "
                "the fifth bit exists only in fragment order, set RADIANCE_PQ_WPERM=1"
            )
        if self.element == "int8" and name in FLOAT_CODES:
            raise PluginError(
                f"RADIANCE_PQ_I8=1 cannot load a {name} checkpoint: "
                "its weights are e4m3 values, not integers, set RADIANCE_PQ_I8=0"
            )

    def to_json(self) -> dict[str, object]:
        """Plain JSON for the attestation."""
        return asdict(self)
