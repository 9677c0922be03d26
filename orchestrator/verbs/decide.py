"""The verbs about decisions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.verbs.options import Options

if TYPE_CHECKING:
    from orchestrator.judging.cases import Case
    from orchestrator.judging.verdict import Verdict

PIPED_WIDTH = 160


def cases(options: Options) -> int:
    """Judge every case of the file and print what came out; 0 where all agree, else 1."""
    from orchestrator.errors import UsageError
    from orchestrator.judging.case_boots import decide
    from orchestrator.judging.cases import read

    if len(options.overrides) != 1:
        raise UsageError("cases takes one file, as in `python -m orchestrator cases decisions.yaml`")
    found = [(case, decide(case)) for case in read(Path(options.overrides[0]))]
    _show(found)
    wrong = [case.name for case, verdict in found if not case.agrees(verdict.state)]
    print(f"{len(found) - len(wrong)} of {len(found)} cases as expected" + (f"; not {', '.join(wrong)}" * bool(wrong)))
    return 1 if wrong else 0


def _show(found: Sequence[tuple[Case, Verdict]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("case", "expected", "got", "reason"):
        table.add_column(head, overflow="fold", no_wrap=head in ("expected", "got"))
    for case, verdict in found:
        style = "" if case.agrees(verdict.state) else "bold red"
        cells = (case.name, case.expected, verdict.state, "\n".join(verdict.reasons))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
