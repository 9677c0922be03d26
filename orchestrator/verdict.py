"""The verdict on an A/B: a pure function of the recorded boots, the gate and the box's floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.gate import BootResult, Claim, Gate, Role
from orchestrator.stats.floor import Floor

State = Literal["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]


@dataclass(frozen=True)
class CriterionResult:
    """What the boots say about one metric.

    `effect` and `interval` are of B against A in `unit`: relative (0.01 is B higher by 1%), nats, share or count.
    """

    metric: str
    role: Role
    claim: Claim
    state: State
    unit: Literal["relative", "nats", "share", "count"]
    effect: float | None
    interval: tuple[float, float] | None  # at `confidence`, two-sided
    confidence: float | None
    threshold: float | None
    boots_a: int
    boots_b: int
    floor_used: bool
    floor_note: str  # which floor, or why none
    sentence: str
    more_boots: int | None = None  # of both arms together, that would settle it; None: settled, or not by boots
    more_hours: float | None = None


@dataclass(frozen=True)
class Verdict:
    """`look` is the number of complete blocks judged; `next_look` the one that may still settle it."""

    state: State
    reasons: tuple[str, ...]
    criteria: tuple[CriterionResult, ...]
    gate: str
    look: int
    alpha_at_look: float | None  # one-sided, spent at this look; None: no verdict is declared here
    next_look: int | None = None


def judge(
    gate: Gate,
    results: Sequence[BootResult],
    floors: Mapping[str, Floor],
    *,
    hours_per_boot: float | None = None,
) -> Verdict:
    """The verdict of `gate` on these boots, whatever their order. `floors` by metric."""
    raise NotImplementedError
