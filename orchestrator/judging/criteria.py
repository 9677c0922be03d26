"""Which metrics a gate's criteria are about, and what the boots say about each: pure, from records alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.judging import outputs, paired_items, per_boot
from orchestrator.judging.comparison import Compared, CriterionResult, Look, metrics_of
from orchestrator.judging.gate import BootResult, Claim, Criterion

EVALUATORS: Mapping[Claim, Callable[[Compared, Look], CriterionResult]] = {
    "superior": per_boot.numbers,
    "non_inferior": per_boot.numbers,
    "equivalent": per_boot.numbers,
    "fidelity_not_worse": paired_items.fidelity,
    "accuracy_not_worse": paired_items.accuracy,
    "no_more": outputs.no_more,
    "identical": outputs.identical,
}


def evaluate(look: Look, results: Sequence[BootResult]) -> list[CriterionResult]:
    """A result for each metric of each criterion: of the primary one first, then by the criteria's names, as a record
    does not have the order in which a gate was written.

    A metric that one boot has, every boot must have. Where blocks are of no size, as those of recorded decisions, every
    metric may have blocks of its own.
    """
    found: list[CriterionResult] = []
    measured = [(result, frozenset(metrics_of(result))) for result in results]
    named = sorted(look.gate.criteria.items(), key=lambda of: (of[1].role != "primary", of[0]))
    for _, criterion in named:
        names = expand(criterion, {name for _, has in measured for name in has})
        if not names and criterion.required:
            nothing = Compared(criterion, criterion.metric, ())
            found.append(nothing.result("INVALID", "relative", "no metric of it was measured"))
        for name in names:
            blocks = {result.block for result, has in measured if name in has or look.gate.boots_per_block is not None}
            compared = Compared(criterion, name, tuple(result for result in results if result.block in blocks))
            missing = [result for result, has in measured if result.block in blocks and name not in has]
            if missing:
                where = f"arm {missing[0].arm}, block {missing[0].block}, boot {missing[0].run_id}"
                found.append(compared.result("INVALID", "relative", f"missing on {where}, measured on others"))
                continue
            evaluator = EVALUATORS[criterion.claim]
            if evaluator is per_boot.numbers and paired_items.counts_drafts(compared):
                evaluator = paired_items.acceptance
            found.append(evaluator(compared, look))
    return found


def expand(criterion: Criterion, measured: Iterable[str]) -> list[str]:
    """The criterion's metrics among those. `*` is text without a dot."""
    pattern = re.compile(re.escape(criterion.metric).replace(r"\*", r"[^.]+"))
    return sorted(filter(pattern.fullmatch, measured), key=_by_number)


def _by_number(name: str) -> tuple:
    """ctx512 before ctx2048."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
