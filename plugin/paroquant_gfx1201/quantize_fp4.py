"""Round-to-nearest to MXFP4 and NVFP4, and requantization of the one to the other.

The exponent of an MXFP4 block of largest magnitude a:
- ``ocp``: floor(log2 a) - 2, the rule of OCP Microscaling v1.0; magnitudes above 6 steps saturate.
- ``ceil``: ceil(log2(a / 6)), the smallest that clips nothing.
- ``mse``: that one or the one below it, whichever has the lower squared error in the block; the
  former where they are equal.
A block of zeros has the smallest exponent, so that it never decides the range of a row.
"""

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import fp4, nvfp4
from paroquant_gfx1201.formats.mxfp4 import BLOCK, SCALE_RULES, Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.formats.nvfp4 import Flavour, Fp8Weight, Nvfp4Weight

E2M1_MAX = 6.0
E4M3_MAX = 448.0
SMALLEST = -127


def _ceiling(peak: torch.Tensor) -> torch.Tensor:
    """ceil(log2(peak / 6)) without rounding: 6 * 2**e >= peak."""
    mantissa, exponent = torch.frexp(peak)  # peak = mantissa * 2**exponent, mantissa in [0.5, 1); 6 = 0.75 * 2**3
    return torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)


def exponents(blocks: torch.Tensor, rule: str) -> torch.Tensor:
    """Integer exponents [...] for blocks f32 [..., 32]. Raises PluginError for an unknown rule."""
    if rule not in SCALE_RULES:
        raise PluginError(f"block exponent rule {rule!r} is not known, use one of {', '.join(SCALE_RULES)}")
    peak = blocks.abs().amax(-1)
    found = torch.frexp(peak).exponent - 3 if rule == "ocp" else _ceiling(peak)
    if rule == "mse":
        lower = (found - 1).clamp(min=SMALLEST)
        found = torch.where(_squared_error(blocks, lower) < _squared_error(blocks, found), lower, found)
    return torch.where(peak == 0, SMALLEST, found).clamp(SMALLEST, -SMALLEST)


def _squared_error(blocks: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    step = torch.exp2(chosen.double()).unsqueeze(-1)
    # The quotient is exact (a power of two), so this is the error of what would be stored.
    rounded = fp4.decode_e2m1(fp4.encode_e2m1((blocks.double() / step).float())).double() * step
    return (blocks.double() - rounded).square().sum(-1)


def to_mxfp4(weight: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K] and e8m0 exponents uint8 [N, K/32] of weight f32 [N, K]."""
    blocks = weight.unflatten(-1, (-1, BLOCK))
    chosen = exponents(blocks, rule)
    steps = blocks.double() / torch.exp2(chosen.double()).unsqueeze(-1)
    return fp4.encode_e2m1(steps.float()).flatten(-2), fp4.encode_e8m0(chosen)


def fake_mxfp4(weight: torch.Tensor, rule: str) -> torch.Tensor:
    """weight f32 [..., K], K a multiple of 32, after a round trip through ``to_mxfp4``; straight-through gradient."""
    blocks = weight.detach().unflatten(-1, (-1, BLOCK))
    step = torch.exp2(exponents(blocks, rule).float()).unsqueeze(-1)
    rounded = (fp4.decode_e2m1(fp4.encode_e2m1(blocks / step)) * step).flatten(-2)
    return weight + (rounded - weight).detach()


def to_nvfp4(weight: torch.Tensor, flavour: Flavour, bias: torch.Tensor | None = None) -> Nvfp4Weight:
    """Round weight f32 [N, K] to nearest: global scale amax / (6 * 448), block scale amax / 6 in e4m3."""
    blocks = weight.unflatten(-1, (-1, nvfp4.BLOCK))
    peak = blocks.abs().amax(-1)
    overall = (peak.amax() / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    stored = 1 / overall if flavour == "compressed-tensors" else overall
    scales = (peak / E2M1_MAX / overall).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    empty = Nvfp4Weight(weight, scales, stored.reshape(()), flavour)
    step = empty.block_scales().unsqueeze(-1)
    codes = fp4.encode_e2m1((blocks.double() / torch.where(step > 0, step, 1.0)).float())
    # A block whose scale rounds to zero can only hold zeros.
    codes = torch.where(step > 0, codes, 0).flatten(-2)
    return Nvfp4Weight(codes, scales, stored.reshape(()), flavour, bias)


def requantize(weight: Nvfp4Weight | Fp8Weight, rule: str, group_size: int) -> Mxfp4Projection:
    """An unrotated MXFP4 projection of an NVFP4 or FP8 weight, rounded from its exact values.

    ``group_size`` only says how activations in front of it are grouped. Raises PluginError where K
    is not a multiple of it.
    """
    values = weight.dequantize()
    spec = Mxfp4Spec(group_size, 1, rule)
    spec.shapes(values.shape[1], values.shape[0])
    codes, scales = to_mxfp4(values, rule)
    return Mxfp4Projection(spec, codes, scales, bias=weight.bias)
