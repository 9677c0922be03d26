"""The quantized linear as one opaque custom op, so that torch.compile never looks inside.

The activation mode is read when the op runs and is not an argument: a compiled graph is therefore
the same for every mode, and a cached one can never bring back the mode it was compiled under.
"""

import os
from functools import cache

import torch

from paroquant_gfx1201 import attest, reference, rotation
from paroquant_gfx1201.check import Checker
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.modes import Mode

NAME = "paroquant_gfx1201_linear"
REFERENCE = "cpu_reference"
INTEGER = "cpu_int8"
"""Paths of a layer: the reference in torch, or int8 codes and products by kernels.cpu."""

INTEGER_MIN_M = 16
"""Rows from which torch's int32 dots per group beat one f32 product on a CPU (measured on Zen 5)."""


@cache
def process_mode() -> Mode:
    """The mode of this process, fixed at first use."""
    return Mode.from_environment(os.environ)


checker = Checker()
"""Of this process; used in CHECK mode."""

layer_names: dict[int, str] = {}
"""Address of a layer's first weight to the layer's name. The op takes no name: layers of one shape must
stay one compiled graph."""


def linear(
    x: torch.Tensor,
    rotations: torch.Tensor,
    weights: list[torch.Tensor],
    offsets: list[torch.Tensor],
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
) -> torch.Tensor:
    """y [..., N] in x's dtype for x [..., K].

    rotations f32 [P, G, g, g] with channel scales folded in; entry p of the lists belongs to the
    outputs of rotation p and is what reference.PreparedWeight has under that name. Where kernels.cpu is
    compiled, codes and scales are as its ``pack`` and ``pack_scales`` give them, and rotations transposed.
    N is the sum of N_p.
    """
    rows = x.reshape(-1, x.shape[-1])
    mode = process_mode()
    band = mode.band(len(rows))
    packed = codes[0].dtype == torch.uint8
    by_integer = packed or (band.element == "int8" and len(rows) >= INTEGER_MIN_M)
    if packed:
        activations = cpu.produce(rows, rotations, band)
    else:
        activations = reference.quantize_activations(rotation.rotate_groups(rows.float(), rotations), band)
    dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
    y = torch.empty(len(rows), sum(weight.shape[1] for weight in weights), dtype=dtype)
    column = 0
    for index, weight in enumerate(weights):
        part, out = activations.of(index), y[:, column : column + weight.shape[1]]
        if packed:
            cpu.multiply(part, codes[index], scales[index], band, out)
        elif by_integer:
            zero_weight = weight[rows.shape[1] :]
            out.copy_(reference.multiply_int8(part, codes[index], scales[index], zero_weight, band))
        else:
            out.copy_(reference.multiply(part, weight, band))
        column += weight.shape[1]
    y = y.to(x.dtype)
    if mode.check:
        product = f"{INTEGER if packed else REFERENCE}:{'int32' if by_integer else 'f32'}"
        path = f"{product}:{band.element}:{band.granularity}:{band.zero_point}:{str(x.dtype)[6:]}"
        _check(path, y, activations, weights, offsets)
    return y.view(*x.shape[:-1], -1)


def _check(
    path: str,
    y: torch.Tensor,
    activations: reference.Activations,
    weights: list[torch.Tensor],
    offsets: list[torch.Tensor],
) -> None:
    name = layer_names.get(weights[0].data_ptr(), "unnamed")
    parts = y.split([weight.shape[1] for weight in weights], 1)
    news = [
        checker.compare(path, name, part, activations.of(index), weights[index], offsets[index])
        for index, part in enumerate(parts)
    ]
    if any(news):
        attest.process.check = checker.document
        attest.process.write(os.environ)


def _fake(
    x: torch.Tensor,
    rotations: torch.Tensor,
    weights: list[torch.Tensor],
    offsets: list[torch.Tensor],
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[1] for weight in weights))


def register() -> None:
    """Define torch.ops.vllm.paroquant_gfx1201_linear, once per process."""
    if hasattr(torch.ops.vllm, NAME):
        return
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(op_name=NAME, op_func=linear, fake_impl=_fake)
