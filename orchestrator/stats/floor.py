"""A floor: how much a metric differs between boots of one and the same build on one box, measured by A/A boots."""

from __future__ import annotations

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

    def age_days(self, at_utc: str) -> float:
        """Days from the floor's last boot until `at_utc` (ISO 8601); negative where the floor is the newer one."""
        return (datetime.fromisoformat(at_utc) - datetime.fromisoformat(self.measured_at_utc)).total_seconds() / 86400
