"""Whether two arms' outputs differ more between the arms than between boots of one arm."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

SEED = 20260901
MOST_SPLITS = 20_000  # of the boots into two arms; more are sampled


def apart(a: Sequence[Sequence[Hashable]], b: Sequence[Sequence[Hashable]]) -> float:
    """One-sided p value of a permutation test. Outputs by boot and prompt, the prompts in the same order on each boot.

    The statistic is the sum over prompts of (share of equal pairs within an arm) - (share of equal pairs across the
    arms). Where the arms are one build, any split of the boots into arms is as likely as the real one, also where a
    boot has a mode that changes many prompts at once: p is the share of splits whose statistic is as large. It is
    exact, and with n boots an arm at least 2 / C(2n, n): 0.33, 0.029 and 0.0022 for 2, 4 and 6.
    """
    import numpy

    boots = [*a, *b]
    pairs = list(combinations(range(len(boots)), 2))
    equal = numpy.array([sum(map(operator.eq, boots[i], boots[j])) for i, j in pairs], dtype=float)  # prompts
    splits = _splits(len(a), len(boots))
    first, second = numpy.array(pairs).T
    same = splits[:, first] == splits[:, second]  # (splits, pairs)
    inside, across = int(same[0].sum()), int((~same[0]).sum())
    weights = same / inside - ~same / across if inside else -(~same / across)
    values = weights @ equal  # the real split first
    return float((values >= values[0] - 1e-9).mean())


def _splits(of_a: int, boots: int) -> Any:
    """Which boots are arm A, bool (splits, boots): the real split first, then every other one, or a sample of all."""
    import numpy

    if math.comb(boots, of_a) <= MOST_SPLITS:
        return numpy.array([numpy.isin(numpy.arange(boots), split) for split in combinations(range(boots), of_a)])
    real = numpy.arange(boots) < of_a
    random = numpy.random.default_rng(SEED)
    return numpy.vstack([real, random.permuted(numpy.tile(real, (MOST_SPLITS, 1)), axis=1)])
