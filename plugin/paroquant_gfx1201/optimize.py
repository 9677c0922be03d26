"""The two-stage optimisation of one decoder layer, as ParoQuant publishes it (ICLR 2026).

Every projection of the layer becomes a pseudo-quantized one: its weight is scaled, rotated, rounded and
brought back before it multiplies. The layer, fed with what the quantized layers before it give, is
trained towards the output that the unquantized layer has for unquantized inputs, by SmoothL1.
Stage 1 trains angles and channel scales under min-max rounding; stage 2 trains the weight and each
group's scale and zero point, with the rotations frozen. AdamW, cosine to a twentieth, and after each
stage the state of the lowest validation loss. What is trained is rounded to f16 in the forward where
the checkpoint and the kernels hold f16, so what is stored is what was trained.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.quantize import SCALE_MAX, SCALE_MIN, fake_quantize

Rotation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""theta f16 [krot, K/2], channel_scales f16 [1, K], pairs i16 [krot, K]."""


@dataclass(frozen=True)
class Settings:
    """Epochs and learning rates of both stages; published values for 2048 sequences of 2048 tokens."""

    rotation_epochs: int = 5
    finetune_epochs: int = 5
    rotation_rate: float = 0.05
    weight_rate: float = 1e-5
    quantizer_rate: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10


def _through(value: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """``replacement`` in the forward, the gradient of ``value`` in the backward."""
    return value + (replacement - value).detach()


def _half(value: torch.Tensor) -> torch.Tensor:
    return _through(value, value.half().float())


class PseudoQuantized(nn.Module):
    """A linear layer whose weight [N, K] takes the way through the format at every forward.

    ``theta`` and ``log_scale`` are of the activations' side, as stored: y = R diag(exp(log_scale)) x.
    """

    def __init__(self, linear: nn.Linear, pairs: torch.Tensor, spec: FormatSpec, taken: Rotation | None = None) -> None:
        super().__init__()
        inputs = linear.in_features
        self.spec = spec
        self.weight = nn.Parameter(linear.weight.detach().float().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        theta, scales = torch.zeros(spec.krot, inputs // 2), torch.ones(inputs)
        if taken is not None:
            theta, scales, pairs = taken[0].float(), taken[1].float().flatten(), taken[2]
        device = self.weight.device
        self.register_buffer("pairs", pairs.to(device))
        self.theta = nn.Parameter(theta.to(device))
        self.log_scale = nn.Parameter(scales.log().to(device))
        self.scale: nn.Parameter | None = None
        self.zero: nn.Parameter | None = None

    def _matrices(self) -> torch.Tensor:
        theta = _half(self.theta)
        return rotation.block_matrices(_half(theta.cos()), _half(theta.sin()), self.pairs, self.spec.group_size)

    def _rotated(self, matrices: torch.Tensor, channel_scales: torch.Tensor) -> torch.Tensor:
        return rotation.rotate_groups(self.weight / channel_scales, matrices)

    def start_quantizer(self) -> None:
        """Make each group's scale and zero point parameters, at their min-max values."""
        with torch.no_grad():
            rotated = self._rotated(self._matrices(), _half(self.log_scale.exp()))
            low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
            scale = ((high - low) / self.spec.levels).clamp(SCALE_MIN, SCALE_MAX)
            self.scale, self.zero = nn.Parameter(scale), nn.Parameter(-low / scale)

    def _grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        scale = _half(_through(self.scale, self.scale.clamp(SCALE_MIN, SCALE_MAX)))
        return scale, _through(self.zero, self.zero.round().clamp(0, self.spec.levels))

    def quantized_weight(self) -> torch.Tensor:
        """f32 [N, K] in the original domain."""
        matrices, channel_scales = self._matrices(), _half(self.log_scale.exp())
        rotated = self._rotated(matrices, channel_scales)
        if self.scale is None:
            rounded = fake_quantize(rotated, self.spec.levels)
        else:
            scale, zero = self._grid()
            steps = rotated / scale
            codes = _through(steps, steps.round()) + zero
            rounded = (_through(codes, codes.clamp(0, self.spec.levels)) - zero) * scale
        back = torch.bmm(rounded, matrices).transpose(0, 1).reshape(self.weight.shape)
        return back * channel_scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.quantized_weight()
        return nn.functional.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @torch.no_grad()
    def store(self) -> Projection:
        """The projection as a checkpoint holds it, on the CPU."""
        theta, pairs = self.theta.half().cpu(), self.pairs.cpu()
        channel_scales = self.log_scale.exp().half().unsqueeze(0).cpu()
        bias = None if self.bias is None else self.bias.half().cpu()
        if self.scale is None:
            return quantize_rotated(self.weight.cpu(), theta, channel_scales, pairs, self.spec, bias)
        scale, zero = self._grid()
        rotated = self._rotated(self._matrices(), _half(self.log_scale.exp()))
        codes = ((rotated / scale).round() + zero).clamp(0, self.spec.levels).to(torch.uint8)
        return Projection(
            self.spec,
            codes.permute(0, 2, 1).flatten(0, 1).contiguous().cpu(),
            zero.squeeze(-1).to(torch.uint8).contiguous().cpu(),
            scale.squeeze(-1).half().contiguous().cpu(),
            theta,
            pairs,
            channel_scales,
            bias,
        )


Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Batches:
    """Inputs and wanted outputs of the layer, [batch, sequence, hidden] each."""

    inputs: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]

    def on(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs, one at a time on ``device``."""
        for x, y in zip(self.inputs, self.targets, strict=True):
            yield x.to(device), y.to(device).float()


def _loss(forward: Forward, batches: Batches, device: torch.device) -> float:
    with torch.no_grad():
        losses = [nn.functional.smooth_l1_loss(forward(x).float(), y).item() for x, y in batches.on(device)]
    return sum(losses) / len(losses)


def _train(
    forward: Forward,
    modules: Sequence[PseudoQuantized],
    groups: list[dict[str, Any]],
    epochs: int,
    train: Batches,
    validation: Batches,
    settings: Settings,
    before_step: Callable[[], None],
) -> None:
    """One stage; leaves the modules at their lowest validation loss, that before the stage included."""
    device = modules[0].weight.device
    for module in modules:
        module.requires_grad_(False)
    for group in groups:
        for parameter in group["params"]:
            parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    steps = epochs * len(train.inputs)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, _to_a_twentieth(max(steps, 1)))
    best = (_loss(forward, validation, device), [deepcopy(module.state_dict()) for module in modules])
    for _ in range(epochs):
        for x, y in train.on(device):
            before_step()
            optimizer.zero_grad(set_to_none=True)
            nn.functional.smooth_l1_loss(forward(x).float(), y).backward()
            optimizer.step()
            cosine.step()
        loss = _loss(forward, validation, device)
        if loss < best[0]:
            best = (loss, [deepcopy(module.state_dict()) for module in modules])
    for module, state in zip(modules, best[1], strict=True):
        module.load_state_dict(state)


def _to_a_twentieth(steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        return 0.05 + 0.475 * (1 + math.cos(math.pi * min(step / steps, 1.0)))

    return factor


def optimize_layer(
    modules: Sequence[PseudoQuantized],
    forward: Forward,
    train: Batches,
    validation: Batches,
    settings: Settings,
    frozen: bool,
    before_step: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Both stages for the ``modules`` of one layer; ``frozen`` skips the first. Returns the validation
    loss before and after.

    ``forward`` is the layer with the modules in place: hidden [B, S, H] to hidden. ``before_step`` may
    raise, which ends the training.
    """
    device = modules[0].weight.device
    before = _loss(forward, validation, device)
    stage = (train, validation, settings, before_step)
    if not frozen:
        angles = [parameter for module in modules for parameter in (module.theta, module.log_scale)]
        _train(forward, modules, [{"params": angles, "lr": settings.rotation_rate}], settings.rotation_epochs, *stage)
    for module in modules:
        module.start_quantizer()
    groups = [
        {"params": [module.weight for module in modules], "lr": settings.weight_rate},
        {"params": [p for module in modules for p in (module.scale, module.zero)], "lr": settings.quantizer_rate},
    ]
    _train(forward, modules, groups, settings.finetune_epochs, *stage)
    return before, _loss(forward, validation, device)
