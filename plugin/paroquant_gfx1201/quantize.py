"""Asymmetric round-to-nearest quantization of a weight along groups of its inputs.

scale = (max - min) / levels, zero = clamp(-round(min / scale), 0, levels),
code = clamp(round(w / scale) + zero, 0, levels); levels is 15 or 31.
"""

import torch

SCALE_MIN = 1e-5
# The format's own ceiling is 1e5, which f16 cannot hold.
SCALE_MAX = float(torch.finfo(torch.float16).max)


def power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The power of two nearest in log2, f16: what a kernel could fold into its bytes."""
    return torch.exp2(torch.round(torch.log2(scales.float()))).half()


def quantize(
    weight: torch.Tensor, levels: int, group_size: int, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weight f32 [N, K] in the rotated domain.

    Returns codes uint8 [K, N], zeros uint8 [G, N] and scales f16 [G, N]. The scale is rounded to
    f16 before zeros and codes are chosen, so they are nearest for the scale that is stored.
    ``pow2`` then replaces it by a power of two and keeps the zero point, which costs up to half a
    bit of the grid: it is here to be measured, not to be used.
    """
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / levels).clamp(SCALE_MIN, SCALE_MAX).half()
    scale = scales.float()
    zeros = (-torch.round(low / scale)).clamp(0, levels)
    if pow2:
        scales = power_of_two(scales)
        scale = scales.float()
    codes = torch.round(groups / scale.unsqueeze(-1)) + zeros.unsqueeze(-1)
    codes = codes.clamp(0, levels).flatten(1)
    return (
        codes.to(torch.uint8).T.contiguous(),
        zeros.to(torch.uint8).T.contiguous(),
        scales.T.contiguous(),
    )


def fake_quantize(weight: torch.Tensor, levels: int) -> torch.Tensor:
    """The weight after a round trip through ``quantize``, differentiable (straight-through).

    weight f32 [..., g], one group per row. Gradients reach the weight through the rounding and
    the scale through the group's minimum and maximum.
    """
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = ((high - low) / levels).clamp(SCALE_MIN, SCALE_MAX)
    scale = scale + (scale.half().float() - scale).detach()
    zero = (-torch.round(low / scale)).clamp(0, levels).detach()
    steps = weight / scale
    rounded = steps + (torch.round(steps) - steps).detach()
    return torch.maximum(torch.minimum(rounded, levels - zero), -zero) * scale
