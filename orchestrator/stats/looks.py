"""How alpha is spent over declared looks.

The spending functions are Lan and DeMets' (1983) of O'Brien-Fleming and of Pocock type, one-sided. What a look may
spend is the function's growth since the look before, and each look is tested at just that level. The union bound then
holds the sum at alpha whatever the looks have in common: exactly, with any degrees of freedom and any mixture of tests.
The sharper boundaries of the multivariate normal take the variance as known, and run over alpha at the three to seven
degrees of freedom that an A/B of boots has; what they would win is a few percent of the boots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

Spending = Literal["obrien_fleming", "pocock"]


def spent(alpha: float, fraction: float, spending: Spending) -> float:
    """The alpha that may be spent until `fraction` (0 to 1) of the boots are there."""
    if fraction <= 0:
        return 0.0
    if fraction >= 1:
        return alpha
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * fraction)
    return math.erfc(-NormalDist().inv_cdf(alpha / 2) / math.sqrt(2 * fraction))  # 2 (1 - Phi(z / sqrt f))


def level(alpha: float, looks: Sequence[int], look: int, spending: Spending) -> float:
    """The one-sided level of the test at `look`, one of `looks` (blocks, ascending; the last one is all of them)."""
    at = looks.index(look)
    before = looks[at - 1] / looks[-1] if at else 0.0
    return spent(alpha, look / looks[-1], spending) - spent(alpha, before, spending)
