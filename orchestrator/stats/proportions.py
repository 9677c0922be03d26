"""The same questions answered by both arms: who alone was right, and by how much the share of right answers differs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

MIN_QUESTIONS = 100  # with 60 Tango's interval misses its confidence by more than a point


@dataclass(frozen=True)
class Discordance:
    """`n` questions, of which `a_only` and `b_only` were answered right by one arm alone.

    With several boots the counts are means over all pairs of an A with a B boot, and all three are scaled to the number
    of questions that would have the difference's variance from one boot an arm (Rao and Scott 1992).
    """

    n: float
    a_only: float
    b_only: float

    @property
    def difference(self) -> float:
        """Share right of B minus that of A."""
        return (self.b_only - self.a_only) / self.n


def discordance(a: Any, b: Any) -> Discordance:
    """From right (1) or wrong (0), shape (boots of the arm, questions), the questions in the same order."""
    import numpy

    share_a, share_b = numpy.mean(a, axis=0, dtype=float), numpy.mean(b, axis=0, dtype=float)
    n = len(share_a)
    a_only, b_only = float((share_a * (1 - share_b)).sum()), float((share_b * (1 - share_a)).sum())
    observed = float(numpy.var(share_b - share_a))
    single = (a_only + b_only) / n - ((b_only - a_only) / n) ** 2
    most = 2 / (1 / len(a) + 1 / len(b))  # what repeats can win where they have nothing in common
    scale = min(single / observed, most) if observed > 1e-12 else 1.0
    return Discordance(n * scale, a_only * scale, b_only * scale)


def mcnemar(a_only: int, b_only: int) -> float:
    """The exact two-sided p value: of a_only + b_only fair coins (McNemar 1947)."""
    from scipy.stats import binomtest

    return float(binomtest(a_only, a_only + b_only, 0.5).pvalue) if a_only + b_only else 1.0


def score_interval(found: Discordance, confidence: float) -> tuple[float, float]:
    """Tango's (1998) score interval of the difference, two-sided: where |z| stays below the normal quantile."""
    z = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    low = _root(found, z, -1.0, found.difference)
    high = _root(found, -z, found.difference, 1.0)
    return low, high


def score_z(found: Discordance, difference: float) -> float:
    """Tango's z of the hypothesis that B's share is `difference` above A's; falls as `difference` grows."""
    n, b, c = found.n, found.b_only, found.a_only
    quadratic, linear = 2 * n, (2 * n - b + c) * difference - b - c
    product = -c * difference * (1 - difference)
    q = ((max(linear * linear - 4 * quadratic * product, 0.0)) ** 0.5 - linear) / (2 * quadratic)
    variance = n * (2 * q + difference * (1 - difference))
    gap = b - c - n * difference
    if variance <= 0:
        return 0.0 if gap == 0 else float("inf") * gap
    return gap / variance**0.5


def _root(found: Discordance, z: float, low: float, high: float) -> float:
    """The difference in [low, high] at which score_z falls through `z`; an end where it does not."""
    from scipy.optimize import brentq

    if score_z(found, low) <= z:
        return low
    if score_z(found, high) >= z:
        return high
    return float(brentq(lambda difference: score_z(found, difference) - z, low, high, xtol=1e-10))


def disagreeing(a: Any, b: Any) -> tuple[int, int]:
    """(questions on which A was right in more of its boots, on which B was); as `discordance` takes them."""
    import numpy

    gap = numpy.mean(b, axis=0, dtype=float) - numpy.mean(a, axis=0, dtype=float)
    return int((gap < -1e-12).sum()), int((gap > 1e-12).sum())
