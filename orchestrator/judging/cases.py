"""Decisions that people took, with the numbers they had, as a file. Its schema:

- name: text                      source, why: text, optional
  claim: superior | non_inferior | fidelity_not_worse | accuracy_not_worse | any
  arms: identical_attestation | identical_plan          default: they differ
  reference_stack: other                                default: the boots' own
  metrics:
    NAME: {better: lower | higher, a: [...], b: [...],  a number for each boot
           spread: SD, dof: N,                          the floor, relative
           min_effect | margin: share, guardrail: true,
           a_boot | b_boot: cold}
    NAME: {a: [...], b: [...], se_abs: SE, max_increase: NATS}
    NAME: {n: N, a_correct: N, b_correct: N, discordant: [A only, B only], margin: share}
  expect: PASS | FAIL | INCONCLUSIVE | INVALID          or expect_not
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import UsageError
from orchestrator.judging.comparison import State
from orchestrator.records import from_jsonable

MOST_QUESTIONS = 1_000_000  # each of them is laid out as a record
LARGEST = 10**300
# What a number must be below; none may be negative.
BELOW = {"min_effect": 1, "margin": 1, "max_increase": math.inf, "spread": 10, "dof": 1e9, "se_abs": 1e9}


@dataclass(frozen=True)
class Metric:
    """One metric of a case, as written."""

    better: Literal["lower", "higher"] = "lower"
    a: tuple[Any, ...] | None = None
    b: tuple[Any, ...] | None = None
    spread: float | None = None
    dof: float | None = None
    se_abs: float | None = None
    min_effect: float | None = None
    margin: float | None = None
    max_increase: float | None = None
    guardrail: bool = False
    a_boot: Literal["warm", "cold"] = "warm"
    b_boot: Literal["warm", "cold"] = "warm"
    n: int | None = None
    a_correct: int | None = None
    b_correct: int | None = None
    discordant: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    name: str
    claim: Literal["superior", "non_inferior", "fidelity_not_worse", "accuracy_not_worse", "any"]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    arms: Literal["different", "identical_attestation", "identical_plan"] = "different"
    reference_stack: Literal["same", "other"] = "same"
    expect: State | None = None
    expect_not: State | None = None
    source: str = ""
    why: str = ""

    @property
    def expected(self) -> str:
        return self.expect or f"not {self.expect_not}"

    def agrees(self, state: State) -> bool:
        return state == self.expect if self.expect else state != self.expect_not


def read(path: Path) -> list[Case]:
    """The cases of a file. Raises UsageError with one line that names the case and the key."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file of cases") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise UsageError(f"{path}: no YAML ({' '.join(str(error).split())}); correct it") from None
    if not isinstance(data, list) or not data:
        raise UsageError(f"{path}: it is no list of cases; begin each with `- name: ...`")
    return [_case(entry, f"{path}: case {number + 1}") for number, entry in enumerate(data)]


def _case(entry: Any, where: str) -> Case:
    named = f" ({entry['name']})" if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) else ""
    where += named
    try:
        case = from_jsonable(Case, entry)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if (case.expect is None) == (case.expect_not is None):
        raise UsageError(f"{where}: expect: give either expect or expect_not")
    for name, metric in case.metrics.items():
        _check(metric, case, f"{where}: metrics.{name}")
    return case


def _check(metric: Metric, case: Case, where: str) -> None:
    numbers = ("min_effect", "margin", "max_increase")
    given = [key for key in numbers if getattr(metric, key) is not None]
    if len(given) > 1:
        raise UsageError(f"{where}: {' and '.join(given)}: one of them says what is claimed; keep that")
    contrary = {"superior": "margin", "non_inferior": "min_effect"}.get(case.claim)
    if given == [contrary] and not metric.guardrail:
        raise UsageError(
            f"{where}.{contrary}: the case claims {case.claim}, which has no such number; write "
            f"{'min_effect, or add guardrail: true' if contrary == 'margin' else 'margin'}"
        )
    if not given and (metric.guardrail or case.claim not in ("superior", "any")):
        raise UsageError(f"{where}: what is claimed has no number; add margin, max_increase or min_effect")
    for key, below in BELOW.items():
        value = getattr(metric, key)
        if value is not None and not 0 <= value < below:
            raise UsageError(f"{where}.{key}: {value:g} is out of range; write a number from 0 to below {below:g}")
    if metric.n is not None:
        _check_questions(metric, where)
        return
    for key in ("a", "b"):
        values = getattr(metric, key)
        if values is None:
            raise UsageError(f"{where}.{key}: it is missing; write a list of numbers, as in [23.2]")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{where}.{key}: {value!r} is no number; write a list of them, as in [23.2]")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise UsageError(f"{where}.{key}: a number of {len(str(abs(value)))} digits is too large; correct it")
    for key in ("a_correct", "b_correct", "discordant"):
        if getattr(metric, key) is not None:
            raise UsageError(f"{where}.{key}: it belongs to n, the number of questions; add n")
    if (metric.spread is None) != (metric.dof is None):
        raise UsageError(f"{where}: spread and dof: a floor has both; add the one that is missing")
    if metric.se_abs is not None and metric.max_increase is None:
        raise UsageError(f"{where}.se_abs: it belongs to max_increase; add max_increase")


def _check_questions(metric: Metric, where: str) -> None:
    for key in ("a_correct", "b_correct", "discordant", "margin"):
        if getattr(metric, key) is None:
            raise UsageError(
                f"{where}.{key}: it is missing; questions have n, a_correct, b_correct, discordant, margin"
            )
    for key in ("a", "b", "spread", "dof", "se_abs"):
        if getattr(metric, key) is not None:
            raise UsageError(f"{where}.{key}: it does not go with n, the number of questions; remove one of them")
    if metric.n > MOST_QUESTIONS:
        raise UsageError(f"{where}.n: {metric.n} is out of range; write a number of at most {MOST_QUESTIONS:,}")
    if len(metric.discordant) != 2:
        raise UsageError(f"{where}.discordant: {list(metric.discordant)} are not two counts, [A only, B only]")
    a_only, b_only = metric.discordant
    both = metric.a_correct - a_only
    if min(a_only, b_only, both) < 0 or both != metric.b_correct - b_only or both + a_only + b_only > metric.n:
        raise UsageError(
            f"{where}.discordant: {a_only} and {b_only} do not go with {metric.a_correct} and {metric.b_correct} "
            f"right of {metric.n}; a_correct - A only must be b_correct - B only"
        )
