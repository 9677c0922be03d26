"""Recorded decisions put to the gate: a case becomes boots, floors and a gate, and is judged as an A/B is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

from orchestrator.judging.cases import Case, Metric
from orchestrator.judging.gate import BootResult, Claim, Criterion, Gate
from orchestrator.judging.paired_items import corpus_of, correct_key
from orchestrator.judging.verdict import Verdict, judge
from orchestrator.records import Boot, Measurement
from orchestrator.stats.floor import Floor

WHEN = "2026-01-01T00:00:00+00:00"
BOX, STACK, KNOB = "recorded", "recorded", "RADIANCE_RECORDED_ARM"
DOCUMENTS, POSITIONS = 40, 100  # over which a stated standard error is laid out


def decide(case: Case) -> Verdict:
    """What the gate says about a case."""
    if case.metrics and all(metric.guardrail for metric in case.metrics.values()):
        return Verdict("INVALID", ("metrics: all are guardrails, so none is the primary one",), (), "cases", 0, None)
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
        {"document": n, "corpus": corpus_of(name), "positions": POSITIONS, "mean_nats": value + off * score}
        for n, score in enumerate(scores)
    ]
    return _measurement("kld", {name: float(value)}, samples, config)


def _questions(name: str, metric: Metric, arm: str) -> Measurement:
    """Questions right in both arms, then in A alone, in B alone, in none."""
    a_only, b_only = metric.discordant or (0, 0)
    both = (metric.a_correct or 0) - a_only
    kinds = [True] * both + [arm == "a"] * a_only + [arm == "b"] * b_only
    kinds += [False] * ((metric.n or 0) - len(kinds))
    samples = [{"id": n, correct_key(name): right} for n, right in enumerate(kinds)]
    return _measurement("gsm8k", {name: sum(kinds) / max(1, len(kinds))}, samples)
