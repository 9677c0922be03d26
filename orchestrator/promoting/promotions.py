"""The ledger of promotions: what should serve on a box, and what should have served before, one line of JSON each.

`<state>/promotions/<box>.jsonl` is the ledger. Each line has the SHA-256 of the line before, so that a line that is
changed, lost or put in between is found and named. A line is never changed; the file is replaced whole by one that has
a line more, so that a kill or a full disk leaves the old ledger or the new one. MLflow has a copy: promotion_runs.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator import digest
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.plan import ServePlan
from orchestrator.promoting.canary import Canary
from orchestrator.records import from_jsonable, to_jsonable, write_bytes
from orchestrator.schema import Box, Engine

Kind = Literal["promote", "rollback", "start", "stop", "found"]
Outcome = Literal["moved", "restored"]
FIRST = "0" * 64  # the hash before the first line


class BrokenLedger(OrchestratorError):
    """The ledger is not what was written; the message names file and line."""

    exit_code = 1


@dataclass(frozen=True)
class Target:
    """What a pointer points to: a frozen plan, how it starts, and the verdict that speaks for it (none: "")."""

    plan: ServePlan
    engine: Engine
    box: Box
    run_id: str = ""
    verdict: str = ""
    gate: str = ""
    against: str = ""  # variant and plan that the verdict is against
    canary: Canary | None = None  # None: no verdict, or one whose numbers a short canary cannot repeat
    displaced: str = ""  # plan that served before, where it is arm A of the A/B
    displaced_canary: Canary | None = None  # of arm A's boots, for when it is rolled back to


@dataclass(frozen=True)
class Entry:
    """One line. `outcome` "restored": the target was tried, and what served before serves on.

    `gap_s` is how long the prod port had no server: from the end of one until the health of the next; None where
    nothing was stopped. `number` counts from 1; `previous` is the hash of the line before.
    """

    number: int
    id: str  # of the move, so that it is written once
    at_utc: str
    box: str
    kind: Kind
    outcome: Outcome
    target: Target | None  # None: nothing should serve
    by: str
    reason: str = ""  # why it was restored, or why --force was used
    forced: tuple[str, ...] = ()  # what --force passed over
    checks: tuple[str, ...] = ()
    gap_s: float | None = None
    previous: str = FIRST
    hash: str = ""

    @property
    def variant(self) -> str:
        return self.target.plan.variant if self.target else "nothing"


def path_of(state: Path, box: str) -> Path:
    return state / "promotions" / f"{box}.jsonl"


def boxes(state: Path) -> list[str]:
    """Those that have a ledger."""
    return sorted(path.stem for path in (state / "promotions").glob("*.jsonl"))


def read(state: Path, box: str) -> list[Entry]:
    """The whole ledger, verified; empty where there is none. Raises BrokenLedger, naming the line."""
    path = path_of(state, box)
    if not path.exists():
        return []
    return parse(path.read_bytes(), str(path))


def parse(content: bytes, where: str) -> list[Entry]:
    """The entries of a ledger's bytes. Raises BrokenLedger for a line that is cut, changed, lost or moved."""
    found: list[Entry] = []
    lines = content.split(b"\n")
    if lines[-1]:
        raise _broken(where, len(lines), "it is cut off")
    for number, line in enumerate(lines[:-1], 1):
        try:
            data = json.loads(line)
            entry = from_jsonable(Entry, data)
        except ValueError as error:
            raise _broken(where, number, f"it is no entry ({' '.join(str(error).split())[:200]})") from None
        if entry.previous != (found[-1].hash if found else FIRST):
            raise _broken(where, number, "it does not follow from the line before: one was changed, removed or added")
        if entry.hash != _hash(data):
            raise _broken(where, number, "its hash is not that of its content: it was changed")
        if entry.number != number:
            raise _broken(where, number, f"it says that it is entry {entry.number}")
        found.append(entry)
    return found


def append(state: Path, new: Entry) -> Entry:
    """Write the entry after the last one, on disk when this returns; the caller holds the box's lease.

    One whose id is there already is not written again. Returns the entry as it is in the ledger.
    """
    path = path_of(state, new.box)
    found = read(state, new.box)
    if there := [entry for entry in found if entry.id == new.id]:
        return there[0]
    linked = replace(new, number=len(found) + 1, previous=found[-1].hash if found else FIRST, hash="")
    made = replace(linked, hash=_hash(to_jsonable(linked)))
    line = json.dumps(to_jsonable(made), sort_keys=True, separators=(",", ":")).encode() + b"\n"
    write_bytes(path, (path.read_bytes() if found else b"") + line)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, survives a loss of power
    finally:
        os.close(directory)
    return made


def serving(entries: Sequence[Entry]) -> Entry | None:
    """The entry whose target should serve; None where nothing should."""
    last = next((entry for entry in reversed(entries) if entry.outcome == "moved"), None)
    return last if last and last.target else None


def predecessor(entries: Sequence[Entry]) -> Entry | None:
    """The entry of what served before what should serve now: the last other plan."""
    current = serving(entries)
    before = [entry for entry in entries if entry.outcome == "moved" and entry.target]
    if current is not None:
        of = current.target.plan.fingerprint
        before = [e for e in before if e.number < current.number and e.target.plan.fingerprint != of]
    return before[-1] if before else None


def with_numbers(target: Target, entries: Sequence[Entry]) -> Target:
    """The target with the numbers that an A/B has of its plan as arm A, where it has none of its own."""
    if target.canary is not None:
        return target
    known = [
        entry.target.displaced_canary
        for entry in entries
        if entry.target and entry.target.displaced == target.plan.fingerprint
    ]
    return replace(target, canary=known[-1]) if known else target


def numbered(entries: Sequence[Entry], number: int, box: str) -> Entry:
    """The entry of that number, whose target served. Raises UsageError where there is none."""
    served = [entry for entry in entries if entry.outcome == "moved" and entry.target]
    found = next((entry for entry in served if entry.number == number), None)
    if found is None:
        known = ", ".join(str(entry.number) for entry in served) or "none"
        raise UsageError(
            f"--to {number}: no such plan served on box {box} (entries that did: {known}); "
            f"`python -m orchestrator prod history box={box}` shows them"
        )
    return found


def _hash(data: dict[str, Any]) -> str:
    """Of what the line says, without the hash itself."""
    return digest.of_value({name: value for name, value in data.items() if name != "hash"})


def _broken(where: str, line: int, why: str) -> BrokenLedger:
    return BrokenLedger(
        f"{where}, line {line}: {why}; restore the file from a copy, or move it aside to begin another: MLflow keeps "
        "what it has of it in the experiment promotions"
    )
