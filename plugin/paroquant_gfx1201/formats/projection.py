"""One quantized projection: its codes and rotation in memory, and as named tensors on disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import packing, reading
from paroquant_gfx1201.formats.spec import FormatSpec

E4M3_LIMIT = 8.0
"""Centred Lloyd levels lie in [-8, 8)."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A K-in, N-out projection in groups of g along K (G = K / g).

    codes uint8 [K, N] and zeros uint8 [G, N], both 0..2**bits-1; scales f16 [G, N];
    theta f16 [krot, K/2] radians, pair t of a rotation at column t;
    pairs i16 [krot, K], flat i,j,i,j..., indices local to their group;
    channel_scales f16 [1, K], the factor on activations (reciprocal of the factor on weights);
    bias [N] in a float dtype, or None; levels f32 [16] of a Lloyd format, else None.
    The weight in the rotated domain is (v(codes) - zeros) * scales with v(q) = levels[q], else q.
    """

    spec: FormatSpec
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    theta: torch.Tensor
    pairs: torch.Tensor
    channel_scales: torch.Tensor
    bias: torch.Tensor | None = None
    levels: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[1]

    def code_values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """v(codes) [K, N]: the codes themselves, or their levels."""
        return self.codes.to(dtype) if self.levels is None else self.levels.to(dtype)[self.codes.long()]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rotated-domain weight [K, N]: (v(codes) - zeros) * scales; exact in float32."""
        centred = self.code_values(dtype).unflatten(0, (-1, self.spec.group_size))
        centred = centred - self.zeros.to(dtype).unsqueeze(1)
        return (centred * self.scales.to(dtype).unsqueeze(1)).flatten(0, 1)

    def to_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Named tensors as stored, e.g. ``model.layers.0.mlp.up_proj.qweight``."""
        tensors = {
            "qweight": packing.pack_nibbles(self.codes),
            "qzeros": packing.pack_nibbles(self.zeros),
            "scales": self.scales,
            "theta": self.theta,
            "pairs": self.pairs,
            "channel_scales": self.channel_scales,
        }
        if self.spec.bits == 5:
            tensors["qweight_hi"] = packing.pack_plane(self.codes)
            tensors["qzeros_hi"] = packing.pack_plane(self.zeros)
        if self.levels is not None:
            tensors["levels"] = self.levels
        if self.bias is not None:
            tensors["bias"] = self.bias
        return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, torch.Tensor], spec: FormatSpec) -> "Projection":
        """Unpack the tensors of projection ``name``, checking each one.

        Raises PluginError naming the tensor that is missing, has another shape or dtype, or holds a
        value without a meaning: a scale that is no number or negative, a pair that is no matching,
        a level off the e4m3 grid.
        """
        found = reading.take(name, tensors, spec.tensor_names)
        inputs, outputs = spec.sizes(reading.matrix_shape(f"{name}.qweight", found["qweight"]))
        try:
            expected = spec.shapes(inputs, outputs)
        except PluginError as error:
            raise PluginError(f"{name}.qweight: {error}") from None
        reading.check_shapes(name, found, expected)
        reading.check_finite(f"{name}.scales", found["scales"], negative=False)
        reading.check_rotation(name, found, spec.group_size)
        if spec.lloyd:
            check_levels(f"{name}.levels", found["levels"])
        codes = packing.unpack_nibbles(found["qweight"])
        zeros = packing.unpack_nibbles(found["qzeros"])
        if spec.bits == 5:
            codes = codes | packing.unpack_plane(found["qweight_hi"])
            zeros = zeros | packing.unpack_plane(found["qzeros_hi"])
        return cls(
            spec,
            codes,
            zeros,
            found["scales"],
            found["theta"],
            found["pairs"],
            found["channel_scales"],
            reading.take_bias(name, tensors, outputs),
            found.get("levels"),
        )


def check_levels(name: str, levels: torch.Tensor) -> None:
    """Raise PluginError unless ``levels`` f32 [16] ascend and lie at 7.5 + e, e in e4m3 and [-8, 8).

    Centred on 7.5 the levels are then what an fp8 matrix unit multiplies, without rounding.
    """
    reading.check_finite(name, levels)
    centred = levels - 7.5
    on_grid = centred.to(torch.float8_e4m3fn).float() == centred
    if not (on_grid & (centred >= -E4M3_LIMIT) & (centred < E4M3_LIMIT)).all():
        raise PluginError(f"{name} holds a level that is not 7.5 plus an e4m3 value in [-8, 8)")
    if not (levels.diff() > 0).all():
        raise PluginError(f"{name} does not ascend")
