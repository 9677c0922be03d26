"""Decisions that people took, with the numbers they had, put to the gate: does it decide as they would now?

A case becomes boots and a gate, and is judged as an A/B is. Its schema:

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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from orchestrator.comparison import State
from orchestrator.errors import UsageError
from orchestrator.gate import BootResult, Claim, Criterion, Gate
from orchestrator.records import Boot, Measurement, from_jsonable
from orchestrator.stats.floor import Floor
from orchestrator.verdict import Verdict, judge

WHEN = "2026-01-01T00:00:00+00:00"
BOX, STACK, KNOB = "recorded", "recorded", "RADIANCE_RECORDED_ARM"
PIPED_WIDTH = 160
DOCUMENTS, POSITIONS = 40, 100  # over which a stated standard error is laid out


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

    def agrees(self, verdict: Verdict) -> bool:
        return verdict.state == self.expect if self.expect else verdict.state != self.expect_not


def run(path: Path) -> int:
    """Judge every case of the file and print what came out; 0 where all agree, else 1."""
    found = [(case, decide(case)) for case in read(path)]
    _show(found)
    wrong = [case.name for case, verdict in found if not case.agrees(verdict)]
    print(f"{len(found) - len(wrong)} of {len(found)} cases as expected" + (f"; not {', '.join(wrong)}" * bool(wrong)))
    return 1 if wrong else 0


def read(path: Path) -> list[Case]:
    """The cases of a file. Raises UsageError with one line that names the case and the key."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file of cases") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no YAML ({' '.join(str(error).split())}); correct it") from None
    if not isinstance(data, list) or not data:
        raise UsageError(f"{path}: it is no list of cases; begin each with `- name: ...`")
    return [_case(entry, f"{path}: case {number + 1}") for number, entry in enumerate(data)]


def decide(case: Case) -> Verdict:
    """What the gate says about a case."""
    results: list[BootResult] = []
    for block, (name, metric) in enumerate(case.metrics.items()):
        results += _boots(case, block, name, metric)
    if not case.metrics:
        results = [_boot(case, "a", 0, 0, {}), _boot(case, "b", 0, 1, {})]
    criteria = {name: _criterion(name, metric, case) for name, metric in case.metrics.items()}
    floors = {
        name: Floor(name, BOX, STACK, 0.0, metric.spread, metric.dof or 0.0, WHEN, 0)
        for name, metric in case.metrics.items()
        if metric.spread is not None
    }
    blocks = max(1, len({result.block for result in results}))
    gate = Gate("cases", criteria, looks=(blocks,), boots_per_block=None, allowed_differences=(f"env {KNOB}",))
    return judge(gate, results, floors)


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
    if not given and (metric.guardrail or case.claim not in ("superior", "any")):
        raise UsageError(f"{where}: what is claimed has no number; add margin, max_increase or min_effect")
    for key in (*numbers, "spread", "dof", "se_abs"):
        value = getattr(metric, key)
        if value is not None and not 0 <= value < (1 if key in ("min_effect", "margin") else math.inf):
            raise UsageError(f"{where}.{key}: {value} is out of range; write a number of at least 0")
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
    if len(metric.discordant) != 2:
        raise UsageError(f"{where}.discordant: {list(metric.discordant)} are not two counts, [A only, B only]")
    a_only, b_only = metric.discordant
    both = metric.a_correct - a_only
    if min(a_only, b_only, both) < 0 or both != metric.b_correct - b_only or both + a_only + b_only > metric.n:
        raise UsageError(
            f"{where}.discordant: {a_only} and {b_only} do not go with {metric.a_correct} and {metric.b_correct} "
            f"right of {metric.n}; a_correct - A only must be b_correct - B only"
        )


def _criterion(name: str, metric: Metric, case: Case) -> Criterion:
    claim: Claim
    min_effect = metric.min_effect
    if metric.n is not None:
        claim = "accuracy_not_worse"
    elif metric.max_increase is not None:
        claim = "fidelity_not_worse"
    elif metric.margin is not None:
        claim = "non_inferior"
    else:
        claim, min_effect = "superior", min_effect or 0.0
    return Criterion(
        metric=name,
        claim=claim,
        role="guardrail" if metric.guardrail else "primary",
        better=metric.better,
        min_effect=min_effect,
        margin=metric.margin,
        max_increase=metric.max_increase,
    )


def _boots(case: Case, block: int, name: str, metric: Metric) -> list[BootResult]:
    """The boots that measured one metric: a block of their own, in the order ABBA as far as there are pairs."""
    if metric.n is not None:
        measured = {"a": [_questions(name, metric, "a")], "b": [_questions(name, metric, "b")]}
        measured = {arm: found if metric.n else [] for arm, found in measured.items()}
    elif metric.max_increase is not None:
        measured = {arm: [_documents(case, name, metric, arm, v) for v in getattr(metric, arm)] for arm in ("a", "b")}
    else:
        measured = {arm: [_numbers(name, v) for v in getattr(metric, arm)] for arm in ("a", "b")}
    measured = {arm: found or [_measurement("recorded", {}, [])] for arm, found in measured.items()}  # an empty list
    order: list[tuple[Literal["a", "b"], Measurement]] = []
    for number in range(max(map(len, measured.values()))):
        for arm in ("a", "b") if number % 2 == 0 else ("b", "a"):
            order += [(arm, measured[arm][number])] if number < len(measured[arm]) else []
    state = {"a": metric.a_boot, "b": metric.b_boot}
    return [
        _boot(case, arm, block, position, {found.bench: found}, state[arm])
        for position, (arm, found) in enumerate(order)
    ]


def _boot(
    case: Case,
    arm: Literal["a", "b"],
    block: int,
    position: int,
    measurements: Mapping[str, Measurement],
    cache_state: Literal["cold", "warm"] = "warm",
) -> BootResult:
    name = f"{block}-{position}"
    planned = "a" if case.arms == "identical_plan" else arm
    seen = "a" if case.arms == "identical_attestation" else planned
    plan = {
        "variant": planned,
        "box": BOX,
        "argv": ["serve"],
        "env": {KNOB: planned},
        "checkpoint": {"path": "checkpoint"},
        "plugin": {"sha256": "recorded"},
        "stack": {"fingerprint": STACK},
        "cache_dir": f"cache-{planned}",
        "fingerprint": planned,
    }
    boot = Boot(name, "measured", planned, cache_state, WHEN, attestations=({"nonce": name, "knobs": {KNOB: seen}},))
    if case.reference_stack == "other" and "kld" not in measurements:
        measurements = {**measurements, "kld": _measurement("kld", {}, [], {"reference_stack": "other"})}
    return BootResult(arm, block, position, name, plan, boot, measurements or {"none": _measurement("none", {}, [])})


def _measurement(
    bench: str,
    metrics: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> Measurement:
    return Measurement(bench, "ok", "", metrics, tuple(samples), config or {}, {}, (), WHEN, 0.0)


def _numbers(name: str, value: float) -> Measurement:
    return _measurement("recorded", {name: float(value)}, [])


def _documents(case: Case, name: str, metric: Metric, arm: str, value: float) -> Measurement:
    """Documents of one KL in arm A, and in arm B of KLs whose mean is off by `se_abs`: normal scores around it."""
    config = {"reference_stack": STACK if case.reference_stack == "same" else "other"}
    if metric.se_abs is None:
        return _measurement("kld", {name: float(value)}, [], config)
    scores = [NormalDist().inv_cdf((n + 0.5) / DOCUMENTS) for n in range(DOCUMENTS)]
    unit = (sum(score**2 for score in scores) / (DOCUMENTS - 1)) ** 0.5
    off = metric.se_abs * DOCUMENTS**0.5 / unit if arm == "b" else 0.0
    samples = [
        {"document": n, "corpus": name, "positions": POSITIONS, "mean_nats": value + off * score}
        for n, score in enumerate(scores)
    ]
    return _measurement("kld", {name: float(value)}, samples, config)


def _questions(name: str, metric: Metric, arm: str) -> Measurement:
    """Questions right in both arms, then in A alone, in B alone, in none."""
    a_only, b_only = metric.discordant or (0, 0)
    both = (metric.a_correct or 0) - a_only
    kinds = [True] * both + [arm == "a"] * a_only + [arm == "b"] * b_only
    kinds += [False] * ((metric.n or 0) - len(kinds))
    samples = [{"id": n, f"correct_{name}": right} for n, right in enumerate(kinds)]
    return _measurement("gsm8k", {name: sum(kinds) / max(1, len(kinds))}, samples)


def _show(found: Sequence[tuple[Case, Verdict]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("case", "expected", "got", "reason"):
        table.add_column(head, overflow="fold", no_wrap=head in ("expected", "got"))
    for case, verdict in found:
        style = "" if case.agrees(verdict) else "bold red"
        cells = (case.name, case.expected, verdict.state, "\n".join(verdict.reasons))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
