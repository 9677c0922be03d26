"""Intervals of metrics that are sums over items which both arms have: documents of a KL, prompts of an acceptance.

The items are resampled, each with what both arms measured on it. The interval is the studentized bootstrap's (Efron
1979; Hall 1988), which keeps its level with a dozen items, where percentiles of resampled means fall short of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DRAWS = 4000
SEED = 20260901
MIN_ITEMS = 12  # with fewer, intervals of skewed items fall short of their confidence by more than a point


@dataclass(frozen=True)
class Resampled:
    """An estimate with its standard error, and the studentized draws (ascending) that make its intervals."""

    value: float
    se: float
    items: int
    draws: Any  # float64 (DRAWS,)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided."""
        import numpy

        if self.se == 0:
            return self.value, self.value
        tail = (1 - confidence) / 2
        low, high = numpy.quantile(self.draws, [tail, 1 - tail], method="inverted_cdf")
        return float(self.value - high * self.se), float(self.value - low * self.se)


def weighted_difference(differences: Any, weights: Any) -> Resampled:
    """sum(differences) / sum(weights), both of shape (items,): sums over an item of B minus A, and its size."""
    import numpy

    d, w = numpy.asarray(differences, dtype=float), numpy.asarray(weights, dtype=float)
    drawn = _drawn(len(d))
    value, se = (part.item() for part in _ratio(d[None], w[None]))
    return _studentized(value, se, len(d), *_ratio(d[drawn], w[drawn]))


def log_ratio_of_ratios(a_top: Any, a_bottom: Any, b_top: Any, b_bottom: Any) -> Resampled:
    """log of (sum b_top / sum b_bottom) / (sum a_top / sum a_bottom), all of shape (items,): B's ratio against A's."""
    import numpy

    parts = [numpy.asarray(part, dtype=float) for part in (a_top, a_bottom, b_top, b_bottom)]
    drawn = _drawn(len(parts[0]))
    value, se = (part.item() for part in _log_ratio(*(part[None] for part in parts)))
    return _studentized(value, se, len(parts[0]), *_log_ratio(*(part[drawn] for part in parts)))


def _drawn(items: int) -> Any:
    import numpy

    return numpy.random.default_rng(SEED).integers(items, size=(DRAWS, items))


def _ratio(d: Any, w: Any) -> tuple[Any, Any]:
    """Ratio of sums over the last axis, and its jackknife standard error (Efron 1982, sec. 3.2)."""
    import numpy

    n, total = d.shape[-1], w.sum(axis=-1)
    value = d.sum(axis=-1) / total
    moved = (d - value[..., None] * w) / (total[..., None] - w)  # of the ratio, by leaving the item out
    return value, numpy.sqrt((n - 1) / n * (moved**2).sum(axis=-1))


def _log_ratio(a_top: Any, a_bottom: Any, b_top: Any, b_bottom: Any) -> tuple[Any, Any]:
    """The log of B's ratio of sums over A's, and its jackknife standard error."""
    import numpy

    n = a_top.shape[-1]
    value, moved = 0.0, 0.0
    for sign, part in ((1, b_top), (-1, b_bottom), (-1, a_top), (1, a_bottom)):
        total = part.sum(axis=-1, keepdims=True)
        value = value + sign * numpy.log(total[..., 0])
        moved = moved + sign * numpy.log1p(-part / total)
    moved = moved - moved.mean(axis=-1, keepdims=True)
    return value, numpy.sqrt((n - 1) / n * (moved**2).sum(axis=-1))


def _studentized(value: float, se: float, items: int, values: Any, errors: Any) -> Resampled:
    import numpy

    gap = values - value
    with numpy.errstate(divide="ignore", invalid="ignore"):
        t = numpy.where(errors > 1e-12 * max(se, 1e-300), gap / errors, numpy.sign(gap) * numpy.inf)
    return Resampled(value, se, items, numpy.sort(numpy.nan_to_num(t, nan=0.0, posinf=1e300, neginf=-1e300)))
