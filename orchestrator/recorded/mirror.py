"""The copy of the local store on an MLflow tracking server.

The local store stays the record: a run is written there first and read from there, so that a server that is away,
restarts or is full costs nothing. What the server lacks is uploaded again from the record, as often as it takes:
a run on the server carries the id of its local one in the tag `origin.run_id`, MLflow keeps equal metric rows once,
and an artifact that is sent twice replaces itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.records import write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

ORIGIN = "origin.run_id"
ANSWER_S, REQUEST_S = 5, 60
VALUES_PER_CALL, METRICS_PER_CALL = 100, 1000  # MLflow's limits


class ServerError(OrchestratorError):
    """The tracking server did not take what was sent; the message names it and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class Uploaded:
    """Run ids by what came of them."""

    sent: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass
class _Copy:
    """What is known of one run's copy: kept in a file, so that an upload that was cut off goes on."""

    path: Path
    remote: str = ""
    state: str = ""  # digest of all that was uploaded; empty where it was not all
    artifacts: dict[str, list[int]] = field(default_factory=dict)  # path -> size, modification time in ns

    @staticmethod
    def read(path: Path) -> _Copy:
        with suppress(OSError, ValueError, TypeError):
            return _Copy(path, **json.loads(path.read_text("utf-8")))
        return _Copy(path)  # none yet, or damaged: all is sent again, which doubles nothing

    def write(self) -> None:
        with mlflow_store.explained(self.path):
            write_json(self.path, {"remote": self.remote, "state": self.state, "artifacts": self.artifacts})


class Mirror:
    """The copies of one local store on one server."""

    def __init__(self, directory: Path, server: str) -> None:
        """Raises UsageError for an address that is no tracking server's."""
        parts = urlsplit(server)
        if "@" in parts.netloc:
            raise UsageError(
                "paths.tracking_server: the address has a name or password in it, which would be recorded; leave them "
                "out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"paths.tracking_server: {server!r} is no address of an MLflow server; write one as http://HOST:5000"
            )
        self.server = server.rstrip("/")
        self._store = directory
        self._directory = directory / "mirror" / hashlib.sha256(self.server.encode()).hexdigest()[:16]

    def waiting(self) -> list[str]:
        """The local runs of which the server lacks something, oldest first. Nothing is asked of the server."""
        return [row.run_id for row in self._waiting()]

    def push(self, own: str | None = None) -> Uploaded:
        """Upload what waits; with `own`, a run id, leave out others that still go on: they do it themselves.

        Interrupted or repeated anywhere, it leaves each run on the server once, and whole after the last call. Raises
        ServerError where the server does not take it.
        """
        wanted = [row.run_id for row in self._waiting() if own in (None, row.run_id) or row.status != "RUNNING"]
        if not wanted:
            return Uploaded()
        self._require_answer()
        sent, removed = [], []
        with self._explained():
            for run_id in wanted:
                with self._locked():
                    row = catalog.state(self._store, run_id)
                    if row is None or row.deleted:
                        self._remove(run_id)
                        removed.append(run_id)
                    elif self._push(row):
                        sent.append(run_id)
        return Uploaded(tuple(sent), tuple(removed))

    def _waiting(self) -> list[catalog.State]:
        found = []
        for row in catalog.states(self._store):
            copy = _Copy.read(self._path(row.run_id))
            if copy.remote if row.deleted else copy.state != _digest(row):
                found.append(row)
        return found

    def _push(self, row: catalog.State) -> bool:
        """Whether there was something to send. The caller holds the lock."""
        copy = _Copy.read(self._path(row.run_id))
        digest = _digest(row)  # of before: what is logged meanwhile makes it another one
        if copy.state == digest:  # another process was first
            return False
        with mlflow_store.explained(mlflow_store.database(self._store)):
            run = self._local.get_run(row.run_id)
        tags = dict(run.data.tags) | {ORIGIN: row.run_id}
        if parent := tags.get(catalog.PARENT):
            above = catalog.state(self._store, parent)
            if above is not None and not above.deleted:
                tags[catalog.PARENT] = _Copy.read(self._path(parent)).remote or self._copy_of(above)
        copy.remote = self._copy_of(row)
        copy.state = ""
        self._values(copy.remote, run, tags)
        self._metrics(copy.remote, row.run_id)
        try:
            self._artifacts(copy, row)
        finally:
            copy.write()
        if run.info.status == "RUNNING":
            self._remote.update_run(copy.remote, status="RUNNING", name=run.info.run_name)
        else:
            self._remote.update_run(copy.remote, name=run.info.run_name)
            self._remote.set_terminated(copy.remote, run.info.status, run.info.end_time)
        copy.state = digest
        copy.write()
        return True

    def _copy_of(self, row: catalog.State) -> str:
        """The id of the run's copy, which is made where there is none.

        The search comes first: a copy that was made just before a kill or a lost answer is not made again.
        """
        copy = _Copy.read(self._path(row.run_id))
        experiment = self._experiment(row.experiment)
        found = self._remote.search_runs(
            [experiment], f"tags.`{ORIGIN}` = '{row.run_id}'", order_by=["attributes.start_time", "attributes.run_id"]
        )
        for doubled in found[1:]:
            self._remote.delete_run(doubled.info.run_id)
        if found:
            copy.remote = found[0].info.run_id
        else:
            tags = {ORIGIN: row.run_id}
            made = self._remote.create_run(experiment, start_time=row.started_ms, tags=tags, run_name=row.name)
            copy.remote, copy.state, copy.artifacts = made.info.run_id, "", {}
        copy.write()
        return copy.remote

    def _values(self, remote: str, run: Any, tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        params = [Param(key, value) for key, value in run.data.params.items()]
        marks = [RunTag(key, value) for key, value in tags.items()]
        for at in range(0, len(params), VALUES_PER_CALL):
            self._remote.log_batch(remote, params=params[at : at + VALUES_PER_CALL])
        for at in range(0, len(marks), VALUES_PER_CALL):
            self._remote.log_batch(remote, tags=marks[at : at + VALUES_PER_CALL])
        if run.inputs.dataset_inputs:
            self._remote.log_inputs(remote, run.inputs.dataset_inputs)

    def _metrics(self, remote: str, run_id: str) -> None:
        from mlflow.entities import Metric

        rows = [Metric(*row) for row in catalog.metric_rows(self._store, run_id)]
        for at in range(0, len(rows), METRICS_PER_CALL):
            self._remote.log_batch(remote, metrics=rows[at : at + METRICS_PER_CALL])

    def _artifacts(self, copy: _Copy, row: catalog.State) -> None:
        for path, mark in _files(row.artifacts).items():
            if copy.artifacts.get(path) != mark:
                above = str(Path(path).parent)
                self._remote.log_artifact(copy.remote, str(row.artifacts / path), None if above == "." else above)
                copy.artifacts[path] = mark

    def _remove(self, run_id: str) -> None:
        copy = _Copy.read(self._path(run_id))
        if copy.remote:
            self._remote.delete_run(copy.remote)
        self._path(run_id).unlink(missing_ok=True)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (found := self._remote.get_experiment_by_name(name)) is None:
            try:
                return self._remote.create_experiment(name, tags=mlflow_store.MODEL_RUNS)
            except MlflowException:  # another box made it in between; if not, the next line's error is the cause
                if (found := self._remote.get_experiment_by_name(name)) is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._remote.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _path(self, run_id: str) -> Path:
        return self._directory / f"{run_id}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One upload at a time from this store, so that no run is made twice."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @cached_property
    def _local(self) -> MlflowClient:
        return mlflow_store.connect(self._store)

    @cached_property
    def _remote(self) -> MlflowClient:
        # MLflow would send a request again whose answer was lost, and so make a run twice.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_S)
        return mlflow_store.client_class()(self.server)

    def _require_answer(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.server}/health", timeout=ANSWER_S):
                return
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404):  # a proxy that guards or hides this one path; the first request tells
                return
            raise ServerError(self._sentence(f"answers {error.code}")) from None
        except (OSError, ValueError) as error:
            raise ServerError(self._sentence(f"does not answer ({getattr(error, 'reason', error)})")) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise ServerError(self._sentence(f"refuses ({_first_line(error)})")) from error
        except OSError as error:  # requests' errors are OSErrors
            raise ServerError(self._sentence(f"broke off ({_first_line(error)})")) from error

    def _sentence(self, what: str) -> str:
        return (
            f"tracking server {self.server} {what}; the record is whole in {self._store}, the next run uploads it, or "
            "`python -m orchestrator sync`"
        )


def _digest(row: catalog.State) -> str:
    """Of all of a run that is uploaded; it changes with every row, tag and file."""
    marks = json.dumps([row.fingerprint, _files(row.artifacts)], sort_keys=True)
    return hashlib.sha256(marks.encode()).hexdigest()


def _files(directory: Path) -> dict[str, list[int]]:
    """Path -> size and modification time in ns of each artifact, without files that are being written."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[path.relative_to(directory).as_posix()] = [status.st_size, status.st_mtime_ns]
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
