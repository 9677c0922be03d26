"""The effect of arm B on one number per boot, with a variance that may lean on the box's A/A floor.

Model, for a boot in block k at position p, y the log of its summary:

    y = level_k + slope_k * p + effect * [arm is B] + e,    e ~ N(0, sigma^2) independently for each boot

In a block ABBA or BAAB the effect is the quadratic contrast, so a drift linear in the position cancels; the cubic one
is left to estimate sigma^2, as are the differences of the blocks' effects: 2K - 1 degrees of freedom from K blocks.

The variance is moderated as in limma (Smyth 2004, eq. 3): (d0 s0^2 + d s^2) / (d0 + d) with d0 + d degrees of freedom,
s0^2 and d0 those of the floor. Whether the boots may be pooled with the floor at all is a preliminary test
(Bancroft 1944): where F = s^2 / s0^2 is above its upper SPREAD_LEVEL quantile, the floor is left aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SPREAD_LEVEL = 0.10  # below it optimistic floors do harm; above it the intervals grow wider than they say
ROUNDING = 1e-12  # of logs, nats and shares; the least that anyone claims is 1e-4
SLOPE_FROM_BOOTS = 4  # a block of fewer cannot tell a slope from its arms

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]


@dataclass(frozen=True)
class Layout:
    """Which boot was where. With y of shape (..., boots): y @ contrast is the effect, its variance `factor` sigma^2;
    y @ residuals, shape (..., dof), are `dof` independent N(0, sigma^2).
    """

    contrast: Any  # float64 (boots,)
    residuals: Any  # float64 (boots, dof)
    factor: float

    @property
    def dof(self) -> int:
        return self.residuals.shape[1]


@dataclass(frozen=True)
class Estimate:
    """The effect in the unit of y. `own_sd` is None where the boots leave no degree of freedom for it."""

    effect: float
    sd: float  # of one boot
    se: float  # of the effect
    dof: float
    own_sd: float | None
    own_dof: int
    borrowed: bool
    contradicts: bool  # the boots' own spread against the floor

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided."""
        half = quantile(1 - (1 - confidence) / 2, self.dof) * self.se if self.se else 0.0
        return self.effect - half, self.effect + half


def layout(arms: Sequence[str], blocks: Sequence[int], positions: Sequence[int]) -> Layout | None:
    """Boots in the order of y; None where they cannot tell B from A (no block has both)."""
    import numpy
    from scipy.linalg import null_space

    levels_and_slopes = nuisance(blocks, positions)
    treated = numpy.array([arm == "b" for arm in arms], dtype=float)
    free = treated - levels_and_slopes @ numpy.linalg.lstsq(levels_and_slopes, treated, rcond=None)[0]
    length = float(free @ free)
    if length < 1e-9:
        return None
    residuals = null_space(numpy.column_stack([levels_and_slopes, treated]).T)
    return Layout(contrast=free / length, residuals=residuals, factor=1 / length)


def nuisance(blocks: Sequence[int], positions: Sequence[int]) -> Any:
    """What boots have in common but their arm, float64 (boots, columns): each block's level, and its slope."""
    import numpy

    of_block, at = numpy.asarray(blocks), numpy.asarray(positions, dtype=float)
    columns = []
    for block in dict.fromkeys(blocks):
        here = of_block == block
        columns.append(here.astype(float))
        if here.sum() >= SLOPE_FROM_BOOTS:
            columns.append(numpy.where(here, at - at[here].mean(), 0.0))
    return numpy.column_stack(columns)


def moderate(own_variance: Any, own_dof: int, floor_variance: Any, floor_dof: Any) -> tuple[Any, Any, Any]:
    """(variance, its degrees of freedom, whether the floor was used), elementwise over arrays."""
    import numpy

    own, floor, prior = numpy.broadcast_arrays(own_variance, floor_variance, floor_dof)
    if own_dof == 0:
        return floor, prior, prior > 0
    pooled = (prior * floor + own_dof * own) / (prior + own_dof)
    use = (prior > 0) & ~contradicts(own, own_dof, floor, prior)
    return numpy.where(use, pooled, own), numpy.where(use, prior + own_dof, own_dof), use


def contradicts(own_variance: Any, own_dof: int, floor_variance: Any, floor_dof: Any) -> Any:
    """Whether the boots spread more than boots of the floor would, by the F test at SPREAD_LEVEL; elementwise."""
    from scipy.special import fdtri

    limit = fdtri(own_dof, floor_dof, 1 - SPREAD_LEVEL)
    return own_variance > limit * floor_variance


def estimate(values: Sequence[float], where: Layout, floor_sd: float | None, floor_dof: float) -> Estimate | None:
    """The effect in `values`, one per boot; None where neither boots nor floor say how much a boot varies."""
    import numpy

    y = numpy.asarray(values, dtype=float)
    own = scatter(y, where.residuals) if where.dof else 0.0
    prior = floor_dof if floor_sd is not None else 0.0
    if where.dof == 0 and prior <= 0:
        return None
    variance, dof, borrowed = (v.item() for v in moderate(own, where.dof, (floor_sd or 0.0) ** 2, prior))
    return Estimate(
        effect=float(y @ where.contrast),
        sd=variance**0.5,
        se=(variance * where.factor) ** 0.5,
        dof=dof,
        own_sd=own**0.5 if where.dof else None,
        own_dof=where.dof,
        borrowed=borrowed,
        contradicts=bool(prior > 0 and where.dof and not borrowed),
    )


def scatter(y: Any, residuals: Any) -> float:
    """sigma^2 by the residual directions (boots, dof); 0 where the numbers are equal but for their rounding."""
    found = float(((y @ residuals) ** 2).mean())
    return found if found > rounding(y) ** 2 else 0.0


def rounding(y: Any) -> float:
    """What sums of `y` may be off by in float64; a difference below it is none."""
    import numpy

    return 1e-12 * max(1.0, float(numpy.abs(y).max()))


def quantile(probability: float, dof: float) -> float:
    """Of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))


def decide(interval: tuple[float, float], threshold: float) -> Outcome:
    """Of a benefit (more is better) by its interval: all above the threshold, all below it, or neither.

    What floating point rounds is on no side: boots that measured equal numbers have an interval without width.
    """
    low, high = interval
    if low > threshold + ROUNDING:
        return "PASS"
    return "FAIL" if high < threshold - ROUNDING else "INCONCLUSIVE"
