"""What a checkpoint's config.json says about its quantization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paroquant_gfx1201.errors import PluginError

METHOD = "paroquant"
GPTQMODEL_METHOD = "paro"
"""GPTQModel's name of the int4 format, with ``format`` paroquant; the tensors are the same."""

INT5_FORMAT = "int5-bitplane"
LLOYD_FORMAT = "int4-lloyd"
ROTATION = ("theta", "pairs", "channel_scales")
TENSORS = ("qweight", "qzeros", "scales", *ROTATION)
PLANES = ("qweight_hi", "qzeros_hi")
LEVELS = ("levels",)


def integer(config: Mapping[str, Any], key: str) -> int:
    """An integer of ``quantization_config``; raises PluginError naming the key for anything else."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PluginError(f"quantization_config: {key} must be an integer, not {value!r}")
    return value


def require(values: Mapping[str, int], allowed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PluginError unless each of ``values`` is one of those allowed for its key."""
    for name, value in values.items():
        if value not in allowed[name]:
            raise PluginError(
                f"quantization_config: {name}={value} is not supported, use one of {', '.join(map(str, allowed[name]))}"
            )


def rotation_shapes(inputs: int, krot: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the tensors of ROTATION for K ``inputs``."""
    return {
        "theta": ((krot, inputs // 2), "float16"),
        "pairs": ((krot, inputs), "int16"),
        "channel_scales": ((1, inputs), "float16"),
    }


@dataclass(frozen=True)
class FormatSpec:
    """Bits per code, group size along K, and number of successive pairwise rotations.

    ``lloyd``: the code stands for one of 16 levels that each projection brings along, not for itself.
    """

    bits: int
    group_size: int
    krot: int
    lloyd: bool = False

    key_tensor = "qweight"
    """The tensor that a projection of this format has and an unquantized one has not."""

    def __post_init__(self) -> None:
        values = {"bits": self.bits, "group_size": self.group_size, "krot": self.krot}
        bits = (4,) if self.lloyd else (4, 5)
        require(values, {"bits": bits, "group_size": (64, 128), "krot": (1, 8)})

    @property
    def levels(self) -> int:
        """Largest code: 15 for int4, 31 for int5."""
        return 2**self.bits - 1

    @property
    def midpoint(self) -> float:
        """What the kernels subtract so that codes become signed: 8 or 16; 7.5 for Lloyd levels."""
        return 7.5 if self.lloyd else float(2 ** (self.bits - 1))

    @property
    def format(self) -> str:
        """The ``format`` value of config.json; int4 has none on disk and is called ``awq`` here."""
        if self.lloyd:
            return LLOYD_FORMAT
        return INT5_FORMAT if self.bits == 5 else "awq"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Suffixes every quantized projection must have."""
        return TENSORS + (PLANES if self.bits == 5 else ()) + (LEVELS if self.lloyd else ())

    def to_config(self) -> dict[str, Any]:
        """The ``quantization_config`` object of config.json."""
        config: dict[str, Any] = {
            "quant_method": METHOD,
            "bits": self.bits,
            "group_size": self.group_size,
            "krot": self.krot,
        }
        if self.format != "awq":
            config["format"] = self.format
        return config

    def to_gptqmodel_config(self) -> dict[str, Any]:
        """The ``quantization_config`` that GPTQModel writes and reads; raises PluginError for all but int4."""
        if self.format != "awq":
            raise PluginError(f"GPTQModel has no {self.format} format")
        sizes = {"bits": self.bits, "group_size": self.group_size, "krot": self.krot}
        # It knows symmetric quantization only by name: the zero points are stored and read all the same.
        return {"quant_method": GPTQMODEL_METHOD, "format": "paroquant", **sizes, "sym": True, "desc_act": False}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FormatSpec":
        """Read ``quantization_config``; raises PluginError naming the key that is wrong.

        ``zero_point`` and ``sym`` are ignored on purpose: writers exist that say symmetric and store
        asymmetric zeros, and qzeros is always present.
        """
        method = config.get("quant_method")
        if method not in (METHOD, GPTQMODEL_METHOD):
            raise PluginError(f"quantization_config: quant_method is {method!r}, expected {METHOD!r}")
        declared = config.get("format", "awq")
        if method == GPTQMODEL_METHOD and declared == "paroquant":
            declared = "awq"
        lloyd = declared == LLOYD_FORMAT
        spec = cls(integer(config, "bits"), integer(config, "group_size"), integer(config, "krot"), lloyd)
        if declared != spec.format:
            raise PluginError(
                f"quantization_config: format={declared!r} does not go with bits={spec.bits}, expected {spec.format!r}"
            )
        return spec

    def sizes(self, key_shape: tuple[int, ...]) -> tuple[int, int]:
        """(K, N) of a projection whose ``key_tensor`` has this 2-D shape."""
        return key_shape[0], key_shape[1] * 8

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
            **rotation_shapes(inputs, self.krot),
        }
        if self.lloyd:
            shapes["levels"] = ((16,), "float32")
        if self.bits == 5:
            shapes["qweight_hi"] = ((inputs, outputs // 32), "int32")
            shapes["qzeros_hi"] = ((groups, outputs // 32), "int32")
        return shapes
