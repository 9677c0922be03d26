"""One quantized projection: its codes and rotation in memory, and as named tensors on disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import packing
from paroquant_gfx1201.formats.spec import FormatSpec


@dataclass(frozen=True, eq=False)
class Projection:
    """A K-in, N-out projection in groups of g along K (G = K / g).

    codes uint8 [K, N] and zeros uint8 [G, N], both 0..2**bits-1; scales f16 [G, N];
    theta f16 [krot, K/2] radians, pair t of a rotation at column t;
    pairs i16 [krot, K], flat i,j,i,j..., indices local to their group;
    channel_scales f16 [1, K], the factor on activations (reciprocal of the factor on weights);
    bias f16 [N] or None. The weight in the rotated domain is (codes - zeros) * scales.
    """

    spec: FormatSpec
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    theta: torch.Tensor
    pairs: torch.Tensor
    channel_scales: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rotated-domain weight [K, N]: (codes - zeros) * scales; exact in float32."""
        centred = self.codes.to(dtype).unflatten(0, (-1, self.spec.group_size))
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
        if self.bias is not None:
            tensors["bias"] = self.bias
        return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, torch.Tensor], spec: FormatSpec) -> "Projection":
        """Unpack the tensors of projection ``name``, checking each one.

        Raises PluginError naming the tensor that is missing, has another shape or dtype, or holds
        pairs that are no perfect matching of their group.
        """
        found = {}
        for suffix in spec.tensor_names:
            if f"{name}.{suffix}" not in tensors:
                raise PluginError(f"{name}.{suffix} is missing from the checkpoint")
            found[suffix] = tensors[f"{name}.{suffix}"]
        if found["qweight"].ndim != 2:
            raise PluginError(f"{name}.qweight has {found['qweight'].ndim} dimensions, expected 2")
        inputs, outputs = found["qweight"].shape[0], found["qweight"].shape[1] * 8
        try:
            expected = spec.shapes(inputs, outputs)
        except PluginError as error:
            raise PluginError(f"{name}.qweight: {error}") from None
        for suffix, (shape, dtype) in expected.items():
            tensor = found[suffix]
            actual = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            if actual != f"{dtype} {list(shape)}":
                raise PluginError(f"{name}.{suffix} is {actual}, expected {dtype} {list(shape)}")
        check_pairs(f"{name}.pairs", found["pairs"], spec.group_size)
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
            tensors.get(f"{name}.bias"),
        )


def check_pairs(name: str, pairs: torch.Tensor, group_size: int) -> None:
    """Raise PluginError unless every group of ``pairs`` i16 [krot, K] is a permutation of 0..g-1."""
    ordered = pairs.unflatten(1, (-1, group_size)).sort(dim=-1).values
    wrong = (ordered != torch.arange(group_size, dtype=pairs.dtype)).any(-1)
    if wrong.any():
        rotation, group = wrong.nonzero()[0].tolist()
        raise PluginError(f"{name}: rotation {rotation}, group {group} is not a permutation of 0..{group_size - 1}")
