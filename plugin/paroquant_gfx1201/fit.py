"""Fit of one projection's angles and channel scales, then its round-to-nearest quantization.

The loss is the squared output error on calibration inputs X: with E = W - W_q in the original
domain and H = X^T X, tr(E H E^T). Angles and log channel scales are optimized together by Adam
with straight-through rounding; the weight itself is left alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.formats.checkpoint import Spec
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.lloyd import quantize_lloyd
from paroquant_gfx1201.quantize import fake_quantize, quantize
from paroquant_gfx1201.quantize_fp4 import fake_mxfp4, to_mxfp4

Quantized = Projection | Mxfp4Projection

LEARNING_RATE = 0.1
"""For angles and log channel scales alike, decaying to a twentieth along a cosine. Twice what
ParoQuant publishes for thousands of steps: with tens of steps it ends 1-3% lower."""

ROWS_PER_STEP = 256
"""Output rows in the fit. One rotation serves all N rows, so a sample of them determines it."""


@dataclass(frozen=True)
class Fitted:
    """A quantized projection and its relative output errors, sqrt(tr(EHE^T) / tr(WHW^T)).

    ``error`` is the stored checkpoint's; ``plain_error`` that of the same grid without rotation.
    """

    projection: Quantized
    error: float
    plain_error: float


def _output_error(difference: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """tr(E H E^T). Its gradient 2 E H is supplied directly, which saves two of three products."""
    weighted = (difference @ gram).detach()
    value = (difference.detach() * weighted).sum()
    surrogate = 2 * (difference * weighted).sum()
    return surrogate - surrogate.detach() + value


def fake(groups: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Groups f32 [..., g] after a round trip through the format; differentiable.

    A Lloyd format counts as its uniform grid: levels are fitted once the rotation stands.
    """
    return fake_mxfp4(groups, spec.scale_rule) if isinstance(spec, Mxfp4Spec) else fake_quantize(groups, spec.levels)


def _effective(weight: torch.Tensor, matrices: torch.Tensor, log_scale: torch.Tensor, spec: Spec) -> torch.Tensor:
    """W [n, K] quantized in the rotated domain and brought back: [n, K]."""
    rotated = rotation.rotate_groups(weight * torch.exp(-log_scale), matrices)
    back = torch.bmm(fake(rotated, spec), matrices)
    return back.transpose(0, 1).reshape(weight.shape) * torch.exp(log_scale)


def _optimize(
    weight: torch.Tensor,
    gram: torch.Tensor,
    pairs: torch.Tensor,
    spec: Spec,
    steps: int,
    before_step: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles [krot, K/2] and log channel scales [K] (factor on activations) of the lowest loss."""
    theta = torch.zeros(spec.krot, weight.shape[1] // 2, requires_grad=True)
    log_scale = torch.zeros(weight.shape[1], requires_grad=True)
    best = (float("inf"), theta.detach().clone(), log_scale.detach().clone())
    optimizer = torch.optim.Adam([theta, log_scale], lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1), eta_min=LEARNING_RATE / 20)
    for step in range(steps + 1):
        before_step()
        matrices = rotation.block_matrices(theta.cos(), theta.sin(), pairs, spec.group_size)
        loss = _output_error(weight - _effective(weight, matrices, log_scale, spec), gram)
        if loss.item() < best[0]:
            best = (loss.item(), theta.detach().clone(), log_scale.detach().clone())
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return best[1], best[2]


def relative_output_error(weight: torch.Tensor, other: torch.Tensor, gram: torch.Tensor) -> float:
    """sqrt(tr(E H E^T) / tr(W H W^T)) with E = weight - other, both f32 [N, K]; gram f32 [K, K]."""
    difference = weight - other
    error = ((difference @ gram) * difference).sum()
    return (error / ((weight @ gram) * weight).sum()).sqrt().item()


def effective_weight(projection: Quantized) -> torch.Tensor:
    """f32 [N, K] in the original domain: what the stored projection multiplies bf16 inputs by."""
    if projection.theta is None:
        return projection.dequantize().T
    cos, sin = rotation.cosines(projection.theta)
    group_size = projection.spec.group_size
    matrices = rotation.block_matrices(cos, sin, projection.pairs, group_size)
    groups = projection.dequantize().T.unflatten(1, (-1, group_size)).transpose(0, 1)
    back = torch.bmm(groups, matrices).transpose(0, 1).flatten(1)
    return back * projection.channel_scales.float()


def rotated_importance(gram: torch.Tensor, matrices: torch.Tensor, channel_scales: torch.Tensor) -> torch.Tensor:
    """f32 [K]: sum of squares of each rotated input, the diagonal of R S gram S R^T by group.

    gram f32 [K, K] of the unrotated inputs; matrices [G, g, g]; channel_scales [1, K].
    """
    scaled = gram * channel_scales.float() * channel_scales.float().T
    groups, size = matrices.shape[:2]
    diagonal = scaled.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return torch.einsum("gij,gjk,gik->gi", matrices, diagonal, matrices).flatten().clamp(min=0)


def quantize_rotated(
    weight: torch.Tensor,
    theta: torch.Tensor,
    channel_scales: torch.Tensor,
    pairs: torch.Tensor,
    spec: Spec,
    bias: torch.Tensor | None = None,
    *,
    gram: torch.Tensor | None = None,
    pow2: bool = False,
) -> Quantized:
    """Round weight f32 [N, K] to nearest under f16 theta [krot, K/2] and channel_scales [1, K].

    The codes answer to the rotation as it is stored and applied, f16 cosines included. ``gram``
    weights a Lloyd fit (None: every input alike); ``pow2`` is of the uniform formats.
    """
    cos, sin = rotation.cosines(theta)
    matrices = rotation.block_matrices(cos, sin, pairs, spec.group_size)
    rotated = rotation.rotate_groups(weight / channel_scales.float(), matrices).transpose(0, 1).flatten(1)
    if isinstance(spec, Mxfp4Spec):
        return Mxfp4Projection(spec, *to_mxfp4(rotated, spec.scale_rule), theta, pairs, channel_scales, bias)
    levels = None
    if spec.lloyd:
        if gram is None:
            gram = torch.eye(weight.shape[1])
        importance = rotated_importance(gram, matrices, channel_scales)
        codes, zeros, scales, levels = quantize_lloyd(rotated, spec.group_size, importance)
    else:
        codes, zeros, scales = quantize(rotated, spec.levels, spec.group_size, pow2)
    return Projection(spec, codes, zeros, scales, theta, pairs, channel_scales, bias, levels)


def regularized(gram: torch.Tensor) -> torch.Tensor:
    """gram plus a hundredth of its mean diagonal: directions a short calibration never saw must not be free."""
    return gram + torch.eye(len(gram)) * (0.01 * gram.diagonal().mean())


def fit_projection(
    weight: torch.Tensor,
    gram: torch.Tensor,
    pairs: torch.Tensor,
    spec: Spec,
    steps: int,
    seed: int,
    bias: torch.Tensor | None = None,
    before_step: Callable[[], None] = lambda: None,
    pow2: bool = False,
) -> Fitted:
    """Fit and quantize weight [N, K] for inputs with second moments gram f32 [K, K].

    ``steps`` 0 stores identity rotations. ``seed`` picks the sampled rows. ``before_step`` may
    raise, which ends the fit.
    """
    weight, gram = weight.float(), regularized(gram)
    rows = torch.randperm(len(weight), generator=torch.Generator().manual_seed(seed))
    theta, log_scale = _optimize(weight[rows[:ROWS_PER_STEP]], gram, pairs, spec, steps, before_step)
    channel_scales = log_scale.exp().half().unsqueeze(0)
    fitted = quantize_rotated(weight, theta.half(), channel_scales, pairs, spec, bias, gram=gram, pow2=pow2)
    return measured(weight, fitted, gram)


def measured(weight: torch.Tensor, fitted: Quantized, gram: torch.Tensor) -> Fitted:
    """``fitted`` with its relative output errors against weight f32 [N, K]; gram f32 [K, K]."""
    plain = fake(weight.unflatten(1, (-1, fitted.spec.group_size)), fitted.spec).flatten(1)
    return Fitted(
        fitted,
        relative_output_error(weight, effective_weight(fitted), gram),
        relative_output_error(weight, plain, gram),
    )
