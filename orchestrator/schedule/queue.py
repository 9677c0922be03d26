"""The queue: jobs and what happened to them, in one SQLite file that many processes use at once.

Every call is one transaction on a connection of its own: a process may be killed, forked or have threads at any line.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator import owner, sqlite_file
from orchestrator.errors import UsageError
from orchestrator.schedule.job import MAY_BECOME, OPEN, STATES, Event, Job

FILE = "queue.sqlite"
VERSION = 1
MAX_OPEN = 10_000
LONGEST_PAGE = 1_000  # of jobs
EVENTS_PER_PAGE = 100_000
_COLUMNS = tuple(field.name for field in fields(Job))
_LISTS = ("overrides", "depends_on")
_SCHEMA = f"""
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    {", ".join(name for name in _COLUMNS if name != "id")},
    holder
);
CREATE UNIQUE INDEX jobs_by_key ON jobs (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_by_state ON jobs (state, id);
CREATE UNIQUE INDEX one_running_a_node ON jobs (node) WHERE state = 'running';
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_utc, job_id, kind, data);
CREATE INDEX events_by_job ON events (job_id, seq);
CREATE TABLE notes (name PRIMARY KEY, value);
PRAGMA user_version = {VERSION};
"""


class NoSuchJob(UsageError):
    """There is no job of this id."""


class KeyReused(UsageError):
    """The idempotency key belongs to a job that asks for something else."""


class NotPossible(UsageError):
    """The job's state does not allow this."""


class QueueFull(UsageError):
    """MAX_OPEN jobs wait already."""


def now_utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Queue:
    """The queue below a state directory; it is made where there is none. `clock` gives the time as `now_utc` does.

    Raises UsageError where the file is none of this version.
    """

    def __init__(self, state: Path, clock: Callable[[], str] = now_utc) -> None:
        self.path, self._clock = state / FILE, clock
        state.mkdir(parents=True, exist_ok=True)
        with self._writing() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    database.execute(statement)
            elif version != VERSION:
                raise UsageError(f"{self.path}: version {version} of a queue, this is {VERSION}; move it aside")

    def add(self, job: Job) -> tuple[Job, bool]:
        """Append the job as queued; returns it with its id, and whether it is new.

        One with the idempotency key of an earlier job is that job, and nothing is added. Raises KeyReused where that
        one asks for something else, NoSuchJob for an unknown dependency, QueueFull.
        """
        with self._writing() as database:
            if job.idempotency_key is not None:
                row = database.execute(f"{_SELECT} WHERE idempotency_key = ?", (job.idempotency_key,)).fetchone()
                if row:
                    return _same(_job(row), job), False
            (waiting,) = database.execute(f"SELECT count(*) FROM jobs WHERE state IN {OPEN}").fetchone()
            if waiting >= MAX_OPEN:
                raise QueueFull(f"{waiting} jobs wait already; cancel some first")
            for needed in job.depends_on:
                self._get(database, dependency(needed)[0])
            new = replace(job, id=0, state="queued", submitted_at_utc=self._clock())
            names = [name for name in _COLUMNS if name != "id"]
            given = [_cell(new, name) for name in names]
            marks = ", ".join("?" * len(names))
            made = database.execute(f"INSERT INTO jobs ({', '.join(names)}) VALUES ({marks})", given)
            new = replace(new, id=made.lastrowid)
            self._log(database, "submitted", new.id, {"overrides": list(new.overrides), "by": new.by})
            return new, True

    def get(self, job_id: int) -> Job:
        """Raises NoSuchJob."""
        with self._reading() as database:
            return self._get(database, job_id)

    def list(
        self,
        states: Sequence[str] = (),
        box: str | None = None,
        limit: int = LONGEST_PAGE,
        after: int = 0,
        newest_first: bool = False,
    ) -> list[Job]:
        """One page of at most `limit` jobs, in the order of their ids; `after` is the last id of the page before."""
        return self.page(states, box, limit, after, newest_first)[0]

    def page(
        self, states: Sequence[str], box: str | None, limit: int, after: int, newest_first: bool
    ) -> tuple[list[Job], dict[str, int]]:
        """What `list` and `count` return, of one moment."""
        where, given = [], []
        if states:
            if unknown := set(states) - set(STATES):
                raise UsageError(f"{', '.join(sorted(unknown))}: no state of a job; there are {', '.join(STATES)}")
            where.append(f"state IN ({', '.join('?' * len(states))})")
            given += states
        if box is not None:
            where.append("box = ?")
            given.append(box)
        if after:
            where.append("id < ?" if newest_first else "id > ?")
            given.append(after)
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        order = "DESC" if newest_first else "ASC"
        with self._reading() as database:
            database.execute("BEGIN")
            rows = database.execute(
                f"{_SELECT}{condition} ORDER BY id {order} LIMIT ?", (*given, min(limit, LONGEST_PAGE))
            ).fetchall()
            count = self._count(database)
        return [_job(row) for row in rows], count

    def count(self) -> dict[str, int]:
        """State -> number of jobs in it; every state is there."""
        with self._reading() as database:
            return self._count(database)

    def open_jobs(self) -> list[Job]:
        """All that are queued, running or paused, in the order in which they are to run."""
        with self._reading() as database:
            rows = database.execute(f"{_SELECT} WHERE state IN {OPEN} ORDER BY priority DESC, id").fetchall()
        return [_job(row) for row in rows]

    def cancel(self, job_id: int, reason: str = "cancelled") -> Job:
        """A job that waits is cancelled at once; one that runs is asked to stop at its next boot boundary.

        Raises NotPossible for one that has ended otherwise; one that is cancelled stays so.
        """
        with self._writing() as database:
            job = self._get(database, job_id)
            if job.state == "cancelled" or job.cancel_asked:
                return job
            if not job.is_open:
                raise NotPossible(f"job {job_id} is {job.state} already")
            if job.state != "running":
                return self._move(database, job, "cancelled", {"reason": reason})
            return self._set(database, job, "cancel asked", {"cancel_asked": True, "reason": reason})

    def claim(self, job_id: int, node: str, stack: str = "") -> Job | None:
        """Make a waiting job a running one, held by this process; None where another was faster, the job waits no
        more, or a job runs on that node already."""
        with self._writing() as database:
            job = self._get(database, job_id)
            if job.state not in ("queued", "paused"):
                return None
            try:
                changes = {"node": node, "started_at_utc": job.started_at_utc or self._clock(), "reason": ""}
                changes |= {"stack": stack or job.stack}
                job = self._move(database, job, "running", changes)
            except sqlite3.IntegrityError:
                return None
            held = json.dumps(vars(owner.current()))
            database.execute("UPDATE jobs SET holder = ? WHERE id = ?", (held, job_id))
            return job

    def orphans(self) -> list[Job]:
        """Running jobs whose holder, a process of this machine, is gone: it was killed, or the machine rebooted."""
        with self._reading() as database:
            rows = database.execute(f"SELECT holder, {', '.join(_COLUMNS)} FROM jobs WHERE state = 'running'")
            held = [(json.loads(holder), _job(row)) for holder, *row in rows.fetchall()]
        return [job for holder, job in held if not owner.from_mapping(holder).alive()]

    def move(self, job_id: int, state: str, **changes: Any) -> Job:
        """The job in its next state, with other fields as given. Raises NotPossible where MAY_BECOME has not this."""
        with self._writing() as database:
            return self._move(database, self._get(database, job_id), state, changes)

    def update(self, job_id: int, kind: str, **changes: Any) -> Job:
        """Fields of a job that change while its state does not; watchers see it as an event `kind`."""
        with self._writing() as database:
            return self._set(database, self._get(database, job_id), kind, changes)

    def log(self, kind: str, job_id: int | None = None, **data: Any) -> int:
        """An event of its own; returns its number."""
        with self._writing() as database:
            return self._log(database, kind, job_id, data)

    def events(
        self, after: int = 0, job_id: int | None = None, limit: int = EVENTS_PER_PAGE, kind: str | None = None
    ) -> list[Event]:
        """What happened after event number `after`, oldest first, at most `limit` of it."""
        asked = {"job_id": job_id, "kind": kind}
        chosen = "".join(f" AND {name} = ?" for name, value in asked.items() if value is not None)
        given = [value for value in asked.values() if value is not None]
        with self._reading() as database:
            rows = database.execute(
                f"SELECT seq, at_utc, job_id, kind, data FROM events WHERE seq > ?{chosen} ORDER BY seq LIMIT ?",
                (after, *given, limit),
            ).fetchall()
        return [Event(*row[:4], json.loads(row[4])) for row in rows]

    def last_seq(self) -> int:
        """Number of the newest event; 0 where there is none."""
        with self._reading() as database:
            return database.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]

    def note(self, name: str) -> Any:
        """What `set_note` kept under this name; None where nothing is."""
        with self._reading() as database:
            row = database.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    def set_note(self, name: str, value: Any) -> None:
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, json.dumps(value)))

    def _count(self, database: sqlite3.Connection) -> dict[str, int]:
        found = dict(database.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    @contextmanager
    def open_throughout(self) -> Iterator[None]:
        """For a process that asks all the time. Else each connection that is for a moment the only one writes the WAL
        into the file when it closes, under a lock for which the others then wait.
        """
        with self._reading() as database:
            database.execute("SELECT max(seq) FROM events").fetchone()
            yield

    def _get(self, database: sqlite3.Connection, job_id: int) -> Job:
        row = database.execute(f"{_SELECT} WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise NoSuchJob(f"there is no job {job_id}; `python -m orchestrator schedule list` shows them")
        return _job(row)

    def _move(self, database: sqlite3.Connection, job: Job, state: str, changes: Mapping[str, Any]) -> Job:
        if state not in MAY_BECOME.get(job.state, ()):
            raise NotPossible(f"job {job.id} is {job.state} and cannot be {state}")
        ended = {} if state in OPEN else {"ended_at_utc": self._clock()}
        return self._set(database, job, state, {"state": state, **ended, **changes})

    def _set(self, database: sqlite3.Connection, job: Job, kind: str, changes: Mapping[str, Any]) -> Job:
        changed = replace(job, **changes)
        assigned = ", ".join(f"{name} = ?" for name in changes)
        if changes:
            given = [_cell(changed, name) for name in changes]
            database.execute(f"UPDATE jobs SET {assigned} WHERE id = ?", (*given, job.id))
        self._log(database, kind, job.id, {name: value for name, value in changes.items() if name != "state"})
        return changed

    def _log(self, database: sqlite3.Connection, kind: str, job_id: int | None, data: Mapping[str, Any]) -> int:
        row = (self._clock(), job_id, kind, json.dumps(data))
        return database.execute("INSERT INTO events (at_utc, job_id, kind, data) VALUES (?, ?, ?, ?)", row).lastrowid

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return sqlite_file.reading(self.path, "the queue")

    def _writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """An event's number is of the order in which they are kept."""
        return sqlite_file.writing(self.path, "the queue")


_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM jobs"


def dependency(text: str) -> tuple[int, str]:
    """(id, verdict that it must have, empty for any) of an entry of `Job.depends_on`. Raises UsageError."""
    number, _, verdict = text.partition(":")
    if not number.isdecimal() or verdict not in ("", "PASS", "FAIL", "INCONCLUSIVE", "INVALID"):
        raise UsageError(f"{text}: write the id of a job, or as in 17:PASS with the verdict that it must have")
    return int(number), verdict


def _job(row: Sequence[Any]) -> Job:
    found = dict(zip(_COLUMNS, row, strict=True))
    for name in _LISTS:
        found[name] = tuple(json.loads(found[name]))
    found["cancel_asked"] = bool(found["cancel_asked"])
    return Job(**found)


def _cell(job: Job, name: str) -> Any:
    value = getattr(job, name)
    return json.dumps(value) if name in _LISTS else value


def _same(earlier: Job, job: Job) -> Job:
    asked = ("overrides", "box", "schedule", "window", "zone", "priority", "depends_on")
    if changed := [name for name in asked if getattr(earlier, name) != getattr(job, name)]:
        raise KeyReused(f"the key {job.idempotency_key!r} is that of job {earlier.id}, with another {changed[0]}")
    return earlier
