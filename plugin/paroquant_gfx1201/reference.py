"""Reference numerics of the quantized linear, as the kernels compute it.

Notation: M tokens, K inputs, N outputs, groups of g inputs, G = K / g. A code is an integer, a
scale its step. The zero point is a row-sum correction on midpoint-centred codes:
``sum_k a_k (v(q) - z) s = s * dot(a, v(q) - mid) - s (z - mid) * sum_k a_k``, with v(q) = q, or the
level of q. MXFP4 has no zero point and no such term.
"""

from dataclasses import dataclass

import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.modes import Band

INT8_MAX = 127.0
E4M3_MAX = 448.0

TILE_ROWS = 256
"""Rows folded at a time, so that a tile of outputs stays in cache over all groups."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Quantized activations, possibly of several rotations (leading dimensions).

    codes f32 [..., G, M, g] (values an int8 or an e4m3 holds exactly; int8 from kernels.cpu), scales f32 [..., G, M, 1]
    per group or [..., 1, M, 1] per token, row_sums f32 [..., G, M]: the sum of a group's codes, rounded once.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_sums: torch.Tensor

    def of(self, rotation_index: int) -> "Activations":
        """Those of one rotation, without the leading dimension."""
        return Activations(self.codes[rotation_index], self.scales[rotation_index], self.row_sums[rotation_index])


def quantize_activations(rotated: torch.Tensor, band: Band) -> Activations:
    """Quantize rotated activations f32 [..., G, M, g].

    int8: scale amax / 127, round half to even, clamp to +-127. e4m3 (OCP, finite): scale
    amax * (1 / 448), round to nearest even, clamp to +-448. An all-zero group has scale 0 and
    codes 0. The per-token path reads a bf16 copy of the rotated row, as the two-pass kernel does.
    """
    if band.granularity == "token":
        rotated = rotated.bfloat16().float()
        peak = rotated.abs().amax((-3, -1), keepdim=True)
    else:
        peak = rotated.abs().amax(-1, keepdim=True)
    scales = peak / INT8_MAX if band.element == "int8" else peak * (1.0 / E4M3_MAX)
    steps = rotated / torch.where(scales > 0, scales, 1.0)
    if band.element == "int8":
        codes = steps.round_().clamp_(-INT8_MAX, INT8_MAX)
    else:
        codes = steps.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return Activations(codes, scales, codes.sum(-1, dtype=torch.float64).float())


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A projection ready to multiply.

    rotation f32 [G, g, g] with the channel scales folded in (y = R diag(channel_scales) x);
    weight f32 [K + G, N]: rows 0..K-1 hold scale * (v(code) - mid), exact in f32, and rows K.. hold
    minus the zero-scale, f16(scale * (zero - mid)), so that one product yields both terms; [K, N]
    without zero points. offsets f32 [G, N]: scale * (zero - mid), exact, or [0, N];
    codes int8 [G, g, N]: code - mid and scales f32 [G, N] where codes are integers, else both empty.
    """

    rotation: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


def rotation_matrices(projection: Projection | Mxfp4Projection) -> torch.Tensor:
    """f32 [G, g, g] applied to activations, from f16 cosines and sines, channel scales folded in.

    The identity, which is exact in f32, for a weight that is not rotated.
    """
    group_size = projection.spec.group_size
    if projection.theta is None:
        return torch.eye(group_size, dtype=torch.float32).expand(projection.inputs // group_size, -1, -1).contiguous()
    cos, sin = rotation.cosines(projection.theta)
    matrices = rotation.block_matrices(cos, sin, projection.pairs, group_size)
    return matrices * projection.channel_scales.float().view(-1, 1, group_size)


def prepare(projection: Projection | Mxfp4Projection) -> PreparedWeight:
    """Dequantize once; see PreparedWeight."""
    matrices = rotation_matrices(projection)
    no_codes, no_scales = torch.empty(0, dtype=torch.int8), torch.empty(0, dtype=torch.float32)
    if isinstance(projection, Mxfp4Projection):
        weight = projection.dequantize().contiguous()
        return PreparedWeight(matrices, weight, weight.new_empty(0, weight.shape[1]), no_codes, no_scales)
    spec, scales = projection.spec, projection.scales.float()
    values = (projection.code_values() - spec.midpoint).unflatten(0, (-1, spec.group_size))
    offsets = scales * (projection.zeros.float() - spec.midpoint)
    weight = torch.cat([(values * scales.unsqueeze(1)).flatten(0, 1), -offsets.half().float()])
    if spec.lloyd:
        return PreparedWeight(matrices, weight, offsets, no_codes, no_scales)
    return PreparedWeight(matrices, weight, offsets, values.to(torch.int8), scales)


def row_sums(activations: Activations, band: Band) -> torch.Tensor:
    """Row sums f32 [M, G] as the zero-scales meet them: times the scale where it is per group, and
    rounded to f16 in the epilogue form, because the epilogue multiplies f16 fragments."""
    sums = activations.row_sums
    if band.granularity == "group":
        sums = sums * activations.scales.squeeze(-1)
    return (sums.half().float() if band.zero_point == "epilogue" else sums).T


def multiply(activations: Activations, weight: torch.Tensor, band: Band) -> torch.Tensor:
    """y f32 [M, N] by one f32 product with PreparedWeight.weight; for any element."""
    values = activations.codes
    if band.granularity == "group":
        values = values * activations.scales
    left = values.transpose(0, 1).flatten(1)
    if len(weight) > left.shape[1]:
        left = torch.cat([left, row_sums(activations, band)], 1)
    y = left @ weight
    return y if band.granularity == "group" else y * activations.scales[0]


def multiply_int8(
    activations: Activations,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zero_weight: torch.Tensor,
    band: Band,
) -> torch.Tensor:
    """The same y for int8 activations, by exact int32 dots per group folded in f32.

    codes int8 [G, g, N], scales f32 [G, N], zero_weight f32 [G, N]: the last G rows of
    PreparedWeight.weight. Order of the sum as in the kernels' loop; faster than ``multiply`` when
    M is large.
    """
    y = row_sums(activations, band) @ zero_weight
    left = activations.codes.to(torch.int8)
    for start in range(0, len(y), TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        for group in range(len(codes)):
            dots = torch._int_mm(left[group, tile], codes[group]).to(torch.float32)
            dots.mul_(scales[group])
            if band.granularity == "group":
                y[tile].addcmul_(dots, activations.scales[group, tile])
            else:
                y[tile].add_(dots)
    return y if band.granularity == "group" else y.mul_(activations.scales[0])


def linear(x: torch.Tensor, prepared: PreparedWeight, band: Band) -> torch.Tensor:
    """y f32 [M, N] of x [M, K]: rotate, quantize, multiply, correct the zero point."""
    rotated = rotation.rotate_groups(x.float(), prepared.rotation)
    return multiply(quantize_activations(rotated, band), prepared.weight, band)


def same_codes(
    activations: Activations, weight: torch.Tensor, offsets: torch.Tensor, chunk_bytes: int = 1 << 25
) -> torch.Tensor:
    """y float64 [M, N] from the same activation and weight codes, without any rounding of the path.

    weight and offsets are PreparedWeight's. Works through the outputs in chunks, so that no float64
    copy of the weight is larger than ``chunk_bytes``.
    """
    values = (activations.codes.double() * activations.scales.double()).transpose(0, 1).flatten(1)
    sums = values.unflatten(1, (activations.codes.shape[0], -1)).sum(-1)
    inputs, outputs = values.shape[1], weight.shape[1]
    width = max(1, chunk_bytes // (8 * inputs))
    y = torch.empty(len(values), outputs, dtype=torch.float64)
    for start in range(0, outputs, width):
        columns = slice(start, start + width)
        y[:, columns] = values @ weight[:inputs, columns].double()
        if len(offsets):
            y[:, columns] -= sums @ offsets[:, columns].double()
    return y


def exact(x: torch.Tensor, projection: Projection | Mxfp4Projection) -> torch.Tensor:
    """float64 [M, N] with unquantized activations and exact cosines: what the checkpoint means."""
    if projection.theta is None:
        return x.double() @ projection.dequantize(torch.float64)
    theta = projection.theta.double()
    scaled = x.double() * projection.channel_scales.double()
    group_size = projection.spec.group_size
    rotated = rotation.rotate(scaled, theta.cos(), theta.sin(), projection.pairs, group_size)
    return rotated @ projection.dequantize(torch.float64)
