"""A verdict for people: the state, each criterion with its numbers, the reasons, and where the record is."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from orchestrator import console
from orchestrator.abtest import arm_titles, hours
from orchestrator.abtest.design import Design
from orchestrator.judging import headline
from orchestrator.judging.verdict import CriterionResult, Verdict
from orchestrator.schema import ABTest

if TYPE_CHECKING:
    from rich.table import Table

PRIMARY_NOTE = "* the primary criterion: what B is claimed to be; the others guard against what it may cost"
STYLES = {"PASS": "bold green", "FAIL": "bold red", "INVALID": "bold red", "INCONCLUSIVE": "bold yellow"}


def show(verdict: Verdict, design: Design, run_id: str) -> None:
    """Print it on stdout; who reads it does not change it."""
    with console.to_a_reader_that_may_leave():
        _show(verdict, design, run_id)


def _show(verdict: Verdict, design: Design, run_id: str) -> None:
    from rich.text import Text

    test, out = design.test, console.stdout()
    what = _what(test)
    said = headline.of(verdict).removeprefix(verdict.state)
    out.print(Text(verdict.state, STYLES[verdict.state]) + Text(said, ""), soft_wrap=True)
    out.print(Text(f"{what}, gate {verdict.gate}"), soft_wrap=True)
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


def as_markdown(verdict: Verdict, design: Design, pictures: bool = True) -> str:
    """The verdict in a few lines, for the description of its run; what stands in reasons stays text. `pictures` says
    that there is a report."""
    test = design.test
    what = _what(test)
    said = headline.of(verdict).removeprefix(verdict.state)
    lines = [f"**{verdict.state}**{escaped(said)}", "", f"{escaped(what)}, gate {escaped(verdict.gate)}", ""]
    lines += [f"- {escaped(reason)}" for reason in verdict.reasons]
    if pictures:
        lines += ["", "Pictures and numbers: the artifact `report.html`."]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Markdown and HTML as plain text."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def table(verdict: Verdict) -> Table:
    """One row a criterion, and under it what its marks mean."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left", caption_style="")
    found.caption = PRIMARY_NOTE
    for head in ("criterion", "claim", "state", "effect", "interval", "asked of B", "boots", "to settle"):
        right = head in ("effect", "boots")
        found.add_column(head, no_wrap=head == "state", overflow="fold", justify="right" if right else "left")
    for criterion, row in zip(verdict.criteria, headline.rows(verdict.criteria), strict=True):
        metric, role, *cells = row
        cells = (
            f"{metric}{' *' if role == 'primary' else ''}",
            *cells,
            f"{criterion.boots_a}+{criterion.boots_b}",
            _to_settle(criterion),
        )
        found.add_row(*(Text(cell, STYLES[criterion.state] if n == 2 else "") for n, cell in enumerate(cells)))
    return found


def _to_settle(criterion: CriterionResult) -> str:
    if criterion.more_boots is None:
        return ""
    time = "" if criterion.more_hours is None else f", {hours.text(criterion.more_hours)}"
    return f"{criterion.more_boots} more boots{time}"
