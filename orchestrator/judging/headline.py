"""The one sentence that a verdict begins with, the same wherever it is shown: the state, and why."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.judging.comparison import CriterionResult, asked
from orchestrator.judging.verdict import Verdict


def of(verdict: Verdict) -> str:
    """State, the criterion that decided, its effect with interval, what was asked of it, and what is missing."""
    own = {criterion.sentence for criterion in verdict.criteria}
    lead = verdict.reasons[0] if verdict.reasons and verdict.reasons[0] not in own else ""
    decider = deciding(verdict)
    if verdict.state == "INVALID" or decider is None:
        return f"{verdict.state}, because {lead or (decider.sentence if decider else 'nothing was judged')}"
    if lead:
        return f"{verdict.state}, because {lead}; so far {_short(decider)}"
    return f"{verdict.state}, because {_short(decider)}{_others(verdict)}"


def deciding(verdict: Verdict) -> CriterionResult | None:
    """The first criterion, primary ones first, that has the verdict's state; else the first of all."""
    alike = [criterion for criterion in verdict.criteria if criterion.state == verdict.state]
    return next(iter(alike or verdict.criteria), None)


def amount(value: float | None, criterion: CriterionResult) -> str:
    """An effect in the criterion's unit: relative effects and shares as percent, with their sign."""
    if value is None:
        return ""
    if criterion.unit in ("relative", "share"):
        return f"{100 * value:+.2f}%"
    return f"{value:+.4f} nats" if criterion.unit == "nats" else f"{value:+g}"


def interval(criterion: CriterionResult) -> str:
    """Its ends; one of no width as what it is."""
    if criterion.interval is None:
        return ""
    low, high = criterion.interval
    if low == high:
        return f"none: all {_items(criterion)} give one value"
    return f"{amount(low, criterion)} to {amount(high, criterion)}"


def threshold(criterion: CriterionResult) -> str:
    return asked(criterion.claim, criterion.threshold, criterion.better)


def _items(criterion: CriterionResult) -> str:
    return criterion.floor_note if criterion.floor_note in ("documents", "prompts", "questions") else "boots"


def _short(criterion: CriterionResult) -> str:
    if criterion.effect is None or criterion.interval is None:
        return criterion.sentence
    known = criterion.interval[0] != criterion.interval[1]
    level = f"{100 * (criterion.confidence or 0):.1f}% " if known else ""
    said = (
        f"{criterion.metric} of B is {amount(criterion.effect, criterion)} against A "
        f"({level}interval {interval(criterion)}); {threshold(criterion)}"
    )
    return f"{said}; {criterion.missing}" if criterion.missing else said


def _others(verdict: Verdict) -> str:
    """How the other criteria stand."""
    alike = sum(criterion.state == verdict.state for criterion in verdict.criteria) - 1
    if verdict.state == "PASS":
        return f"; the other {alike} criteria pass, too" if alike > 1 else "; the other one passes, too" * alike
    return f"; {alike} more {_word(alike)} {verdict.state}, too" if alike else ""


def _word(number: int) -> str:
    return "criterion is" if number == 1 else "criteria are"


def rows(criteria: Sequence[CriterionResult]) -> list[tuple[str, ...]]:
    """A row for each criterion, the primary ones first, as every table of a verdict has it: metric, role, claim, state,
    effect, interval, what was asked."""
    return [
        (
            criterion.metric,
            criterion.role,
            criterion.claim.replace("_", " "),
            criterion.state,
            amount(criterion.effect, criterion),
            interval(criterion),
            threshold(criterion),
        )
        for criterion in criteria
    ]
