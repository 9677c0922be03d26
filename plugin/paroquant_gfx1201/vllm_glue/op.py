"""The quantized linear as one opaque custom op, so that torch.compile never looks inside.

The activation mode is read when the op runs and is not an argument: a compiled graph is therefore
the same for every mode, and a cached one can never bring back the mode it was compiled under.
"""

import os
from dataclasses import dataclass
from functools import cache
from weakref import WeakValueDictionary

import torch

from paroquant_gfx1201 import attest, reference
from paroquant_gfx1201.check import Checker
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.paths import BandedLinear, Weights
from paroquant_gfx1201.paths import narrow as narrow_path
from paroquant_gfx1201.paths.path import Product

NAME = "paroquant_gfx1201_linear"
NARROW = "paroquant_gfx1201_narrow"


@cache
def process_mode() -> Mode:
    """The mode of this process, fixed at first use."""
    return Mode.from_environment(os.environ)


checker = Checker()
"""Of this process; used in CHECK mode."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A loaded layer. ``handle`` int8 [1] stands for it in graphs; ``checked`` are each projection's weight and offsets
    of reference.PreparedWeight on the CPU, in CHECK mode only."""

    name: str
    handle: torch.Tensor
    linear: BandedLinear
    checked: list[tuple[torch.Tensor, torch.Tensor]]


layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
"""By address of their handles, which live as long as they do. The op takes no name: layers of one shape must stay one
compiled graph."""


def add(name: str, weights: Weights) -> Layer:
    """Prepare a layer for the op. Raises PluginError, which names the layer, where no path takes it."""
    mode = process_mode()
    try:
        linear = BandedLinear(weights, mode)
    except PluginError as error:
        raise PluginError(f"{name}: {error}") from None
    checked = []
    if mode.check:
        parts = map(reference.prepare, weights.projections)
        checked = [(part.weight, part.offsets) for part in parts]
    layer = Layer(name, torch.zeros(1, dtype=torch.int8, device=weights.device), linear, checked)
    layers[layer.handle.data_ptr()] = layer
    return layer


def linear(x: torch.Tensor, handle: torch.Tensor, outputs: int) -> torch.Tensor:
    """y [..., N] in x's dtype for x [..., K], by the layer that ``handle`` stands for, whose N is ``outputs``."""
    layer = layers[handle.data_ptr()]
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_empty(*x.shape[:-1], outputs)
    path, product = layer.linear.multiply(rows)
    y = product.y.to(x.dtype)
    if layer.checked:
        _check(layer, path, y, product)
    return y.view(*x.shape[:-1], outputs)


def _check(layer: Layer, path: str, y: torch.Tensor, product: Product) -> None:
    choice, band = layer.linear.band(len(y))
    form = choice.path.zero_point(band)
    label = f"{path}:{product.sums}:{band.element}:{band.granularity}:{form}:{str(y.dtype)[6:]}"
    parts = y.cpu().split([weight.shape[1] for weight, _ in layer.checked], 1)
    news = [
        checker.compare(label, layer.name, part, activations, *checked)
        for part, activations, checked in zip(parts, product.activations(), layer.checked, strict=True)
    ]
    if any(news):
        attest.process.check = checker.document
        attest.process.write(os.environ)


def _fake(x: torch.Tensor, handle: torch.Tensor, outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y [..., N] of x [..., K] by a bf16 weight [N, K]; the number of rows decides in here how, not in the graph."""
    return narrow_path.multiply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))


def _fake_narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def register() -> None:
    """Define torch.ops.vllm.paroquant_gfx1201_linear and _narrow, once per process."""
    if hasattr(torch.ops.vllm, NAME):
        return
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(op_name=NAME, op_func=linear, fake_impl=_fake)
    direct_register_custom_op(op_name=NARROW, op_func=narrow, fake_impl=_fake_narrow)
