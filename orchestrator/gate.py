"""A gate: what is claimed of arm B against arm A, by which margins, at which looks. And the boots it is judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.records import Boot, Measurement

Claim = Literal[
    "superior", "non_inferior", "equivalent", "fidelity_not_worse", "accuracy_not_worse", "no_more", "identical"
]
Role = Literal["primary", "guardrail"]
Arm = Literal["a", "b"]


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
