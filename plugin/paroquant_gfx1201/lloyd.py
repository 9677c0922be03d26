"""A 16-level codebook for one projection, on levels that an fp8 matrix unit multiplies exactly.

The weight of a group is scale * (L[q] - zero). Levels start as the integers 0..15 of the uniform grid
and follow the distribution of u = w / scale + zero by weighted Lloyd-Max iterations; then each is put
on the grid 7.5 + e, e finite in e4m3 and -8 <= e < 8, and moved along it while the error falls. Scales
are refitted to the levels by least squares. The weight of a sample is scale**2 times its input's mean
square, which makes the sum the expected squared output error (off-diagonal moments left out).
"""

from dataclasses import dataclass

import numpy as np
import torch

from paroquant_gfx1201.quantize import SCALE_MAX, SCALE_MIN, quantize

SAMPLES = 500_000
"""Weights that a fit looks at; above that, an even stride through them."""

ITERATIONS = 500
TOLERANCE = 1e-7
REFITS = 3
"""Rounds of scales, then levels, after the first fit."""

CENTRE = 7.5


def level_grid() -> np.ndarray:
    """Every allowed level, ascending: 7.5 + e for the finite e4m3 values e in [-8, 8)."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    values = np.unique(values[np.isfinite(values)])
    return CENTRE + values[(values >= -8) & (values < 8)]


@dataclass(frozen=True)
class _Samples:
    """Sorted samples with running sums, so that the error of any codebook costs 15 binary searches."""

    values: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray) -> "_Samples":
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        sums = [np.concatenate([[0.0], np.cumsum(weights * values**power)]) for power in range(3)]
        return cls(values, *sums)

    def cells(self, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums of weight, weight * u and weight * u**2 of the samples nearest to each level."""
        edges = np.searchsorted(self.values, (levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(self.values)]])
        return tuple(np.diff(sums[edges]) for sums in (self.weight, self.first, self.second))

    def error(self, levels: np.ndarray) -> float:
        """Weighted squared error of the codebook."""
        weight, first, second = self.cells(levels)
        return float((second - 2 * levels * first + levels**2 * weight).sum())


def _lloyd(samples: _Samples, levels: np.ndarray) -> np.ndarray:
    """Weighted Lloyd-Max from ``levels``; a cell without samples keeps its level."""
    before = samples.error(levels)
    for _ in range(ITERATIONS):
        weight, first, _second = samples.cells(levels)
        levels = np.where(weight > 0, first / np.where(weight > 0, weight, 1.0), levels)
        after = samples.error(levels)
        if before - after <= TOLERANCE * before:
            break
        before = after
    return levels


def _snap(levels: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Indices into the grid: the nearest of each level, made distinct and ascending."""
    index = np.abs(levels[:, None] - grid).argmin(1)
    for n in range(1, len(index)):
        index[n] = max(index[n], index[n - 1] + 1)
    for n in range(len(index) - 1, -1, -1):
        index[n] = min(index[n], len(grid) - len(index) + n)
    return index


def _descend(samples: _Samples, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Move one level at a time to the neighbour on the grid that lowers the error, until none does."""
    best = samples.error(grid[index])
    moved = True
    while moved:
        moved = False
        for n in range(len(index)):
            for step in (-1, 1):
                candidate = index.copy()
                candidate[n] += step
                inside = candidate[0] >= 0 and candidate[-1] < len(grid)
                if inside and (np.diff(candidate) > 0).all() and samples.error(grid[candidate]) < best:
                    index, best, moved = candidate, samples.error(grid[candidate]), True
    return index


def fit_levels(values: torch.Tensor, weights: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """Levels f32 [16] for samples u and their weights, both flat and of one length; ``start`` f32 [16] or 0..15."""
    stride = -(-len(values) // SAMPLES)
    samples = _Samples.of(values[::stride].double().numpy(), weights[::stride].double().numpy())
    grid = level_grid()
    levels = _lloyd(samples, np.arange(16.0) if start is None else start.double().numpy())
    return torch.from_numpy(grid[_descend(samples, _snap(levels, grid), grid)]).float()


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """uint8 index of the level nearest to each value; the upper one where two are equally near."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, right=True).to(torch.uint8)


def quantize_lloyd(
    weight: torch.Tensor, group_size: int, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [K, N], zeros uint8 [G, N], scales f16 [G, N] and levels f32 [16] of weight f32 [N, K].

    importance f32 [K]: mean square of each (rotated) input.
    """
    _, zeros, scales = quantize(weight, 15, group_size)
    groups = weight.unflatten(1, (-1, group_size))
    zero, scale = zeros.T.float().unsqueeze(-1), scales.T.float().unsqueeze(-1)
    square = importance.view(1, -1, group_size).expand_as(groups)
    levels = None
    for _ in range(REFITS + 1):
        steps = groups / scale + zero
        levels = fit_levels(steps.flatten(), (square * scale.square()).flatten(), levels)
        values = levels[nearest(steps, levels).long()] - zero
        # Least squares of w = scale * v under the same weights.
        numerator, denominator = (square * groups * values).sum(-1), (square * values.square()).sum(-1)
        fitted = torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), scale.squeeze(-1))
        scale = fitted.clamp(SCALE_MIN, SCALE_MAX).half().float().unsqueeze(-1)
    codes = nearest(groups / scale + zero, levels).flatten(1)
    return codes.T.contiguous(), zeros, scale.squeeze(-1).half().T.contiguous(), levels
