"""What is recorded, read from MLflow's database and artifacts without MLflow, whose import takes longer than that.

Nothing is written here. The tables are those of the MLflow that pyproject.toml pins; the tests hold what is read
against MLflow's own client.
"""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from orchestrator.errors import UsageError
from orchestrator.recorded import mlflow_store
from orchestrator.records import Boot, Measurement, from_jsonable

PARENT = "mlflow.parentRunId"
CURVE = "curve/"  # begins the names of metrics that repeat others as curves, for MLflow's charts
SYSTEM = "system/"  # begins the names of what the box did, which MLflow's UI shows under a tab of their own
SHORTEST_ID = 4  # characters of a run id that are enough where only one run begins with them


@dataclass(frozen=True)
class State:
    """One MLflow run as far as an upload asks: `fingerprint` changes with each of its tags, parameters, metrics, inputs
    and its end; `deleted` ones are in MLflow's bin."""

    run_id: str
    name: str
    experiment: str
    status: str
    started_ms: int
    deleted: bool
    fingerprint: tuple
    artifacts: Path


@dataclass(frozen=True)
class Entry:
    """One MLflow run. Times are seconds since the epoch; `ended_s` is None while it runs."""

    run_id: str
    name: str
    experiment: str
    experiment_id: str
    status: str
    started_s: float
    ended_s: float | None
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    artifacts: Path

    @property
    def parent(self) -> str | None:
        return self.tags.get(PARENT)

    @property
    def is_ab(self) -> bool:
        return self.tags.get("kind") in ("ab", "floor", "sweep")

    @property
    def is_published(self) -> bool:
        return self.tags.get("source") == "published"


def entries(directory: Path, parent: str | None = None) -> list[Entry]:
    """Every run, newest first; with `parent` those nested in it. Raises TrackingError for a damaged store."""
    path = mlflow_store.database(directory)
    if not path.exists():
        return []
    nested = f" AND run_uuid IN (SELECT run_uuid FROM tags WHERE key = '{PARENT}' AND value = ?)"
    chosen = " WHERE lifecycle_stage = 'active'" + (nested if parent else "")
    ids = f"(SELECT run_uuid FROM runs{chosen})"
    given = (parent,) if parent else ()
    with _reading(directory) as database:
        tags = _grouped(database.execute(f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN {ids}", given))
        metrics = _grouped(
            database.execute(
                "SELECT run_uuid, key, value FROM latest_metrics "
                f"WHERE is_nan = 0 AND key NOT LIKE '{CURVE}%' AND key NOT LIKE '{SYSTEM}%' AND run_uuid IN {ids}",
                given,
            )
        )
        rows = database.execute(
            "SELECT run_uuid, runs.name, experiments.name, experiment_id, status, start_time, end_time, artifact_uri "
            f"FROM runs JOIN experiments USING (experiment_id) WHERE run_uuid IN {ids} "
            "ORDER BY start_time DESC, run_uuid",
            given,
        ).fetchall()
    return [
        Entry(
            run_id=run_id,
            name=name or "",
            experiment=experiment,
            experiment_id=str(experiment_id),
            status=status,
            started_s=(started_ms or 0) / 1000,
            ended_s=None if ended_ms is None or status == "RUNNING" else ended_ms / 1000,
            tags=tags.get(run_id, {}),
            metrics=metrics.get(run_id, {}),
            artifacts=artifacts_of(uri),
        )
        for run_id, name, experiment, experiment_id, status, started_ms, ended_ms, uri in rows
    ]


def states(directory: Path) -> list[State]:
    """Every run, oldest first, deleted ones too. Raises TrackingError for a damaged store."""
    return _states(directory, "", ())


def state(directory: Path, run_id: str) -> State | None:
    """Of one run; None where there is none."""
    return next(iter(_states(directory, " WHERE run_uuid = ?", (run_id,))), None)


def metric_rows(directory: Path, run_id: str) -> list[tuple[str, float, int, int]]:
    """(name, value, time in ms, step) of everything that was logged, in no order."""
    with _reading(directory) as database:
        asked = "SELECT key, value, is_nan, timestamp, step FROM metrics WHERE run_uuid = ?"
        rows = database.execute(asked, (run_id,)).fetchall()
    return [(key, math.nan if is_nan else value, at_ms, step) for key, value, is_nan, at_ms, step in rows]


def _states(directory: Path, where: str, given: tuple) -> list[State]:
    if not mlflow_store.database(directory).exists():
        return []
    counts = ", ".join(
        f"(SELECT count(*) FROM {table} WHERE {table}.{key} = runs.run_uuid)"
        for table, key in (("params", "run_uuid"), ("metrics", "run_uuid"), ("inputs", "destination_id"))
    )
    with _reading(directory) as database:
        tags: dict[str, list] = {}
        for run_id, key, value in database.execute(f"SELECT run_uuid, key, value FROM tags{where}", given):
            tags.setdefault(run_id, []).append([key, value])
        rows = database.execute(
            "SELECT run_uuid, runs.name, experiments.name, start_time, runs.lifecycle_stage, artifact_uri, status, "
            f"end_time, {counts} FROM runs JOIN experiments USING (experiment_id){where} ORDER BY start_time, run_uuid",
            given,
        ).fetchall()
    return [
        State(
            run_id=run_id,
            name=name or "",
            experiment=experiment,
            status=rest[0],
            started_ms=started_ms,
            deleted=stage == "deleted",
            fingerprint=(name, *rest, sorted(tags.get(run_id, []))),
            artifacts=artifacts_of(uri),
        )
        for run_id, name, experiment, started_ms, stage, uri, *rest in rows
    ]


@contextmanager
def _reading(directory: Path) -> Iterator[sqlite3.Connection]:
    """The database, in one state for all queries."""
    path = mlflow_store.database(directory)
    with (
        mlflow_store.explained(path),
        closing(sqlite3.connect(path, timeout=mlflow_store.LOCK_WAIT_S, isolation_level=None)) as database,
    ):
        database.execute("BEGIN")
        yield database


def artifacts_of(artifact_uri: str) -> Path:
    return Path(unquote(urlparse(artifact_uri).path))


def find(directory: Path, run_id: str, known: Sequence[Entry] | None = None) -> Entry:
    """The run of this id, or the only one whose id begins so, of `known` where the store was read already.

    Raises UsageError where there is none, or several.
    """
    known = entries(directory) if known is None else known
    found = [entry for entry in known if entry.run_id.startswith(run_id)] if len(run_id) >= SHORTEST_ID else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"run {run_id}: {len(found)} runs begin so; write more of the id")
    raise UsageError(f"run {run_id}: {directory} has no such run; `python -m orchestrator list` shows them")


def measurements(artifacts: Path) -> dict[str, Measurement]:
    """What RunLog.log_measurement wrote, by bench, raw samples and files included.

    Raises UsageError, naming the file, for a record that is damaged.
    """
    found = {}
    for path in sorted((artifacts / "measurements").glob("*.json")):
        record = _record(Measurement, path)
        files = {kept.name: kept.read_bytes() for kept in sorted((artifacts / "files" / record.bench).glob("*"))}
        found[record.bench] = replace(record, samples=_samples(artifacts / "samples", record.bench), files=files)
    return found


def measured_boot(artifacts: Path) -> Boot | None:
    """The measured boot of a run; None where it has none. Raises UsageError for a damaged record."""
    return next((boot for boot in reversed(boots(artifacts)) if boot.purpose == "measured"), None)


def boots(artifacts: Path) -> list[Boot]:
    """Every boot of a run, warm-ups too, oldest first. Raises UsageError for a damaged record."""
    found = [_record(Boot, path) for path in sorted(artifacts.glob("boots/*/boot.json"))]
    return sorted(found, key=lambda boot: boot.started_at_utc)


def read_json(path: Path) -> Any:
    """Raises UsageError, naming the file, where it is missing or no JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: the record is missing or damaged ({error})") from None


def _record(kind: type, path: Path) -> Any:
    try:
        return from_jsonable(kind, read_json(path))
    except ValueError as error:
        raise UsageError(f"{path}: the record is damaged: {error}") from None


def _samples(directory: Path, bench: str) -> tuple[Mapping[str, Any], ...]:
    packed = directory / f"{bench}.jsonl.gz"
    try:
        content = (
            gzip.decompress(packed.read_bytes()) if packed.exists() else (directory / f"{bench}.jsonl").read_bytes()
        )
        return tuple(json.loads(line) for line in content.splitlines())
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{directory / bench}.jsonl: the samples are missing or damaged ({error})") from None


def _grouped(rows: Iterable[tuple[str, str, Any]]) -> dict[str, dict[str, Any]]:
    grouped: dict[str, dict[str, Any]] = {}
    for run_id, key, value in rows:
        grouped.setdefault(run_id, {})[key] = value
    return grouped
