"""How many boots an A/B needs: the power of the moderated t in whole blocks of four boots."""

from __future__ import annotations

from orchestrator.stats.paired import ROUNDING

MOST_BLOCKS = 100


def power(distance_log: float, sd_log: float, blocks: int, floor_dof: float, level: float) -> float:
    """Chance that `blocks` ABBA blocks decide at the one-sided `level`, where the truth is `distance_log` from the
    threshold and boots have the standard deviation `sd_log`: of the noncentral t.
    """
    from scipy.stats import nct

    from orchestrator.stats.paired import quantile

    dof = 2 * blocks - 1 + floor_dof
    return float(nct.sf(quantile(1 - level, dof), dof, abs(distance_log) / sd_log * blocks**0.5))


def blocks_needed(
    distance_log: float, sd_log: float, floor_dof: float, level: float, wanted: float = 0.8, at_least: int = 1
) -> int | None:
    """The fewest blocks with that power; None above MOST_BLOCKS. Power grows with the blocks."""
    if sd_log <= 0:
        return at_least if abs(distance_log) > ROUNDING else None
    low, high = at_least, MOST_BLOCKS
    if power(distance_log, sd_log, high, floor_dof, level) < wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        if power(distance_log, sd_log, middle, floor_dof, level) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def detectable(sd_log: float, blocks: int, floor_dof: float, level: float, wanted: float = 0.8) -> float:
    """The smallest distance from the threshold (log) that `blocks` blocks decide with that power."""
    from scipy.optimize import brentq

    return float(
        brentq(lambda d: power(d, sd_log, blocks, floor_dof, level) - wanted, 1e-9 * sd_log, 1e3 * sd_log, rtol=1e-6)
    )
