"""The quantized linear as one opaque custom op, so that torch.compile never looks inside.

The activation mode is read when the op runs and is not an argument: a compiled graph is therefore
the same for every mode, and a cached one can never bring back the mode it was compiled under.
"""

import os
from functools import cache

import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.modes import Mode

NAME = "paroquant_gfx1201_linear"


@cache
def process_mode() -> Mode:
    """The mode of this process, fixed at first use."""
    return Mode.from_environment(os.environ)


def linear(
    x: torch.Tensor, rotations: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """y [..., N] in x's dtype for x [..., K].

    rotations f32 [P, G, g, g] with channel scales folded in; weights[p] f32 [K + G, N_p] multiplies
    the activations of rotation p (see reference.PreparedWeight). N is the sum of N_p.
    """
    rows = x.reshape(-1, x.shape[-1])
    band = process_mode().band(len(rows))
    outputs = []
    for rotation, weight in zip(rotations, weights, strict=True):
        left, factor = reference.operands(rows, rotation, band)
        product = left @ weight
        outputs.append(product if band.granularity == "group" else product.mul_(factor))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def _fake(
    x: torch.Tensor, rotations: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[1] for weight in weights))


def register() -> None:
    """Define torch.ops.vllm.paroquant_gfx1201_linear, once per process."""
    if hasattr(torch.ops.vllm, NAME):
        return
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(op_name=NAME, op_func=linear, fake_impl=_fake)
