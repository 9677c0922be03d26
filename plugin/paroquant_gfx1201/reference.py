"""Reference numerics of the quantized linear, as the kernels compute it.

Notation: M tokens, K inputs, N outputs, groups of g inputs, G = K / g. A code is an integer, a
scale its step. The zero point is a row-sum correction on midpoint-centred codes:
``sum_k a_k (q - z) s = s * dot(a, q - mid) - s (z - mid) * sum_k a_k``.
"""

from dataclasses import dataclass

import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.formats import Projection
from paroquant_gfx1201.modes import Band

INT8_MAX = 127.0
E4M3_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Activations:
    """Quantized activations of one rotation.

    codes f32 [G, M, g] (values an int8 or an e4m3 holds exactly), scales f32 [G, M, 1] per group
    or [1, M, 1] per token, row_sums f32 [G, M]: the sum of a group's codes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_sums: torch.Tensor


def quantize_activations(rotated: torch.Tensor, band: Band) -> Activations:
    """Quantize rotated activations f32 [G, M, g].

    int8: scale amax / 127, round half to even, clamp to +-127. e4m3 (OCP, finite): scale
    amax * (1 / 448), round to nearest even, clamp to +-448. An all-zero group has scale 0 and
    codes 0. The per-token path reads a bf16 copy of the rotated row, as the two-pass kernel does.
    """
    if band.granularity == "token":
        rotated = rotated.bfloat16().float()
        peak = rotated.abs().amax((0, 2), keepdim=True)
    else:
        peak = rotated.abs().amax(2, keepdim=True)
    scales = peak / INT8_MAX if band.element == "int8" else peak * (1.0 / E4M3_MAX)
    steps = rotated / torch.where(scales > 0, scales, 1.0)
    if band.element == "int8":
        codes = steps.round_().clamp_(-INT8_MAX, INT8_MAX)
    else:
        codes = steps.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return Activations(codes, scales, codes.sum(2))


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A projection ready to multiply.

    rotation f32 [G, g, g] with the channel scales folded in (y = R diag(channel_scales) x);
    weight f32 [K + G, N]: rows 0..K-1 hold scale * (code - mid), exact in f32, and rows K.. hold
    minus the zero-scale, f16(scale * (zero - mid)), so that one product yields both terms.
    """

    rotation: torch.Tensor
    weight: torch.Tensor


def rotation_matrices(
    theta: torch.Tensor, pairs: torch.Tensor, channel_scales: torch.Tensor, group_size: int
) -> torch.Tensor:
    """f32 [G, g, g] applied to activations, from f16 cosines and sines, channel scales folded in."""
    cos, sin = rotation.cosines(theta)
    matrices = rotation.block_matrices(cos, sin, pairs, group_size)
    return matrices * channel_scales.float().view(-1, 1, group_size)


def centred_weight(projection: Projection) -> torch.Tensor:
    """f32 [K + G, N] as described in PreparedWeight."""
    spec, scales = projection.spec, projection.scales.float()
    codes = (projection.codes.float() - spec.midpoint).unflatten(0, (-1, spec.group_size))
    zero_scales = (scales * (projection.zeros.float() - spec.midpoint)).half().float()
    return torch.cat([(codes * scales.unsqueeze(1)).flatten(0, 1), -zero_scales])


def prepare(projection: Projection) -> PreparedWeight:
    """Dequantize once; see PreparedWeight."""
    matrices = rotation_matrices(
        projection.theta, projection.pairs, projection.channel_scales, projection.spec.group_size
    )
    return PreparedWeight(matrices, centred_weight(projection))


def operands(x: torch.Tensor, matrices: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """Left operand f32 [M, K + G] of ``PreparedWeight.weight``, and the factor f32 [M, 1] on the
    product: the activation scale per token, or 1 where the scale is inside the operand.

    x [M, K] of any float dtype. In the epilogue form the row sums are rounded to f16, because the
    epilogue multiplies f16 fragments.
    """
    activations = quantize_activations(rotation.rotate_groups(x.float(), matrices), band)
    if band.granularity == "group":
        values = activations.codes * activations.scales
        row_sums = activations.row_sums * activations.scales.squeeze(2)
        factor = x.new_ones(1, 1, dtype=torch.float32)
    else:
        values, row_sums, factor = activations.codes, activations.row_sums, activations.scales[0]
    if band.zero_point == "epilogue":
        row_sums = row_sums.half().float()
    return torch.cat([values.transpose(0, 1).flatten(1), row_sums.T], 1), factor


def linear(x: torch.Tensor, prepared: PreparedWeight, band: Band) -> torch.Tensor:
    """y f32 [M, N] of x [M, K]: rotate, quantize, multiply, correct the zero point."""
    left, factor = operands(x, prepared.rotation, band)
    return (left @ prepared.weight) * factor


def exact(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """float64 [M, N] with unquantized activations and exact cosines: what the checkpoint means."""
    theta = projection.theta.double()
    scaled = x.double() * projection.channel_scales.double()
    group_size = projection.spec.group_size
    rotated = rotation.rotate(scaled, theta.cos(), theta.sin(), projection.pairs, group_size)
    return rotated @ projection.dequantize(torch.float64)
