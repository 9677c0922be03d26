"""MLflow's database as a file: made whole or not at all, opened quietly, and its failures in words of one line."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODEL_RUNS = {"mlflow.experimentKind": "custom_model_development"}  # so that the UI opens on runs and their metrics
LOCK_WAIT_S = 20  # MLflow itself waits as long for a locked database
ELSEWHERE = "or set paths.tracking to another directory"


class TrackingError(OrchestratorError):
    """The record of a run could not be written or read; the message names the path and what to do."""

    exit_code = 2


def database(directory: Path) -> Path:
    return directory / "mlflow.db"


def uri(path: Path) -> str:
    return f"sqlite:///{path.resolve()}"


def probe(directory: Path) -> None:
    """Whether the store can be written, without importing MLflow: the slow part of a run must not come first.

    Raises TrackingError where the directory cannot be made, or the database is locked, read-only or not one.
    """
    path = database(directory)
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        if not _exists(path):
            if not os.access(directory, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
            return
        with closing(sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("PRAGMA user_version = 0")  # unused by MLflow; a read-only file fails only at a write
            connection.execute("ROLLBACK")


def connect(directory: Path) -> MlflowClient:
    """A client on the directory's database, which is made first where there is none (1 to 2 s).

    Raises TrackingError.
    """
    path = database(directory)
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        made = client_class()
        with alone(path):
            if not _exists(path):
                _create(made, path)
        client = made(uri(path))
        client.get_experiment("0")  # the first query checks the schema
        return client


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time on the database at `path`: for what MLflow does as a look and then a write."""
    with (path.parent / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _exists(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0  # a full disk can leave an empty file


def _create(client: type[MlflowClient], path: Path) -> None:
    """MLflow's migrations are many transactions; one killed between two of them could never be opened again."""
    making = path.with_name(f"{path.name}.making")
    leftovers = [making, making.with_name(f"{making.name}-journal")]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    try:
        client(uri(making)).get_experiment("0")
        making.replace(path)
    finally:
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)


def client_class() -> type[MlflowClient]:
    """MLflow's client, imported without its telemetry and its log."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read once, when mlflow is imported
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # every failure is raised; tracebacks of retries are noise
    return MlflowClient


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what MLflow, SQLite and the operating system raise into a TrackingError that names `path`."""
    try:
        yield
    except OrchestratorError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(explain(path, error)) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("mlflow", "sqlalchemy", "alembic"):
            raise
        raise TrackingError(explain(path, error)) from error


def explain(path: Path, error: Exception) -> str:
    """One line: what is wrong with `path` and what to do."""
    text = str(error)
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "disk is full" in text:
        return f"{path}: the disk is full; free some space, {ELSEWHERE}"
    if "disk I/O error" in text:
        return f"{path}: the disk refuses to be written (full, over a quota, or failing); free some space, {ELSEWHERE}"
    if "database is locked" in text:
        return (
            f"{path} was locked by another process for {LOCK_WAIT_S} s; end it (`fuser {path}` names it), {ELSEWHERE}"
        )
    if code in (errno.ENOTDIR, errno.EEXIST):
        return f"{path.parent} is a file, or below one ({error.strerror}); move the file away, {ELSEWHERE}"
    if code == errno.EISDIR or path.is_dir():
        return f"{path} is a directory, where the database goes; move it away, {ELSEWHERE}"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) or "readonly database" in text or "unable to open" in text:
        return f"{path} cannot be written (read-only); make it writable, {ELSEWHERE}"
    if "not a database" in text or "malformed" in text:
        return f"{path} is not an SQLite database, or is damaged; move it away and a new one is made, {ELSEWHERE}"
    if "out-of-date database schema" in text or "Can't locate revision" in text:
        return f"{path} was made by another MLflow; back it up and run `mlflow db upgrade {uri(path)}`, {ELSEWHERE}"
    if code is not None:
        return f"{path}: {error.strerror}; mend it, {ELSEWHERE}"
    return f"{path}: MLflow refuses this: {text.splitlines()[0] if text else type(error).__name__}"
