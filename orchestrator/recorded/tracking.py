"""Runs in MLflow: what was served, what was measured, and every raw sample, in one directory.

`<directory>/mlflow.db` is the database, `<directory>/artifacts/<run id>/artifacts` the files of a run. Where there is a
tracking server, it gets a copy of each run when the run begins and when it ends, never while something is measured.
MLflow is imported at the first use and not before: it takes a second.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlparse

from orchestrator import labels, owner
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.mirror import Mirror, ServerError
from orchestrator.recorded.mlflow_store import TrackingError
from orchestrator.records import Measurement, to_jsonable, write_bytes, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from orchestrator.box_load import Sample

Status = Literal["FINISHED", "FAILED", "KILLED"]
PARAM_LENGTH, TAG_LENGTH = 6000, 8000  # MLflow's limits in characters; beyond them it cuts without a word
DIGEST_LENGTH = 36  # of a dataset's digest
PARAMS_PER_CALL, METRICS_PER_CALL = 100, 1000
GZIP_FROM_BYTES = 1_000_000
GONE = "its process ended without closing the run"


class Tracker:
    """The runs of one experiment. Raises TrackingError where the store cannot be used.

    `server` is the address of a tracking server that gets copies; that it does not take one is told to `note` and stops
    nothing. Raises UsageError where it is no address.
    """

    def __init__(
        self,
        directory: Path,
        experiment: str,
        server: str | None = None,
        note: Callable[[str], None] = lambda line: print(f"orchestrator: {line}", file=sys.stderr),
    ) -> None:
        self.directory = directory
        self.experiment = experiment
        self._mirror = Mirror(directory, server) if server else None
        self._note = note
        self._said = ""
        mlflow_store.probe(directory)

    def reap(self) -> list[str]:
        """End the runs of every experiment that are RUNNING although their process is gone; returns their ids.

        They become KILLED with the tag `end_reason`. Runs without an owner's tags are somebody else's and stay.
        """
        reaped = []
        with mlflow_store.explained(mlflow_store.database(self.directory)):
            for run in list(self._running()):  # pages are by offset: ending a run would shift the next page
                if (holder := owner.from_tags(run.data.tags)) is None or holder.alive():
                    continue
                reason = f"{GONE} (pid {holder.pid} on {holder.host})"
                self._run_log(run).finish("KILLED", reason)
                reaped.append(run.info.run_id)
        return reaped

    def start(self, name: str, params: Mapping[str, str], tags: Mapping[str, str], parent: str | None = None) -> RunLog:
        """A new run that belongs to this process until it is finished; with `parent`, a run id, nested in that."""
        from mlflow.entities import Param

        owned = owner.to_tags(owner.current()) | ({catalog.PARENT: parent} if parent else {})
        long = {key for key, value in tags.items() if len(str(value)) > TAG_LENGTH}
        short = {key: str(value) for key, value in tags.items() if key not in long}
        with mlflow_store.explained(mlflow_store.database(self.directory)):
            # The owner is in the same transaction as the run: one killed right here is found by `reap`.
            run = self._client.create_run(self.experiment_id, tags=owned | short, run_name=name)
            log = self._run_log(run)
            fitted = [Param(key, log._fit("params", key, value, PARAM_LENGTH)) for key, value in params.items()]
            for at in range(0, len(fitted), PARAMS_PER_CALL):
                self._client.log_batch(log.run_id, params=fitted[at : at + PARAMS_PER_CALL])
        for key in sorted(long):
            log.set_tag(key, tags[key])
        self._upload(log.run_id)
        return log

    def resume(self, run_id: str) -> RunLog:
        """A run that ended before its work did: it belongs to this process now and is RUNNING again."""
        with mlflow_store.explained(mlflow_store.database(self.directory)):
            for key, value in owner.to_tags(owner.current()).items():
                self._client.set_tag(run_id, key, value)
            self._client.set_tag(run_id, "end_reason", "")  # if it had one, it is true no more
            self._client.update_run(run_id, status="RUNNING")
            return self.log(run_id)

    def log(self, run_id: str) -> RunLog:
        """Where to write more of a recorded run."""
        with mlflow_store.explained(mlflow_store.database(self.directory)):
            return self._run_log(self._client.get_run(run_id))

    def remove(self, run_id: str) -> None:
        """Mark the run as deleted; MLflow keeps it until its own garbage collection."""
        with mlflow_store.explained(mlflow_store.database(self.directory)):
            self._client.delete_run(run_id)

    def _upload(self, run_id: str) -> None:
        """Send the server what it lacks of this run and of those that have ended; what it does not take waits."""
        if self._mirror is None:
            return
        try:
            self._mirror.push(run_id)
            self._said = ""
        except (ServerError, TrackingError) as error:
            if str(error) != self._said:
                self._note(str(error))
            self._said = str(error)

    def _run_log(self, run: Any) -> RunLog:
        return RunLog(self._client, self.directory, run.info.run_id, run.info.artifact_uri, self._upload)

    @cached_property
    def _client(self) -> MlflowClient:
        return mlflow_store.connect(self.directory)

    @cached_property
    def experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(self.experiment)) is None:
            try:
                location = (self.directory / "artifacts").resolve().as_uri()
                return self._client.create_experiment(self.experiment, location, mlflow_store.MODEL_RUNS)
            except MlflowException:  # another process made it in between; if not, the next line's error is the cause
                if (found := self._client.get_experiment_by_name(self.experiment)) is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _running(self) -> Iterator[Any]:
        experiments = [found.experiment_id for found in self._client.search_experiments()]
        token: str | None = None
        while True:
            page = self._client.search_runs(experiments, "attributes.status = 'RUNNING'", page_token=token)
            yield from page
            if not (token := page.token):
                return


class RunLog:
    """One run. Every method writes at once and raises TrackingError where it cannot."""

    def __init__(
        self, client: MlflowClient, directory: Path, run_id: str, artifact_uri: str, ended: Callable[[str], None]
    ) -> None:
        self.run_id = run_id
        self.artifacts = _local(artifact_uri)
        self._client = client
        self._ended = ended
        self._database = mlflow_store.database(directory)

    def log_measurement(self, measurement: Measurement) -> None:
        """Metrics and their curves, the record as `measurements/<bench>.json`, its samples as
        `samples/<bench>.jsonl[.gz]`, its files as `files/<bench>/<name>`, its corpora as datasets.
        """
        bench = measurement.bench
        lines = "".join(json.dumps(to_jsonable(sample)) + "\n" for sample in measurement.samples).encode()
        packed = len(lines) >= GZIP_FROM_BYTES
        self._write(
            f"samples/{bench}.jsonl.gz" if packed else f"samples/{bench}.jsonl",
            gzip.compress(lines, mtime=0) if packed else lines,
        )
        for name, content in measurement.files.items():
            self._write(f"files/{bench}/{name}", content)
        self.log_json(f"measurements/{bench}.json", to_jsonable(replace(measurement, samples=(), files={})))
        self.log_metrics(measurement.metrics)
        self._log_corpora(measurement)
        if measurement.status == "invalid":
            self.set_tag(f"invalid.{bench}", measurement.reason)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """The metrics, and as curves those at places: `decode.ms_per_step.ctx512` is also a point of
        `curve/decode.ms_per_step.by_ctx` at step 512, so that MLflow draws it against the context.

        Raises TrackingError that names the metric where MLflow refuses its name or value.
        """
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        batch += [
            Metric(f"{catalog.CURVE}{name}", value, now_ms, at)
            for name, points in labels.curves(metrics).items()
            for at, value in points
        ]
        self._log(batch)

    def log_box_load(self, samples: Sequence[Sample]) -> None:
        """What the box did while it served, each look a step of MLflow's system metrics."""
        from mlflow.entities import Metric

        batch = [
            Metric(name, value, sample.at_ms, step)
            for step, sample in enumerate(samples)
            for name, value in sample.values.items()
        ]
        self._log(batch)

    def log_json(self, path: str, data: Any) -> None:
        with mlflow_store.explained(self.artifacts / path):
            write_json(self.artifacts / path, data)

    def log_text(self, path: str, text: str) -> None:
        self._write(path, text.encode())

    def log_file(self, path: Path, artifact_path: str) -> None:
        """Copy the file at `path` to `artifact_path`, directory and name, within the run."""
        target = self.artifacts / artifact_path
        with mlflow_store.explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            os.close(handle)
            try:
                shutil.copyfile(path, partial)
                Path(partial).chmod(0o644)
                Path(partial).replace(target)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise

    def set_tag(self, name: str, value: str) -> None:
        with self._explained():
            self._client.set_tag(self.run_id, name, self._fit("tags", name, value, TAG_LENGTH))

    def finish(self, status: Status, reason: str = "") -> None:
        """End the run; `reason` becomes the tag `end_reason`."""
        if reason:
            self.set_tag("end_reason", reason)
        with self._explained():
            self._client.set_terminated(self.run_id, status)
        self._ended(self.run_id)

    def publish(self) -> None:
        """Send the tracking server, if there is one, what it lacks of this run, though it goes on."""
        self._ended(self.run_id)

    def _log(self, batch: Sequence[Metric]) -> None:
        with self._explained():
            for at in range(0, len(batch), METRICS_PER_CALL):
                self._client.log_batch(self.run_id, metrics=batch[at : at + METRICS_PER_CALL])

    def _log_corpora(self, measurement: Measurement) -> None:
        """Each text that was sent, as a dataset of MLflow, whose digest holds the beginning of the text's SHA-256."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(name, sha256[:DIGEST_LENGTH], "sha256", json.dumps({"sha256": sha256})),
                [InputTag("mlflow.data.context", measurement.bench)],
            )
            for name, sha256 in measurement.corpora.items()
        ]
        if inputs:
            with self._explained(), mlflow_store.alone(self._database):  # of two that add a dataset, one would fail
                self._client.log_inputs(self.run_id, inputs)

    def _fit(self, kind: str, name: str, value: str, limit: int) -> str:
        """The value, or its beginning and where the whole of it is."""
        text = str(value)
        if len(text) <= limit:
            return text
        whole = f"long_values/{kind}.{name.replace('/', '_')}.txt"
        self._write(whole, text.encode())
        mark = f" ... [cut: {len(text)} characters, the whole in {whole}]"
        return text[: limit - len(mark)] + mark

    def _write(self, path: str, content: bytes) -> None:
        with mlflow_store.explained(self.artifacts / path):
            write_bytes(self.artifacts / path, content)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with mlflow_store.explained(self._database):
            yield


def _local(artifact_uri: str) -> Path:
    return Path(unquote(urlparse(artifact_uri).path))
