"""Promotions and rollbacks that were asked for through the API: kept in SQLite, done one at a time by `promote` itself.

A move is a job: it is recorded, then done in a child process that takes the box's lease as it does for a person at the
terminal. While that box is in use on this machine, by a queued A/B or by anybody else, the move waits, and lets pass
those for other boxes. It is never done twice: one that was cut off is `failed`, and the guard settles which of the two
plans serves.
"""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Literal

from orchestrator import lease, owner, sqlite_file
from orchestrator.errors import UsageError
from orchestrator.schedule.queue import KeyReused, Queue, QueueFull, now_utc

FILE = "moves.sqlite"
MAX_WAITING = 100
LONGEST_REASON = 500
LONGEST_S = 6 * 3600.0
OURS = "orchestrator: "  # before a message of the command line
RETRY_S = 30.0  # until a box that was in use is looked at again


@dataclass(frozen=True)
class Move:
    """`done`: the box serves what was asked for. `failed`: it does not; `reason` says why, or what a queued one waits
    for."""

    kind: Literal["promote", "rollback"]
    box: str
    run_id: str = ""  # promote: of the A/B
    to: int | None = None  # rollback: number of the ledger's entry; None: what served before
    by: str = ""  # the token's name
    idempotency_key: str | None = None
    id: int = 0
    state: Literal["queued", "running", "done", "failed", "cancelled"] = "queued"
    asked_at_utc: str = ""
    ended_at_utc: str = ""
    reason: str = ""


class NoSuchMove(UsageError):
    """There is no move of this id."""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_COLUMNS = tuple(field.name for field in fields(Move))
_SELECT = f"SELECT {_quoted(_COLUMNS)} FROM moves"


class Moves:
    """The moves below a state directory; the table is made where there is none."""

    def __init__(self, state: Path) -> None:
        self.path = state / FILE
        state.mkdir(parents=True, exist_ok=True)
        columns = _quoted([name for name in _COLUMNS if name != "id"])
        with self._open() as database:
            database.execute(
                f"CREATE TABLE IF NOT EXISTS moves (id INTEGER PRIMARY KEY AUTOINCREMENT, {columns}, holder)"
            )
            database.execute("CREATE UNIQUE INDEX IF NOT EXISTS moves_by_key ON moves (idempotency_key)")

    def add(self, move: Move) -> tuple[Move, bool]:
        """Append it; returns it and whether it is new. Raises KeyReused and QueueFull, as Queue.add does."""
        with self._open() as database:
            if move.idempotency_key is not None:
                row = database.execute(f"{_SELECT} WHERE idempotency_key = ?", (move.idempotency_key,)).fetchone()
                if row:
                    earlier = Move(*row)
                    asked = ("kind", "box", "run_id", "to")
                    if any(getattr(earlier, name) != getattr(move, name) for name in asked):
                        raise KeyReused(f"the key is that of move {earlier.id}, which asks for something else")
                    return earlier, False
            (waiting,) = database.execute("SELECT count(*) FROM moves WHERE state = 'queued'").fetchone()
            if waiting >= MAX_WAITING:
                raise QueueFull(f"{waiting} moves wait already")
            new = replace(move, asked_at_utc=now_utc())
            names = [name for name in _COLUMNS if name != "id"]
            made = database.execute(
                f"INSERT INTO moves ({_quoted(names)}) VALUES ({', '.join('?' * len(names))})",
                [getattr(new, name) for name in names],
            )
            return replace(new, id=made.lastrowid), True

    def get(self, number: int) -> Move:
        """Raises NoSuchMove."""
        with self._open() as database:
            row = database.execute(f"{_SELECT} WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise NoSuchMove(f"there is no move {number}")
        return Move(*row)

    def list(self, limit: int = 100) -> list[Move]:
        """Newest first."""
        with self._open() as database:
            return [Move(*row) for row in database.execute(f"{_SELECT} ORDER BY id DESC LIMIT ?", (limit,))]

    def claim(self, taken: Collection[str] = ()) -> Move | None:
        """The oldest that waits and is for none of the boxes `taken`, as a running one of this process; else None."""
        with self._open() as database:
            waiting = database.execute(f"{_SELECT} WHERE state = 'queued' ORDER BY id").fetchall()
            move = next((move for row in waiting if (move := Move(*row)).box not in taken), None)
            if move is None:
                return None
            move = replace(move, state="running")
            held = json.dumps(vars(owner.current()))
            database.execute(
                "UPDATE moves SET state = 'running', reason = '', holder = ? WHERE id = ?", (held, move.id)
            )
            return move

    def end(self, number: int, state: str, reason: str) -> None:
        """What came of a move that was claimed; one that was not begun is `queued` again, in its old place."""
        ended = "" if state == "queued" else now_utc()
        with self._open() as database:
            database.execute(
                "UPDATE moves SET state = ?, reason = ?, ended_at_utc = ? WHERE id = ?", (state, reason, ended, number)
            )

    def abandoned(self) -> list[int]:
        """Running ones whose process is gone."""
        with self._open() as database:
            rows = database.execute("SELECT id, holder FROM moves WHERE state = 'running'").fetchall()
        return [number for number, holder in rows if not owner.from_mapping(json.loads(holder)).alive()]

    def _open(self) -> AbstractContextManager[sqlite3.Connection]:
        """One transaction on a connection of its own."""
        return sqlite_file.writing(self.path, "the moves")


def command(move: Move, places: Sequence[str]) -> list[str]:
    """The argument list of the child. `places` are the server's own `paths.*` words; no shell reads any of it."""
    if not re.fullmatch(r"[0-9a-f]{4,32}", move.run_id) and move.kind == "promote":
        raise UsageError(f"run {move.run_id!r} is no id of a run")
    what = ["promote", move.run_id] if move.kind == "promote" else ["rollback"]
    to = [] if move.to is None else ["--to", str(move.to)]
    return [sys.executable, "-m", "orchestrator", *what, f"box={move.box}", *places, *to, "--quiet"]


@dataclass
class Mover:
    """Does the moves, in a thread of its own, until `stop` is set; `wake` makes it look at once."""

    moves: Moves
    queue: Queue
    state: Path
    places: Sequence[str]
    stop: threading.Event
    wake: threading.Event
    say: Callable[[str], None] = lambda line: None
    command: Callable[[Move, Sequence[str]], list[str]] = command
    period_s: float = 5.0
    retry_s: float = RETRY_S
    _again: dict[str, float] = field(default_factory=dict, init=False)  # box in use -> when it is looked at again

    def work(self) -> None:
        settled = False
        while not self.stop.is_set():
            self.wake.clear()
            try:
                if not settled:
                    self._abandon()
                    settled = True
                while not self.stop.is_set() and (move := self.moves.claim(self._taken())):
                    self._do(move)
            except UsageError as error:  # the disk is full, perhaps; it is tried again
                self.say(f"moves: {error}")
            self.wake.wait(self.period_s)

    def _abandon(self) -> None:
        for number in self.moves.abandoned():
            self._end(number, "failed", "the service ended while it ran; `prod` says what serves, the guard settles it")

    def _taken(self) -> set[str]:
        """Boxes that an A/B on this machine holds, and those that were just seen in use. An A/B on another machine of a
        fleet holds none of ours."""
        here = ("", socket.gethostname())
        waiting = {box for box, at in self._again.items() if at > time.monotonic()}
        return waiting | {job.box for job in self.queue.list(states=["running"]) if job.node in here}

    def _do(self, move: Move) -> None:
        if lease.is_held(move.box, self.state):
            return self._wait(move, f"{lease.in_use(move.box)}another process")
        self.queue.log("move running", None, move=move.id)
        path = self.state / "moves" / f"{move.id}.log"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as log:
                child = Popen(self.command(move, self.places), stdin=DEVNULL, stdout=log, stderr=log)
        except (OSError, UsageError) as error:
            return self._end(move.id, "failed", f"it could not be started: {error}")
        waited_s = 0.0
        while child.poll() is None:
            if self.stop.wait(1.0) or (waited_s := waited_s + 1) > LONGEST_S:
                child.terminate()  # `promote` brings back what served before
                child.wait()
        lines = path.read_text("utf-8", "replace").strip().splitlines() or [f"it ended with status {child.returncode}"]
        said = lines[-1][:LONGEST_REASON]
        if child.returncode == lease.Busy.exit_code and said.removeprefix(OURS).startswith(lease.in_use(move.box)):
            return self._wait(move, said.removeprefix(OURS))  # taken between our look and the child's
        return self._end(move.id, "done" if child.returncode == 0 else "failed", said)

    def _wait(self, move: Move, why: str) -> None:
        """It was not begun: the box is somebody else's now, and is looked at again later."""
        self._again[move.box] = time.monotonic() + self.retry_s
        self._end(move.id, "queued", why, quietly=move.reason == why)

    def _end(self, number: int, state: str, reason: str, quietly: bool = False) -> None:
        """Keep it; while the disk is full it is tried again, until `stop`: the next service then calls it failed."""
        while True:
            try:
                self.moves.end(number, state, reason)
                if not quietly:
                    self.queue.log(f"move {'waits' if state == 'queued' else state}", None, move=number, reason=reason)
                return
            except UsageError as error:
                self.say(f"move {number} is {state}, which cannot be kept: {error}")
                if self.stop.wait(self.period_s):
                    return
