"""What this machine has and lacks for its box and engine; each lack with the command that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.devices import SYS
from orchestrator.doctor import daemon, devices, interpreter, machine, remains
from orchestrator.doctor.check import Check
from orchestrator.schema import Machine

DEV = Path("/dev")


def examine(asked: Machine, state: Path, cache: Path, sys_root: Path = SYS, dev_root: Path = DEV) -> list[Check]:
    """Every check that the box and the engine call for. Looks, and changes nothing."""
    return [
        *(interpreter.checks(asked.engine) if asked.engine.kind == "process" else daemon.checks(asked)),
        *devices.checks(asked.box, sys_root, dev_root),
        *machine.checks(asked, state, cache),
        *remains.checks(state),
    ]


def show(checks: Sequence[Check]) -> None:
    """Print the checks as a table, then what mends what is wrong, each on a line that can be pasted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("LACKS", style="red")
        table.add_row(mark, Text(check.name), Text(check.found))
    console = Console(soft_wrap=True)
    console.print(table)
    lacks = [check for check in checks if not check.ok]
    for check in lacks:
        console.print(f"\n{check.name}:\n  {check.mend}", markup=False, highlight=False)
    console.print(f"\n{len(lacks)} of {len(checks)} lacking" if lacks else f"\nall {len(checks)} are there")
