"""Intervals of metrics that are sums over items which both arms have: documents of a KL, prompts of an acceptance.

The items are resampled, each with what both arms measured on it. The interval is the studentized bootstrap's (Efron
1979; Hall 1988), which keeps its level with a dozen items, where percentiles of resampled means fall short of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

DRAWS = 4000
SEED = 20260901
LEAST_LEVEL = 20 / DRAWS  # one-sided; further out too few draws lie beyond the quantile, and skewed items break it
UNBOUNDED = 1e6  # standard errors
MIN_ITEMS = 12  # with fewer, intervals of skewed items fall short of their confidence by more than a point


@dataclass(frozen=True)
class Resampled:
    """An estimate with its standard error, and the studentized draws (ascending) that make its intervals."""

    value: float
    se: float
    items: int
    draws: Any  # float64 (DRAWS,)

    def bounded(self, confidence: float) -> bool:
        """Whether the draws have both ends of the interval: where few items differ, too many resamples have none."""
        return all(abs(end - self.value) <= UNBOUNDED * self.se for end in self.interval(confidence))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided."""
        import numpy

        if self.se <= 1e-12 * max(1.0, abs(self.value)):  # every item says the same, but for rounding
            return self.value, self.value
        tail = (1 - confidence) / 2
        low, high = numpy.quantile(self.draws, [tail, 1 - tail], method="inverted_cdf")
        return float(self.value - high * self.se), float(self.value - low * self.se)


def weighted_difference(differences: Any, weights: Any) -> Resampled:
    """sum(differences) / sum(weights), both of shape (items,): sums over an item of B minus A, and its size."""
    import numpy

    d, w = numpy.asarray(differences, dtype=float), numpy.asarray(weights, dtype=float)
    n, total = len(d), w.sum()
    value = d.sum() / total
    se = _jackknife((d - value * w) / (total - w))
    times = _times_drawn(n)
    tops, totals, dd, dw, ww = (times @ numpy.stack([d, w, d * d, d * w, w * w], axis=1)).T
    values = tops / totals
    squares = dd - 2 * values * dw + values**2 * ww
    return _studentized(float(value), se, n, values, _error(squares / totals**2, n))


def log_ratio_of_ratios(a_top: Any, a_bottom: Any, b_top: Any, b_bottom: Any) -> Resampled:
    """log of (sum b_top / sum b_bottom) / (sum a_top / sum a_bottom), all of shape (items,): B's ratio against A's."""
    import numpy

    signs = numpy.array([1.0, -1.0, -1.0, 1.0])
    parts = numpy.stack([numpy.asarray(part, dtype=float) for part in (b_top, b_bottom, a_top, a_bottom)], axis=1)
    n, totals = len(parts), parts.sum(axis=0)
    value = float(signs @ numpy.log(totals))
    left_out = numpy.log1p(-parts / totals) @ signs
    times = _times_drawn(n)
    drawn = times @ parts
    products = (times @ (parts[:, :, None] * parts[:, None, :]).reshape(n, -1)).reshape(-1, 4, 4)
    pull = signs / drawn
    squares = numpy.einsum("dp,dpq,dq->d", pull, products, pull)
    se = _jackknife(left_out - left_out.mean())
    return _studentized(value, se, n, numpy.log(drawn) @ signs, _error(squares, n))


@lru_cache(maxsize=8)
def _times_drawn(items: int) -> Any:
    """How often each item is in each resample, float64 (DRAWS, items)."""
    import numpy

    drawn = numpy.random.default_rng(SEED).integers(items, size=(DRAWS, items))
    cells = drawn + items * numpy.arange(DRAWS)[:, None]
    return numpy.bincount(cells.ravel(), minlength=DRAWS * items).reshape(DRAWS, items).astype(float)


def _jackknife(moved: Any) -> float:
    """The standard error of an estimate that leaving out each item moves by so much (Efron 1982, sec. 3.2)."""
    n = len(moved)
    return float(((n - 1) / n * (moved**2).sum()) ** 0.5)


def _error(squares: Any, n: int) -> Any:
    """The linearised standard error (Cochran 1977, sec. 6.4) from sums of squares of n items; rounding is no spread."""
    import numpy

    return numpy.sqrt(numpy.maximum(n / (n - 1) * squares, 0.0))


def _studentized(value: float, se: float, items: int, values: Any, errors: Any) -> Resampled:
    import numpy

    gap = values - value
    with numpy.errstate(divide="ignore", invalid="ignore"):
        t = numpy.where(errors > 1e-6 * se, gap / errors, numpy.sign(gap) * numpy.inf)
    return Resampled(value, se, items, numpy.sort(numpy.clip(numpy.nan_to_num(t, nan=0.0), -1e300, 1e300)))
