"""Criteria on what both arms did with the same items: documents of a KL, prompts, questions."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from orchestrator.judging.comparison import (
    POWER,
    Compared,
    CriterionResult,
    Look,
    asked,
    benefit_state,
    relative,
    said_interval,
    signed,
)
from orchestrator.judging.gate import BootResult
from orchestrator.stats import paired, proportions, resample


def fidelity(compared: Compared, look: Look) -> CriterionResult:
    """fidelity_not_worse: KL of B minus that of A, the documents paired."""
    unit = "nats"
    if look.level < resample.LEAST_LEVEL:
        return compared.result("INCONCLUSIVE", unit, _too_early(look, "documents"))
    by_boot = [_documents(compared, boot) for boot in compared.boots]
    if len({frozenset((name, size) for name, (_, size) in found.items()) for found in by_boot}) != 1:
        return compared.result("INVALID", unit, "documents: the boots did not score the same ones")
    names = sorted(by_boot[0])
    if len(names) < resample.MIN_ITEMS:
        said = f"{len(names)} documents, an interval takes {resample.MIN_ITEMS}; give the suite's kld more documents"
        return compared.result("INCONCLUSIVE", unit, said)
    if not all(math.isfinite(total) for found in by_boot for total, _ in found.values()):
        return compared.result("INVALID", unit, "documents: a KL is not finite")
    sums = _mean_by_arm(compared, [[found[name][0] for name in names] for found in by_boot])
    sizes = [by_boot[0][name][1] for name in names]
    drawn = resample.weighted_difference([b - a for a, b in zip(sums["a"], sums["b"], strict=True)], sizes)
    if not drawn.bounded(look.confidence):
        return compared.result("INCONCLUSIVE", unit, _unbounded("documents"), effect=drawn.value)
    low, high = _with_boots(compared, look, drawn.value, drawn.interval(look.confidence), compared.values())
    limit = compared.criterion.threshold or 0.0
    state = paired.decide((-high, -low), -limit)
    interval = said_interval(look.confidence, (low, high), "{:+.4f}".format, "documents")
    said = (
        f"B is {drawn.value:+.4f} nats against A ({interval}; {len(names)} documents, {boots_of(compared)}); "
        f"{asked(compared.criterion.claim, limit)}"
    )
    missing = _items_needed(abs(limit - drawn.value), drawn, look, "documents") if state == "INCONCLUSIVE" else ""
    return compared.result(
        state, unit, _joined(said, missing), effect=drawn.value, interval=(low, high), confidence=look.confidence,
        floor_note="documents", missing=missing,
    )  # fmt: skip


def counts_drafts(compared: Compared) -> bool:
    """Whether the metric is an acceptance of which every boot kept the counts of each prompt."""
    return "acceptance_length" in compared.metric and all(_drafts(compared, boot) for boot in compared.boots)


def acceptance(compared: Compared, look: Look) -> CriterionResult:
    """superior, non_inferior and equivalent, of tokens per step: a ratio of counts, the prompts paired."""
    unit = "relative"
    if look.level < resample.LEAST_LEVEL:
        return compared.result("INCONCLUSIVE", unit, _too_early(look, "prompts"))
    by_boot = [_drafts(compared, boot) for boot in compared.boots]
    if len({frozenset(found) for found in by_boot}) != 1:
        return compared.result("INVALID", unit, "prompts: the boots did not answer the same ones")
    names = sorted(by_boot[0])
    if len(names) < resample.MIN_ITEMS:
        said = f"{len(names)} prompts, an interval takes {resample.MIN_ITEMS}; give the bench more prompts"
        return compared.result("INCONCLUSIVE", unit, said)
    tokens = _mean_by_arm(compared, [[found[name][0] for name in names] for found in by_boot])
    steps = _mean_by_arm(compared, [[found[name][1] for name in names] for found in by_boot])
    if not all(sum(part) > 0 for part in (*tokens.values(), *steps.values())):
        return compared.result("INVALID", unit, "drafts: an arm has none")
    drawn = resample.log_ratio_of_ratios(tokens["a"], steps["a"], tokens["b"], steps["b"])
    if not drawn.bounded(look.confidence):
        return compared.result("INCONCLUSIVE", unit, _unbounded("prompts"), effect=relative(drawn.value))
    logs = [math.log(value) for value in compared.values()]
    low, high = _with_boots(compared, look, drawn.value, drawn.interval(look.confidence), logs)
    state, distance, wanted = benefit_state(compared.criterion, drawn.value, (low, high))
    effect, ends = relative(drawn.value), (relative(low), relative(high))
    interval = said_interval(look.confidence, ends, signed, "prompts")
    said = f"B is {signed(effect)} against A ({interval}; {len(names)} prompts, {boots_of(compared)}); {wanted}"
    missing = _items_needed(distance, drawn, look, "prompts") if state == "INCONCLUSIVE" else ""
    return compared.result(
        state, unit, _joined(said, missing), effect=effect, interval=ends, confidence=look.confidence,
        floor_note="prompts", missing=missing,
    )  # fmt: skip


def accuracy(compared: Compared, look: Look) -> CriterionResult:
    """accuracy_not_worse: share of right answers of B minus that of A, the questions paired."""
    unit, criterion = "share", compared.criterion
    key = correct_key(compared.metric)
    by_boot = [_answers(compared, boot, key) for boot in compared.boots]
    first = by_boot[0]
    for boot, found in zip(compared.boots, by_boot, strict=True):
        if found.keys() != first.keys() or not found:
            return compared.result(
                "INVALID", unit, f"questions: boot {boot.run_id} was asked others than the first one"
            )
        failed = [name for name, (right, _) in found.items() if right is None]
        if failed:
            said = f"questions: {len(failed)} have no answer on boot {boot.run_id}, so the arms' sets are not equal"
            return compared.result("INVALID", unit, said)
    names = sorted(first)
    if len(names) < proportions.MIN_QUESTIONS:
        said = f"{len(names)} questions, an interval takes {proportions.MIN_QUESTIONS}; give the bench more of them"
        return compared.result("INCONCLUSIVE", unit, said)
    cut = _mean_by_arm(compared, [[float(found[name][1]) for name in names] for found in by_boot])
    shares = {arm: sum(values) / len(names) for arm, values in cut.items()}
    if abs(shares["a"] - shares["b"]) > criterion.truncation_tolerance + 1e-12:
        said = (
            f"truncated: {100 * shares['a']:.2f}% of arm a's answers, {100 * shares['b']:.2f}% of arm b's; they may "
            f"differ by {100 * criterion.truncation_tolerance:g}%; give the bench more max_tokens"
        )
        return compared.result("INVALID", unit, said)
    right = {
        arm: [
            [bool(found[name][0]) for name in names]
            for boot, found in zip(compared.boots, by_boot, strict=True)
            if boot.arm == arm
        ]
        for arm in ("a", "b")
    }
    found = proportions.discordance(right["a"], right["b"])
    over_questions = proportions.score_interval(found, look.confidence)
    low, high = _with_boots(compared, look, found.difference, over_questions, compared.values())
    margin = criterion.threshold or 0.0
    state = paired.decide((low, high), -margin)
    a_only, b_only = proportions.disagreeing(right["a"], right["b"])
    interval = said_interval(look.confidence, (low, high), lambda end: f"{100 * end:+.2f}", "questions")
    said = (
        f"B is {100 * found.difference:+.2f} points against A ({interval}; the same {len(names)} questions, "
        f"{a_only} better in A and {b_only} in B, McNemar p = {proportions.mcnemar(a_only, b_only):.2g}; "
        f"{boots_of(compared)}); {asked(criterion.claim, margin)}"
    )
    missing = ""
    if state == "INCONCLUSIVE":
        distance = abs(found.difference + margin)
        spread = (found.a_only + found.b_only) / found.n - found.difference**2
        least = (
            NormalDist().inv_cdf(1 - look.last_level) ** 2 / margin if margin else math.inf
        )  # with none that differs
        wanted = max(_size(distance, spread**0.5, look), least) * len(names) / found.n
        missing = f"about {math.ceil(wanted)} questions would settle it" if math.isfinite(wanted) else ""
    return compared.result(
        state,
        unit,
        _joined(said, missing),
        effect=found.difference,
        interval=(low, high),
        confidence=look.confidence,
        floor_note="questions",
        missing=missing,
    )


def _joined(said: str, missing: str) -> str:
    return f"{said}; {missing}" if missing else said


def _with_boots(
    compared: Compared, look: Look, value: float, interval: tuple[float, float], of_boots: list[float]
) -> tuple[float, float]:
    """The interval over items, widened by what whole boots differ in `of_boots`: half-widths add in quadrature."""
    where = compared.layout()
    boots = paired.estimate(of_boots, where, None, 0.0) if where else None
    if boots is None:
        return interval
    half = boots.interval(look.confidence)[1] - boots.effect
    return value - math.hypot(value - interval[0], half), value + math.hypot(interval[1] - value, half)


def _unbounded(items: str) -> str:
    return f"too few {items} differ between the arms for an interval; give the bench more {items}"


def _too_early(look: Look, items: str) -> str:
    return (
        f"{items} decide at a level of {100 * resample.LEAST_LEVEL:g}% or more, and this look has "
        f"{100 * look.level:.2g}%; a later look or a larger alpha lets them"
    )


def _items_needed(distance: float, drawn: resample.Resampled, look: Look, items: str) -> str:
    wanted = _size(distance, drawn.se * drawn.items**0.5, look)
    return (
        f"about {math.ceil(wanted)} {items} would settle it" if math.isfinite(wanted) else f"no number of {items} would"
    )


def _size(distance: float, sd: float, look: Look) -> float:
    """Items of standard deviation `sd` that decide a distance in 4 of 5 cases."""
    normal = NormalDist()
    z = normal.inv_cdf(1 - look.last_level) + normal.inv_cdf(POWER)
    return (z * sd / distance) ** 2 if distance > 0 else math.inf


def _mean_by_arm(compared: Compared, rows: list[list[float]]) -> dict[str, list[float]]:
    """Item by item, the mean over the boots of each arm; a row for each boot."""
    means = {}
    for arm in ("a", "b"):
        of_arm = [row for boot, row in zip(compared.boots, rows, strict=True) if boot.arm == arm]
        means[arm] = [sum(column) / len(of_arm) for column in zip(*of_arm, strict=True)]
    return means


def corpus_of(metric: str) -> str:
    """The corpus that a KL metric is about, its last word."""
    return metric.rpartition(".")[2]


def correct_key(metric: str) -> str:
    """The key of a question's sample that says whether the answer was right by the metric's extraction."""
    return f"correct_{metric.rpartition('accuracy_')[2]}"


def _documents(compared: Compared, boot: BootResult) -> dict[Any, tuple[float, int]]:
    """Document -> (sum of its KL in nats, its positions), of the metric's corpus."""
    label = corpus_of(compared.metric)
    found = {}
    for sample in compared.measurement(boot).samples:
        if sample.get("corpus") not in (label, label.removesuffix("_halves")):
            continue
        if "positions" in sample:
            found[sample["document"]] = (sample["mean_nats"] * sample["positions"], sample["positions"])
        else:
            found[sample["document"]] = (math.fsum(sample["kl_nats"]), len(sample["kl_nats"]))
    return found


def _drafts(compared: Compared, boot: BootResult) -> dict[Any, tuple[float, float]]:
    """Prompt -> (tokens, steps) of the drafter; empty where the bench keeps no counts of single prompts.

    The answers to one prompt are one item: they have its difficulty in common, and more of them are no new prompts.
    """
    found: dict[Any, tuple[float, float]] = {}
    for sample in compared.measurement(boot).samples:
        if "prompt_id" in sample and "drafts" in sample and not sample.get("error"):
            prompt = sample.get("prompt", sample["prompt_id"])
            tokens, steps = found.get(prompt, (0.0, 0.0))
            found[prompt] = tokens + sample["drafts"] + sample["accepted_tokens"], steps + sample["drafts"]
    return found


def _answers(compared: Compared, boot: BootResult, key: str) -> dict[Any, tuple[bool | None, bool]]:
    """Question -> (right, or None without an answer; truncated)."""
    return {
        sample["id"]: (None if sample.get("error") else sample.get(key), sample.get("finish_reason") == "length")
        for sample in compared.measurement(boot).samples
        if "id" in sample
    }


def boots_of(compared: Compared) -> str:
    """How many boots each arm has, in words."""
    return f"{len(compared.arm('a'))} + {len(compared.arm('b'))} boots"
