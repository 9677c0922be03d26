"""One box, one lease: whoever boots anything on a box holds its lock until every server is down."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TextIO

from orchestrator import owner
from orchestrator.errors import UsageError
from orchestrator.progress import span


class Busy(UsageError):
    """Another live process holds the box."""


LOOKS, LOOK_S = 3, 0.02  # `is_held` takes the lock itself, for an instant


@contextmanager
def hold(box: str, purpose: str, state: Path, expected_s: float | None = None) -> Iterator[None]:
    """Hold the box, for about `expected_s`. Raises Busy, naming the holder and its deadline, where another does.

    The lock is the kernel's: it ends with its process, however that ends. The text in the file only informs, and a
    deadline that has passed takes the box from nobody: its servers may still run.
    """
    path = state / "leases" / f"{box}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        if not take(stream):
            raise Busy(f"{in_use(box)}{_holder(path)}; wait for it to end, or stop it")
        now = datetime.now(UTC)
        until = None if expected_s is None else now + timedelta(seconds=expected_s)
        record = {
            **asdict(owner.current()),
            "purpose": purpose,
            "since_utc": now.isoformat(timespec="seconds"),
            "until_utc": until and until.isoformat(timespec="seconds"),
        }
        stream.truncate(0)
        stream.write(json.dumps(record))
        stream.flush()
        yield


def take(stream: TextIO) -> bool:
    """Whether this process has the file's lock from now on; who only looks has it for an instant, and is waited for."""
    for _ in range(LOOKS):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOOK_S)
    return False


def is_held(box: str, state: Path) -> bool:
    """Whether a live process holds the box at this moment."""
    return is_locked(state / "leases" / f"{box}.lock")


def is_locked(path: Path) -> bool:
    """Whether a live process has the lock of this file at this moment."""
    try:
        with path.open("a+") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def in_use(box: str) -> str:
    """How the message of Busy begins."""
    return f"box {box} is in use by "


def _holder(path: Path) -> str:
    try:
        record = json.loads(path.read_text())
        until = record["until_utc"]
        left_s = (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds() if until else 0
        due = f", should end in {span(left_s)}" if left_s > 0 else f", {span(-left_s)} over its time" if until else ""
        return f"process {record['pid']} ({record['purpose']}, since {record['since_utc']}{due})"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
