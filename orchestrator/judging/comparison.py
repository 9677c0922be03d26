"""A comparison: what the boots of two arms say about one metric, and what it is judged with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.judging.gate import BootResult, Claim, Criterion, Gate, Role
from orchestrator.progress import span
from orchestrator.records import Measurement
from orchestrator.stats import paired
from orchestrator.stats.floor import Floor

State = Literal["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]
Unit = Literal["relative", "nats", "share", "count"]
POWER = 0.8  # that "would settle it" stands for
DIRECTED = ("superior", "non_inferior")  # claims in which better matters
BOOTS_PER_BLOCK = 4  # where the gate takes blocks as they are


@dataclass(frozen=True)
class CriterionResult:
    """What the boots say about one metric.

    `effect` and `interval` are of B against A in `unit`: relative (0.01 is B higher by 1%), nats, share or count.
    `more_boots` (both arms together) would settle an INCONCLUSIVE; None where it is settled, or boots do not settle it.
    `missing` says in words what would; `better` which direction is.
    """

    metric: str
    role: Role
    claim: Claim
    state: State
    unit: Unit
    effect: float | None
    interval: tuple[float, float] | None  # two-sided, at `confidence`
    confidence: float | None
    threshold: float | None
    boots_a: int
    boots_b: int
    floor_used: bool
    floor_note: str  # which floor, or why none
    sentence: str
    more_boots: int | None = None
    more_hours: float | None = None
    missing: str = ""
    better: str = ""


@dataclass(frozen=True)
class Look:
    """What the criteria are judged with. `level` is one-sided; `last_level` that of the gate's last look."""

    gate: Gate
    level: float
    last_level: float
    floors: Mapping[str, Floor]
    hours_per_boot: float | None

    @property
    def confidence(self) -> float:
        return 1 - 2 * self.level


@dataclass(frozen=True)
class Compared:
    """One metric of one criterion, and the boots of the blocks that measured it."""

    criterion: Criterion
    metric: str
    boots: tuple[BootResult, ...]

    def arm(self, arm: str) -> tuple[BootResult, ...]:
        return tuple(boot for boot in self.boots if boot.arm == arm)

    def values(self) -> list[float]:
        return [metrics_of(boot)[self.metric] for boot in self.boots]

    def measurement(self, boot: BootResult) -> Measurement:
        """The one that has the metric on this boot."""
        return next(m for m in boot.measurements.values() if self.metric in m.metrics)

    def layout(self) -> paired.Layout | None:
        return paired.layout(*zip(*((b.arm, b.block, b.position) for b in self.boots), strict=True))

    def result(self, state: State, unit: Unit, sentence: str, **found: object) -> CriterionResult:
        """The result, with the fields that any has; `found` the others."""
        defaults = {"effect": None, "interval": None, "confidence": None, "floor_used": False, "floor_note": ""}
        return CriterionResult(
            metric=self.metric,
            role=self.criterion.role,
            claim=self.criterion.claim,
            state=state,
            unit=unit,
            threshold=self.criterion.threshold,
            boots_a=len(self.arm("a")),
            boots_b=len(self.arm("b")),
            better=self.criterion.better if self.criterion.claim in DIRECTED else "",
            sentence=f"{self.metric}: {sentence}",
            **{**defaults, **found},
        )


def metrics_of(result: BootResult) -> dict[str, float]:
    """All numbers of a boot; for outputs, `<bench>` stands for the texts that the bench kept."""
    found: dict[str, float] = {}
    for measurement in result.measurements.values():
        found |= measurement.metrics
        if any("completion" in sample or "text" in sample for sample in measurement.samples):
            found[measurement.bench] = float(len(measurement.samples))
    if result.boot.kv_tokens is not None:
        found["boot.kv_tokens"] = float(result.boot.kv_tokens)
    if result.boot.boot_s is not None:
        found["boot.ready_s"] = result.boot.boot_s
    return found


def benefit_state(
    criterion: Criterion, effect_log: float, interval_log: tuple[float, float]
) -> tuple[State, float, str]:
    """(outcome, distance of the effect from the threshold, what was wanted in words), of B against A in logs."""
    sign = 1 if criterion.better == "higher" else -1
    benefit = tuple(sorted(sign * end for end in interval_log))
    limit, wanted = _limit(criterion), asked(criterion.claim, criterion.threshold, criterion.better)
    if criterion.claim == "equivalent":
        return _equivalent(benefit, limit), abs(abs(effect_log) - limit), wanted
    return paired.decide(benefit, limit), abs(sign * effect_log - limit), wanted


def asked(claim: Claim, threshold: float | None, better: str = "") -> str:
    """What the claim asks of B, in words: a threshold is an amount, and the words say which way it goes."""
    share = percent(threshold or 0.0)
    direction = f"{better} is better and " if better else ""
    return {
        "superior": f"{direction}B must be better by more than {share}"
        if threshold
        else f"{direction}B must be better",
        "non_inferior": f"{direction}B may be worse by less than {share}"
        if threshold
        else f"{direction}B must not be worse",
        "equivalent": f"the arms may differ by less than {share}",
        "fidelity_not_worse": "lower is nearer to the reference and "
        + (f"B may be higher by less than {threshold:g} nats" if threshold else "B must be lower"),
        "accuracy_not_worse": f"B may be lower by less than {100 * (threshold or 0.0):.3g} points",
        "no_more": "B may not have more",
        "identical": "B must say the same",
    }[claim]


def said_interval(confidence: float, ends: tuple[float, float], text: Callable[[float], str], items: str) -> str:
    """An interval in words; one without width says why it has none."""
    if ends[0] == ends[1]:
        return f"no interval: all {items} give this one value"
    return f"{100 * confidence:.1f}% interval {text(ends[0])} to {text(ends[1])}"


def settled_by(result: CriterionResult, blocks: int | None, have: int, look: Look) -> CriterionResult:
    """The result with the boots that would bring it to `blocks`; None: no number of blocks that anyone would make."""
    if blocks is None:
        return result
    boots = (blocks - have) * (look.gate.boots_per_block or BOOTS_PER_BLOCK)
    hours = None if look.hours_per_boot is None else boots * look.hours_per_boot
    return replace(result, more_boots=boots, more_hours=hours)


def would_settle(result: CriterionResult) -> str:
    """The words for it."""
    if result.more_boots is None:
        return "if the truth is what was seen, no reasonable number of boots settles it"
    hours = "" if result.more_hours is None else f" ({span(3600 * result.more_hours)})"
    return f"if the truth is what was seen, {result.more_boots} more boots{hours} settle it in 4 of 5 cases"


def _limit(criterion: Criterion) -> float:
    """The threshold on the log of the benefit: above 0 B must be better by it, below 0 it may be worse by it."""
    share, higher = criterion.threshold or 0.0, criterion.better == "higher"
    if criterion.claim == "superior":
        return math.log1p(share) if higher else -math.log1p(-share)
    if criterion.claim == "non_inferior":
        return math.log1p(-share) if higher else -math.log1p(share)
    return math.log1p(share)


def _equivalent(interval: tuple[float, float], limit: float) -> State:
    low, high = interval
    if -limit < low and high < limit:
        return "PASS"
    return "FAIL" if low > limit or high < -limit else "INCONCLUSIVE"


def relative(log: float) -> float:
    """The relative change that a difference of logs is; infinite where no number holds it."""
    try:
        return math.expm1(log)
    except OverflowError:
        return math.inf


def signed(share: float) -> str:
    return f"{100 * share:+.2f}%"


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.3g}%"
