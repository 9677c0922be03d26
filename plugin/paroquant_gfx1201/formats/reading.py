"""Checks that every codec's reader makes: presence, shape, dtype, and values a format cannot mean."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from paroquant_gfx1201.errors import PluginError

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor suffix to (shape, torch dtype name)."""


def described(tensor: "torch.Tensor") -> str:
    """E.g. ``int32 [64, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_shape(name: str, actual: str, shape: tuple[int, ...], dtype: str) -> None:
    """Raise PluginError unless ``actual``, as ``described`` gives it, is this dtype and shape."""
    if actual != f"{dtype} {list(shape)}":
        raise PluginError(f"{name} is {actual}, expected {dtype} {list(shape)}")


def take(name: str, tensors: Mapping[str, "torch.Tensor"], suffixes: Iterable[str]) -> dict[str, "torch.Tensor"]:
    """The tensors of projection ``name`` by suffix. Raises PluginError naming the one that is missing."""
    found = {}
    for suffix in suffixes:
        if f"{name}.{suffix}" not in tensors:
            raise PluginError(f"{name}.{suffix} is missing from the checkpoint")
        found[suffix] = tensors[f"{name}.{suffix}"]
    return found


def matrix_shape(name: str, tensor: "torch.Tensor") -> tuple[int, int]:
    """The shape of a 2-D tensor. Raises PluginError for another number of dimensions."""
    if tensor.ndim != 2:
        raise PluginError(f"{name} has {tensor.ndim} dimensions, expected 2")
    return tensor.shape[0], tensor.shape[1]


def check_shapes(name: str, found: Mapping[str, "torch.Tensor"], expected: Shapes) -> None:
    """Raise PluginError naming the first tensor whose dtype or shape is not the expected one."""
    for suffix, (shape, dtype) in expected.items():
        require_shape(f"{name}.{suffix}", described(found[suffix]), shape, dtype)


def check_finite(name: str, tensor: "torch.Tensor", *, negative: bool = True) -> None:
    """Raise PluginError where ``tensor`` holds NaN or infinity, or a negative value unless allowed."""
    values = tensor.float()
    wrong = ~values.isfinite()
    if not negative:
        wrong |= values < 0
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        what = "is finite" if negative else "is finite and not negative"
        raise PluginError(f"{name} holds {values[tuple(index)].item()} at {index}; every value of it {what}")


def check_rotation(name: str, found: Mapping[str, "torch.Tensor"], group_size: int) -> None:
    """Raise PluginError where theta or channel_scales is not finite or pairs is no perfect matching."""
    for suffix in ("theta", "channel_scales"):
        check_finite(f"{name}.{suffix}", found[suffix])
    check_pairs(f"{name}.pairs", found["pairs"], group_size)


def check_pairs(name: str, pairs: "torch.Tensor", group_size: int) -> None:
    """Raise PluginError unless every group of ``pairs`` i16 [krot, K] is a permutation of 0..g-1."""
    import torch

    ordered = pairs.unflatten(1, (-1, group_size)).sort(dim=-1).values
    wrong = (ordered != torch.arange(group_size, dtype=pairs.dtype)).any(-1)
    if wrong.any():
        rotation, group = wrong.nonzero()[0].tolist()
        raise PluginError(f"{name}: rotation {rotation}, group {group} is not a permutation of 0..{group_size - 1}")


def take_bias(name: str, tensors: Mapping[str, "torch.Tensor"], outputs: int) -> "torch.Tensor | None":
    """The bias [N] of projection ``name`` in any float dtype, or None. Raises PluginError for a wrong one."""
    bias = tensors.get(f"{name}.bias")
    if bias is None:
        return None
    if not bias.dtype.is_floating_point or tuple(bias.shape) != (outputs,):
        raise PluginError(f"{name}.bias is {described(bias)}, expected a float type and shape [{outputs}]")
    check_finite(f"{name}.bias", bias)
    return bias
