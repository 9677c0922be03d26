"""A floor: how much a metric differs between boots of one and the same build on one box, measured by A/A boots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Floor:
    """The noise of one metric on one box and stack, as standard deviations of the natural log (about relative ones).

    `sd_between_log` is between boots' summaries: what an A/B of boots meets, repeats within the boots included.
    `sd_within_log` is between repeats inside one boot; 0 where a boot has a single number.
    `dof` are the degrees of freedom behind `sd_between_log`.
    """

    metric: str
    box: str
    stack: str  # fingerprint
    sd_within_log: float
    sd_between_log: float
    dof: float
    measured_at_utc: str  # ISO 8601, of the last boot
    boots: int

    def __post_init__(self) -> None:
        spreads = (self.sd_within_log, self.sd_between_log, self.dof)
        if not all(math.isfinite(value) and value >= 0 for value in spreads):
            raise ValueError(f"the floor of {self.metric} has a spread or degrees of freedom below 0")
        if datetime.fromisoformat(self.measured_at_utc).tzinfo is None:
            raise ValueError(f"the floor of {self.metric}: measured_at_utc {self.measured_at_utc!r} has no time zone")

    def age_days(self, at_utc: str) -> float:
        """Days from the floor's last boot until `at_utc` (ISO 8601); negative where the floor is the newer one."""
        return (datetime.fromisoformat(at_utc) - datetime.fromisoformat(self.measured_at_utc)).total_seconds() / 86400


def estimate(
    metric: str,
    box: str,
    stack: str,
    blocks: Sequence[int],
    positions: Sequence[int],
    values: Sequence[float],
    repeats: Sequence[Sequence[float]],
    measured_at_utc: str,
) -> Floor | None:
    """The floor from boots of one build: variance components of the logs.

    `values` is a summary for each boot, at its position of its block; each block's level and linear drift are taken
    out, as an A/B takes them out. `repeats` has what each boot's summary was made of, where that is known; else empty.
    None where the boots leave no degree of freedom, or a value is not above zero.
    """
    import numpy
    from scipy.linalg import null_space

    from orchestrator.stats.paired import nuisance, scatter

    y = numpy.asarray(values, dtype=float)
    if not len(y) or not (numpy.isfinite(y).all() and (y > 0).all()):
        return None
    left = null_space(nuisance(blocks, positions).T)  # (boots, dof)
    if not left.shape[1]:
        return None
    logs = [numpy.log(numpy.asarray(inside, dtype=float)) for inside in repeats if len(inside) > 1]
    inner_dof = sum(len(inside) - 1 for inside in logs)
    inner = sum(float(((inside - inside.mean()) ** 2).sum()) for inside in logs)
    return Floor(
        metric=metric,
        box=box,
        stack=stack,
        sd_within_log=(inner / inner_dof) ** 0.5 if inner_dof else 0.0,
        sd_between_log=scatter(numpy.log(y), left) ** 0.5,
        dof=float(left.shape[1]),
        measured_at_utc=measured_at_utc,
        boots=len(y),
    )
