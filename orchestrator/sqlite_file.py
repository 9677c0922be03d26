"""One SQLite file that many processes use at once: a connection for each use, and transactions that are kept or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from orchestrator.errors import UsageError

LOCK_WAIT_S = 20.0


class Unusable(UsageError):
    """The file cannot be read or written: it is damaged, locked for too long, or the disk is full."""


@contextmanager
def reading(path: Path, what: str) -> Iterator[sqlite3.Connection]:
    """A connection to `path`, which is called `what`. Raises Unusable; an IntegrityError goes through."""
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            yield database
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        raise Unusable(f"{path}: {what} cannot be used ({error}); free the disk, or restore it") from None


@contextmanager
def writing(path: Path, what: str) -> Iterator[sqlite3.Connection]:
    """As `reading`; the block's statements are kept all or none."""
    with reading(path, what) as database:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        except BaseException:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")
