"""A verdict for people: the state, each criterion with its numbers, the reasons, and where the record is."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from orchestrator import console, labels
from orchestrator.abtest import arm_titles, hours
from orchestrator.abtest.design import Design
from orchestrator.judging.verdict import CriterionResult, Verdict
from orchestrator.schema import ABTest

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INVALID": "bold red", "INCONCLUSIVE": "bold yellow"}


def show(verdict: Verdict, design: Design, run_id: str) -> None:
    """Print it on stdout; who reads it does not change it."""
    with console.to_a_reader_that_may_leave():
        _show(verdict, design, run_id)


def _show(verdict: Verdict, design: Design, run_id: str) -> None:
    from rich.text import Text

    test, out = design.test, console.stdout()
    what = _what(test)
    out.print(Text(f"{verdict.state}  ", STYLES[verdict.state]) + Text(f"{what}, gate {verdict.gate}", ""))
    if verdict.criteria:
        out.print(table(verdict))
    sentences = [criterion.sentence for criterion in verdict.criteria]
    for line in [*sentences, *(reason for reason in verdict.reasons if reason not in sentences)]:
        out.print(Text(f"- {line}"), soft_wrap=True)
    if verdict.state == "INCONCLUSIVE" and verdict.next_look is not None:
        out.print(Text(f"the next look is after block {verdict.next_look}"))
    again = f"`python -m orchestrator verdict {run_id}` computes this again from the records"
    out.print(Text(f"run {run_id}; {again}"), soft_wrap=True)
    sys.stdout.flush()


def _what(test: ABTest) -> str:
    titles = arm_titles.of(test)
    return f"A/A of {test.a.name}" if test.kind == "floor" else f"{titles['b']} (b) against {titles['a']} (a)"


def as_markdown(verdict: Verdict, design: Design) -> str:
    """The verdict in a few lines, for the description of its run; what stands in reasons stays text."""
    test = design.test
    what = _what(test)
    lines = [f"**{verdict.state}** {_escaped(what)}, gate {_escaped(verdict.gate)}", ""]
    lines += [f"- {_escaped(reason)}" for reason in verdict.reasons]
    return "\n".join([*lines, "", "Pictures and numbers: the artifact `report.html`."])


def _escaped(text: str) -> str:
    """Markdown and HTML as plain text."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def table(verdict: Verdict) -> Table:
    """One row a criterion."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("criterion", "claim", "state", "effect", "interval", "threshold", "boots", "to settle"):
        right = head in ("effect", "boots")
        found.add_column(head, no_wrap=head == "state", overflow="fold", justify="right" if right else "left")
    for criterion in verdict.criteria:
        cells = (
            f"{criterion.metric}{' *' if criterion.role == 'primary' else ''}",
            criterion.claim.replace("_", " "),
            criterion.state,
            amount(criterion.effect, criterion),
            "" if criterion.interval is None else " to ".join(amount(end, criterion) for end in criterion.interval),
            amount(criterion.threshold, criterion),
            f"{criterion.boots_a}+{criterion.boots_b}",
            _to_settle(criterion),
        )
        found.add_row(*(Text(cell, STYLES[criterion.state] if n == 2 else "") for n, cell in enumerate(cells)))
    return found


def amount(value: float | None, criterion: CriterionResult) -> str:
    """A number in the criterion's unit: relative effects and shares as percent, with their sign."""
    if value is None:
        return ""
    if criterion.unit in ("relative", "share"):
        return f"{100 * value:+.2f}%"
    if criterion.unit == "nats":
        return f"{value:+.4f} nats"
    return labels.text(value)


def _to_settle(criterion: CriterionResult) -> str:
    if criterion.more_boots is None:
        return ""
    time = "" if criterion.more_hours is None else f", {hours.text(criterion.more_hours)}"
    return f"{criterion.more_boots} more boots{time}"
