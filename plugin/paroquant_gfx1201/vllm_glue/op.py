"""The quantized linear as one opaque custom op, so that torch.compile never looks inside.

The activation mode is read when the op runs and is not an argument: a compiled graph is therefore
the same for every mode, and a cached one can never bring back the mode it was compiled under.
"""

import os
from functools import cache

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.modes import Mode

NAME = "paroquant_gfx1201_linear"

INTEGER_MIN_M = 16
"""Rows from which int32 dots per group beat one f32 product on a CPU (measured on Zen 5)."""


@cache
def process_mode() -> Mode:
    """The mode of this process, fixed at first use."""
    return Mode.from_environment(os.environ)


def linear(
    x: torch.Tensor,
    rotations: torch.Tensor,
    weights: list[torch.Tensor],
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
) -> torch.Tensor:
    """y [..., N] in x's dtype for x [..., K].

    rotations f32 [P, G, g, g] with channel scales folded in; entry p of the lists belongs to the
    outputs of rotation p: weights f32 [K + G, N_p], codes int8 [G, g, N_p], scales f32 [G, N_p]
    (see reference.PreparedWeight). N is the sum of N_p.
    """
    rows = x.reshape(-1, x.shape[-1])
    band = process_mode().band(len(rows))
    rotated = rotation.rotate_groups(rows.float(), rotations)
    activations = reference.quantize_activations(rotated, band)
    by_integer = band.element == "int8" and len(rows) >= INTEGER_MIN_M
    outputs = []
    for index, weight in enumerate(weights):
        part = activations.of(index)
        if by_integer:
            zero_weight = weight[rows.shape[1] :]
            outputs.append(reference.multiply_int8(part, codes[index], scales[index], zero_weight, band))
        else:
            outputs.append(reference.multiply(part, weight, band))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def _fake(
    x: torch.Tensor,
    rotations: torch.Tensor,
    weights: list[torch.Tensor],
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
