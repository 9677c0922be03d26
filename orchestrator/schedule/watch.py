"""Who watches a unit, on the machine that has its box: ends what takes too long, and leaves when prod is seen to."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Protocol

from orchestrator import config
from orchestrator.progress import Progress, span
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.schedule.clock import Clock
from orchestrator.schedule.decide import Node
from orchestrator.schedule.unit import OUTCOME, SAID, STOP, Order, Outcome, Said

POLL_S = 5.0
GRACE_S = 600.0  # from a SIGTERM on; then SIGKILL. Prod's return takes a boot.
LOG = "ab.log"
CUT_OFF, ENDED = "cut off at the window's end", "ended before its next boot boundary, as asked"


class Process(Protocol):
    """A process group's first process, as `subprocess.Popen` or a fork is one."""

    pid: int

    def poll(self) -> int | None: ...


def directory_of(order: Order) -> Path:
    """Where the unit's process leaves its log, heartbeat and outcome."""
    paths = config.load_machine([word for word in order.overrides if word.startswith(("paths.", "box="))]).paths
    return config.state_dir(paths) / "units" / order.job.replace("/", "-")


def spawn(order: Order, directory: Path) -> Popen:
    """The A/B's process: this program's `schedule unit`, in a process group of its own."""
    with (directory / LOG).open("ab") as log:
        command = [sys.executable, "-m", "orchestrator", "schedule", "unit", str(directory / "order.json")]
        return Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)


def conduct(
    order: Order,
    clock: Clock,
    node: Node | None = None,
    start: Callable[[Order, Path], Process] = spawn,
    stopping: Callable[[], bool] = lambda: False,
    ending: Callable[[], bool] = lambda: False,
    tell: Callable[[Said], None] = lambda said: None,
    end: Callable[[Process, int], None] | None = None,
    poll_s: float = POLL_S,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run the unit on this machine and watch it to its end; returns what came of it, with prod seen to.

    `stopping` asks for a stop at the next boot boundary, `ending` for one at once; `tell` hears of each boot. A
    KeyboardInterrupt ends the A/B at once, too, and is raised again when prod is back.
    """
    end = end or _signal
    directory = directory_of(order)
    directory.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOME, SAID, STOP):
        (directory / name).unlink(missing_ok=True)
    write_json(directory / "order.json", to_jsonable(order))
    began_s = clock.steady_s()
    process = start(order, directory)
    why, interrupted = "", False
    try:
        why = _watch(order, clock, process, directory, stopping, ending, tell, poll_s)
    except KeyboardInterrupt:
        why, interrupted = ENDED, True
    if why:
        _end(process, clock, end, poll_s, grace_s)
    outcome = _outcome(directory, process, why)
    prod, prod_ok = see_to_prod(order)
    outcome = replace(outcome, held_s=clock.steady_s() - began_s, prod=prod, prod_ok=prod_ok)
    if interrupted:
        raise KeyboardInterrupt
    return outcome


def _watch(
    order: Order,
    clock: Clock,
    process: Process,
    directory: Path,
    stopping: Callable[[], bool],
    ending: Callable[[], bool],
    tell: Callable[[Said], None],
    poll_s: float,
) -> str:
    """Wait for its end; returns early, with the reason, where it has to be ended."""
    heard: Said | None = None
    began_s = clock.steady_s()
    while process.poll() is None:
        if ending():
            return ENDED
        if stopping():
            (directory / STOP).touch()
        said = _said(directory)
        if said is not None and said != heard:
            heard = said
            tell(said)
        if clock.now() >= order.stop_by:
            return CUT_OFF
        since_s, allowed_s = began_s, order.ready_s + order.boot_deadline_s
        if heard:
            since_s = heard.at_s
            allowed_s = heard.ready_s + order.boot_deadline * heard.expected_s + order.boot_deadline_s
        if clock.steady_s() - since_s > allowed_s:
            what = heard.slot if heard else "the start"
            return f"hung: {what} took longer than {span(allowed_s)}"
        clock.wait(poll_s)
    if (said := _said(directory)) is not None and said != heard:
        tell(said)
    return ""


def _said(directory: Path) -> Said | None:
    with suppress(OSError, ValueError):
        return from_jsonable(Said, json.loads((directory / SAID).read_text("utf-8")))
    return None


def _end(process: Process, clock: Clock, end: Callable[[Process, int], None], poll_s: float, grace_s: float) -> None:
    """SIGTERM, which lets it bring prod back; SIGKILL where that takes too long."""
    end(process, signal.SIGTERM)
    since_s = clock.steady_s()
    while process.poll() is None:
        if clock.steady_s() - since_s > grace_s:
            end(process, signal.SIGKILL)
        clock.wait(poll_s)


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)


def _outcome(directory: Path, process: Process, why: str) -> Outcome:
    """What the process left, or what can be said without it."""
    with suppress(OSError, ValueError):
        found = from_jsonable(Outcome, json.loads((directory / OUTCOME).read_text("utf-8")))
        if found.state == "done" or not why:
            return found
    said = _said(directory)
    known = Outcome("", "")
    if said is not None:
        known = Outcome("", run_id=said.run_id, stack=said.stack, boot_s=said.boot_s, boots_left=said.boots_left)
    if why in (CUT_OFF, ENDED):
        return replace(known, state="paused", reason=why)
    if why:
        return replace(known, state="fault", reason=why)
    code = process.poll()
    died = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    return replace(known, state="fault", reason=f"its process {died}: {directory / LOG} has its last words")


def see_to_prod(order: Order) -> tuple[tuple[str, ...], bool]:
    """A pass of the guard on this machine: it ends what is left of the unit, and brings prod back where it is owed."""
    from orchestrator import prod

    paths = config.load_machine([word for word in order.overrides if word.startswith(("paths.", "box="))]).paths
    outcomes = prod.guard(config.state_dir(paths), Progress(quiet=True))
    return tuple(outcome.line for outcome in outcomes), all(outcome.ok for outcome in outcomes)
