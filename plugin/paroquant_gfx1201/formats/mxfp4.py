"""MXFP4 behind ParoQuant's rotations: e2m1 codes with one e8m0 scale for each 32 inputs of an output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import reading
from paroquant_gfx1201.formats.spec import ROTATION, integer, require, rotation_shapes

if TYPE_CHECKING:
    import torch

METHOD = "paroquant_mxfp4"
FORMAT = "mxfp4"
BLOCK = 32
SCALE_RULES = ("ocp", "ceil", "mse")
"""How the writer chose block exponents; a reader needs it for nothing. See ``quantize_fp4.exponents``."""


@dataclass(frozen=True)
class Mxfp4Spec:
    """Group size and number of the rotations, and the rule of the block exponents."""

    group_size: int
    krot: int
    scale_rule: str = "ocp"

    bits = 4
    format = FORMAT
    key_tensor = "weight_scale"
    tensor_names = ("weight", "weight_scale", *ROTATION)

    def __post_init__(self) -> None:
        values = {"group_size": self.group_size, "krot": self.krot}
        require(values, {"group_size": (32, 64, 128), "krot": (1, 8)})
        if self.scale_rule not in SCALE_RULES:
            raise PluginError(
                f"quantization_config: scale_rule={self.scale_rule!r} is not known, use one of {', '.join(SCALE_RULES)}"
            )

    def to_config(self) -> dict[str, Any]:
        """The ``quantization_config`` object of config.json."""
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "bits": 4,
            "group_size": self.group_size,
            "mxfp4_block": BLOCK,
            "krot": self.krot,
            "scale_rule": self.scale_rule,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Mxfp4Spec":
        """Read ``quantization_config``; raises PluginError naming the key that is wrong."""
        for key, expected in (("quant_method", METHOD), ("format", FORMAT), ("bits", 4), ("mxfp4_block", BLOCK)):
            if config.get(key) != expected or isinstance(config.get(key), bool):
                raise PluginError(f"quantization_config: {key} is {config.get(key)!r}, expected {expected!r}")
        return cls(integer(config, "group_size"), integer(config, "krot"), config.get("scale_rule", "ocp"))

    def sizes(self, key_shape: tuple[int, ...]) -> tuple[int, int]:
        """(K, N) of a projection whose ``key_tensor`` has this 2-D shape."""
        return key_shape[1] * BLOCK, key_shape[0]

    def shapes(self, inputs: int, outputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Tensor suffix to (shape, dtype) for K ``inputs`` and N ``outputs``.

        Raises PluginError when K is not a multiple of the rotations' group size.
        """
        if inputs % self.group_size:
            raise PluginError(f"K={inputs} is not a multiple of group size {self.group_size}")
        return {
            "weight": ((outputs, inputs // 2), "uint8"),
            "weight_scale": ((outputs, inputs // BLOCK), "uint8"),
            **rotation_shapes(inputs, self.krot),
        }


@dataclass(frozen=True, eq=False)
class Mxfp4Projection:
    """A K-in, N-out projection.

    codes uint8 [N, K], 0..15; exponents uint8 [N, K/32], e8m0; theta, pairs, channel_scales as in
    ``projection.Projection``, all three None where the weight is not rotated; bias [N] or None.
    """

    spec: Mxfp4Spec
    codes: "torch.Tensor"
    exponents: "torch.Tensor"
    theta: "torch.Tensor | None" = None
    pairs: "torch.Tensor | None" = None
    channel_scales: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[1]

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[0]

    def dequantize(self, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Rotated-domain weight [K, N], float32 unless told otherwise, where it is exact."""
        import torch

        from paroquant_gfx1201.formats import fp4

        dtype = dtype or torch.float32
        blocks = fp4.decode_e2m1(self.codes).to(dtype).unflatten(1, (-1, BLOCK))
        return (blocks * fp4.decode_e8m0(self.exponents, dtype).unsqueeze(-1)).flatten(1).T

    def to_tensors(self, name: str) -> dict[str, "torch.Tensor"]:
        """Named tensors as stored. Raises PluginError for a weight without rotations: it has no file format here."""
        from paroquant_gfx1201.formats import fp4

        rotation = {suffix: getattr(self, suffix) for suffix in ROTATION}
        if any(tensor is None for tensor in rotation.values()):
            raise PluginError(f"{name} has no rotation to write")
        tensors = {"weight": fp4.pack_pairs(self.codes), "weight_scale": self.exponents, **rotation}
        if self.bias is not None:
            tensors["bias"] = self.bias
        return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, "torch.Tensor"], spec: Mxfp4Spec) -> "Mxfp4Projection":
        """Unpack the tensors of projection ``name``, checking each one.

        Raises PluginError naming the tensor that is missing, has another shape or dtype, or holds a
        NaN block scale or pairs that are no matching.
        """
        from paroquant_gfx1201.formats import fp4

        found = reading.take(name, tensors, spec.tensor_names)
        inputs, outputs = spec.sizes(reading.matrix_shape(f"{name}.weight_scale", found["weight_scale"]))
        try:
            expected = spec.shapes(inputs, outputs)
        except PluginError as error:
            raise PluginError(f"{name}.weight_scale: {error}") from None
        reading.check_shapes(name, found, expected)
        check_exponents(f"{name}.weight_scale", found["weight_scale"])
        reading.check_rotation(name, found, spec.group_size)
        rotation = [found[suffix] for suffix in ROTATION]
        bias = reading.take_bias(name, tensors, outputs)
        return cls(spec, fp4.unpack_pairs(found["weight"]), found["weight_scale"], *rotation, bias)


def check_exponents(name: str, exponents: "torch.Tensor") -> None:
    """Raise PluginError where an e8m0 scale is NaN (255)."""
    wrong = exponents == 255
    if wrong.any():
        raise PluginError(f"{name} holds a NaN scale (255) at {wrong.nonzero()[0].tolist()}")
