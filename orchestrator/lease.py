"""One box, one lease: whoever boots anything on a box holds its lock until every server is down."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from orchestrator import owner
from orchestrator.errors import UsageError


class Busy(UsageError):
    """Another live process holds the box."""


@contextmanager
def hold(box: str, purpose: str, state: Path) -> Iterator[None]:
    """Hold the box. Raises Busy, naming the holder, where another process does.

    The lock is the kernel's: it ends with its process, however that ends. The text in the file only informs.
    """
    path = state / "leases" / f"{box}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"box {box} is in use by {_holder(path)}; wait for it to end, or stop it") from None
        record = {
            **asdict(owner.current()),
            "purpose": purpose,
            "since_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        stream.truncate(0)
        stream.write(json.dumps(record))
        stream.flush()
        yield


def _holder(path: Path) -> str:
    try:
        record = json.loads(path.read_text())
        return f"process {record['pid']} ({record['purpose']}, since {record['since_utc']})"
    except (ValueError, KeyError, OSError):
        return "another process"
