"""Which metrics a gate's criteria are about, and what the boots say about each: pure, from records alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from orchestrator import paired_items, per_boot
from orchestrator.comparison import Compared, CriterionResult, Look, metrics_of
from orchestrator.gate import BootResult, Claim, Criterion

EVALUATORS: Mapping[Claim, Callable[[Compared, Look], CriterionResult]] = {
    "superior": per_boot.numbers,
    "non_inferior": per_boot.numbers,
    "equivalent": per_boot.numbers,
    "fidelity_not_worse": paired_items.fidelity,
    "accuracy_not_worse": paired_items.accuracy,
    "no_more": paired_items.no_more,
    "identical": paired_items.identical,
}


def evaluate(look: Look, results: Sequence[BootResult]) -> tuple[list[CriterionResult], list[str]]:
    """(a result for each metric of each criterion, notes on what was left out)."""
    found: list[CriterionResult] = []
    notes: list[str] = []
    measured = [(result, frozenset(metrics_of(result))) for result in results]
    for criterion in look.gate.criteria.values():
        names, said = expand(criterion, measured)
        notes += said
        if not names and (criterion.required or said):
            nothing = Compared(criterion, criterion.metric, ())
            found.append(nothing.result("INVALID", "relative", "no metric of it was measured in both arms"))
        for name in names:
            blocks = {result.block for result, has in measured if name in has}
            compared = Compared(criterion, name, tuple(result for result in results if result.block in blocks))
            missing = [result for result, has in measured if result.block in blocks and name not in has]
            if missing:
                where = f"arm {missing[0].arm}, block {missing[0].block}, boot {missing[0].run_id}"
                found.append(compared.result("INVALID", "relative", f"missing on {where}, measured in the same block"))
                continue
            evaluator = EVALUATORS[criterion.claim]
            if evaluator is per_boot.numbers and paired_items.counts_drafts(compared):
                evaluator = paired_items.acceptance
            found.append(evaluator(compared, look))
    return found, notes


def expand(criterion: Criterion, measured: Sequence[tuple[BootResult, frozenset[str]]]) -> tuple[list[str], list[str]]:
    """(the criterion's metrics that both arms have, notes on those of one arm alone). `*` is text without a dot."""
    pattern = re.compile(re.escape(criterion.metric).replace(r"\*", r"[^.]+"))
    having: dict[str, set[str]] = {}
    for result, names in measured:
        for name in filter(pattern.fullmatch, names):
            having.setdefault(name, set()).add(result.arm)
    ordered = sorted(having, key=_by_number)
    alone = [
        f"{name}: measured in arm {min(having[name])} alone, so left out" for name in ordered if len(having[name]) == 1
    ]
    return [name for name in ordered if len(having[name]) == 2], alone


def _by_number(name: str) -> tuple:
    """ctx512 before ctx2048."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
