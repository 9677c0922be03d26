"""What a checkpoint's config.json says about its quantization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paroquant_gfx1201.errors import PluginError

METHOD = "paroquant"
INT5_FORMAT = "int5-bitplane"
TENSORS = ("qweight", "qzeros", "scales", "theta", "pairs", "channel_scales")
PLANES = ("qweight_hi", "qzeros_hi")


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PluginError(f"quantization_config: {key} must be an integer, not {value!r}")
    return value


@dataclass(frozen=True)
class FormatSpec:
    """Bits per code, group size along K, and number of successive pairwise rotations."""

    bits: int
    group_size: int
    krot: int

    def __post_init__(self) -> None:
        for name, allowed in (("bits", (4, 5)), ("group_size", (64, 128)), ("krot", (1, 8))):
            if getattr(self, name) not in allowed:
                raise PluginError(
                    f"quantization_config: {name}={getattr(self, name)} is not supported, "
                    f"use one of {', '.join(map(str, allowed))}"
                )

    @property
    def levels(self) -> int:
        """Largest code: 15 for int4, 31 for int5."""
        return 2**self.bits - 1

    @property
    def midpoint(self) -> int:
        """The code the kernels subtract so that codes become signed: 8 or 16."""
        return 2 ** (self.bits - 1)

    @property
    def format(self) -> str:
        """The ``format`` value of config.json; int4 has none on disk and is called ``awq`` here."""
        return INT5_FORMAT if self.bits == 5 else "awq"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Suffixes every quantized projection must have."""
        return TENSORS + (PLANES if self.bits == 5 else ())

    def to_config(self) -> dict[str, Any]:
        """The ``quantization_config`` object of config.json."""
        config: dict[str, Any] = {
            "quant_method": METHOD,
            "bits": self.bits,
            "group_size": self.group_size,
            "krot": self.krot,
        }
        if self.bits == 5:
            config["format"] = INT5_FORMAT
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FormatSpec":
        """Read ``quantization_config``; raises PluginError naming the key that is wrong.

        ``zero_point`` is ignored on purpose: writers exist that say false and store asymmetric
        zeros, and qzeros is always present.
        """
        if config.get("quant_method") != METHOD:
            raise PluginError(
                f"quantization_config: quant_method is {config.get('quant_method')!r}, expected {METHOD!r}"
            )
        spec = cls(_integer(config, "bits"), _integer(config, "group_size"), _integer(config, "krot"))
        declared = config.get("format", "awq")
        if declared != spec.format:
            raise PluginError(
                f"quantization_config: format={declared!r} does not go with bits={spec.bits}, expected {spec.format!r}"
            )
        return spec

    def shapes(self, inputs: int, outputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Tensor suffix to (shape, dtype) for a projection of K ``inputs`` and N ``outputs``.

        Raises PluginError when K is not a multiple of the group size or N of the packing width.
        """
        width = 32 if self.bits == 5 else 8
        if inputs % self.group_size:
            raise PluginError(f"K={inputs} is not a multiple of group size {self.group_size}")
        if outputs % width:
            raise PluginError(f"N={outputs} is not a multiple of {width}, needed at {self.bits} bits")
        groups = inputs // self.group_size
        shapes = {
            "qweight": ((inputs, outputs // 8), "int32"),
            "qzeros": ((groups, outputs // 8), "int32"),
            "scales": ((groups, outputs), "float16"),
            "theta": ((self.krot, inputs // 2), "float16"),
            "pairs": ((self.krot, inputs), "int16"),
            "channel_scales": ((1, inputs), "float16"),
        }
        if self.bits == 5:
            shapes["qweight_hi"] = ((inputs, outputs // 32), "int32")
            shapes["qzeros_hi"] = ((groups, outputs // 32), "int32")
        return shapes
