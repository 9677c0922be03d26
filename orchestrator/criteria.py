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
    for criterion in look.gate.criteria.values():
        names, said = expand(criterion, results)
        notes += said
        if not names and criterion.required:
            nothing = Compared(criterion, criterion.metric, ())
            found.append(nothing.result("INVALID", "relative", "no boot of both arms measured it"))
        for name in names:
            compared = Compared(criterion, name, tuple(b for b in results if _measured_in(name, b, results)))
            missing = [boot for boot in compared.boots if name not in metrics_of(boot)]
            if missing:
                where = f"arm {missing[0].arm}, block {missing[0].block}, boot {missing[0].run_id}"
                found.append(compared.result("INVALID", "relative", f"missing on {where}, measured in the same block"))
                continue
            evaluator = EVALUATORS[criterion.claim]
            if evaluator is per_boot.numbers and paired_items.counts_drafts(compared):
                evaluator = paired_items.acceptance
            found.append(evaluator(compared, look))
    return found, notes


def expand(criterion: Criterion, results: Sequence[BootResult]) -> tuple[list[str], list[str]]:
    """(the criterion's metrics that both arms have, notes on those of one arm alone). `*` is text without a dot."""
    pattern = re.compile(re.escape(criterion.metric).replace(r"\*", r"[^.]+"))
    having: dict[str, set[str]] = {}
    for result in results:
        for name in metrics_of(result):
            if pattern.fullmatch(name):
                having.setdefault(name, set()).add(result.arm)
    notes = [
        f"{name}: measured in arm {next(iter(having[name]))} alone, so left out"
        for name in sorted(having, key=_by_number)
        if len(having[name]) == 1
    ]
    return [name for name in sorted(having, key=_by_number) if len(having[name]) == 2], notes


def _measured_in(name: str, boot: BootResult, results: Sequence[BootResult]) -> bool:
    return any(other.block == boot.block and name in metrics_of(other) for other in results)


def _by_number(name: str) -> tuple:
    """ctx512 before ctx2048."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
