"""A gate: what is claimed of arm B against arm A, by which margins, at which looks. And the boots it is judged on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.records import Boot, Measurement, from_jsonable
from orchestrator.stats import looks

Claim = Literal[
    "superior", "non_inferior", "equivalent", "fidelity_not_worse", "accuracy_not_worse", "no_more", "identical"
]
Role = Literal["primary", "guardrail"]
Arm = Literal["a", "b"]


# The key of a criterion that has the claim's number; the other claims have none.
THRESHOLDS: Mapping[Claim, str] = {
    "superior": "min_effect",
    "non_inferior": "margin",
    "equivalent": "margin",
    "accuracy_not_worse": "margin",
    "fidelity_not_worse": "max_increase",
}


LEAST_LEVEL = 1e-9  # one-sided, of a look
FIRST_LOOK = 2  # blocks; docs/methodology.md has the error rates that looks after one block would have


@dataclass(frozen=True)
class BootResult:
    """What one measured boot of an A/B brought.

    `plan` is `to_jsonable(ServePlan)`; `measurements` by bench. `position` is the boot's place inside its block.
    """

    arm: Arm
    block: int
    position: int
    run_id: str
    plan: Mapping[str, Any]
    boot: Boot
    measurements: Mapping[str, Measurement]


@dataclass(frozen=True)
class Criterion:
    """One claim about a metric, or about a family of them (`*` stands for any place, as in decode.ms_per_step.ctx*)."""

    metric: str
    claim: Claim
    role: Role = "guardrail"
    better: Literal["lower", "higher"] = "lower"
    min_effect: float | None = None  # superior: share by which B must be better
    margin: float | None = None  # non_inferior, equivalent: share; accuracy_not_worse: share of the questions
    max_increase: float | None = None  # fidelity_not_worse: nats
    required: bool = True  # False: left out where neither arm measured it
    truncation_tolerance: float = 0.0  # accuracy_not_worse: share of questions by which truncation may differ
    why: str = ""  # where the number comes from

    @property
    def threshold(self) -> float | None:
        """The number that the claim is about."""
        key = THRESHOLDS.get(self.claim)
        return getattr(self, key) if key else None


@dataclass(frozen=True)
class Gate:
    """`looks` are numbers of complete blocks; a verdict is given at these and at no other.

    `allowed_differences` are fields of the plan as `plan --diff` names them, with `*` for any text.
    """

    name: str
    criteria: Mapping[str, Criterion]
    kind: Literal["ab", "aa"] = "ab"  # aa: the arms must be equal
    alpha: float = 0.05  # one-sided, for PASS and for FAIL each, over all looks
    looks: tuple[int, ...] = (2, 4, 6)
    spending: Literal["obrien_fleming", "pocock"] = "obrien_fleming"
    boots_per_block: int | None = 4  # None: a block is complete with whatever it has
    allowed_differences: tuple[str, ...] = field(default=())
    floor_max_age_days: float = 30.0

    @property
    def min_blocks(self) -> int:
        return self.looks[0]

    @property
    def max_blocks(self) -> int:
        return self.looks[-1]


def parse(data: Mapping[str, Any], where: str = "gate") -> Gate:
    """A gate from its yaml. Raises UsageError with one line that names the key, after `where`."""
    try:
        gate = from_jsonable(Gate, data)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    check(gate, where)
    if gate.looks[0] < FIRST_LOOK:
        raise UsageError(
            f"{where}: looks: the first is at {gate.looks[0]} block; two boots an arm cannot show two modes of boots, "
            f"begin at {FIRST_LOOK}"
        )
    return gate


def load(name: str) -> Gate:
    """A shipped gate by its name."""
    import yaml

    from orchestrator.shipped import conf_dir

    path = conf_dir() / "gate" / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; the gates are the files of {path.parent}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise UsageError(f"{path}: no YAML ({' '.join(str(error).split())}); correct it") from None
    return parse(data, str(path))


def check(gate: Gate, where: str) -> None:
    """Raises UsageError for the first of its numbers that is no choice."""
    if not 0 < gate.alpha < 0.5:
        raise UsageError(f"{where}: alpha: {gate.alpha} is no one-sided level; write one above 0 and below 0.5")
    if not gate.looks or gate.looks[0] < 1 or list(gate.looks) != sorted(set(gate.looks)):
        raise UsageError(
            f"{where}: looks: {list(gate.looks)} are not numbers of blocks, each larger than the one before"
        )
    for look in gate.looks:
        if (level := looks.level(gate.alpha, gate.looks, look, gate.spending)) < LEAST_LEVEL:
            raise UsageError(
                f"{where}: looks: alpha {gate.alpha:g} leaves {level:.1g} to the look at {look} of {gate.max_blocks} "
                "blocks, at which nothing can be decided; leave that look out, or raise alpha"
            )
    if gate.boots_per_block is not None and (gate.boots_per_block < 2 or gate.boots_per_block % 2):
        raise UsageError(f"{where}: boots_per_block: {gate.boots_per_block} is no even number of at least 2")
    if not gate.floor_max_age_days > 0:
        raise UsageError(
            f"{where}: floor_max_age_days: {gate.floor_max_age_days} is out of range; write a number above 0"
        )
    primary = [name for name, criterion in gate.criteria.items() if criterion.role == "primary"]
    if len(primary) != 1:
        found = f"{', '.join(primary)} are" if primary else "none is"
        raise UsageError(f"{where}: criteria: one must have role: primary, {found}")
    for name, criterion in gate.criteria.items():
        _check_criterion(criterion, f"{where}: criteria.{name}")


def _check_criterion(criterion: Criterion, where: str) -> None:
    if not criterion.metric.strip():
        raise UsageError(f"{where}.metric: it is empty; name a metric, as in decode.ms_per_step.ctx*")
    wanted = THRESHOLDS.get(criterion.claim)
    for key in ("min_effect", "margin", "max_increase"):
        value = getattr(criterion, key)
        if (key == wanted) != (value is not None):
            what = (
                f"claim {criterion.claim} needs it" if key == wanted else f"claim {criterion.claim} has no such number"
            )
            raise UsageError(f"{where}.{key}: {what}; {'add' if key == wanted else 'remove'} it")
        if value is not None and not 0 <= value < (math.inf if key == "max_increase" else 1):
            raise UsageError(f"{where}.{key}: {value} is out of range; write a share, as in 0.01")
    if criterion.claim == "equivalent" and not criterion.margin:
        raise UsageError(f"{where}.margin: nothing is within a margin of 0; write one above 0")
    if not 0 <= criterion.truncation_tolerance < 1:
        raise UsageError(f"{where}.truncation_tolerance: {criterion.truncation_tolerance} is no share of the questions")
