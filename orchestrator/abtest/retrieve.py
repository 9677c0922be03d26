"""An A/B from the tracking server into the local store, so that this box goes on with what another has begun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.mirror import ORIGIN, REQUEST_S, ServerError
from orchestrator.recorded.tracking import METRICS_PER_CALL, PARAMS_PER_CALL, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAKING = "retrieving"  # a run with this tag is not whole; the next call removes it
SUPERSEDED = "superseded"  # what the server's copy has taken the place of, on a box that had a part of it


def fetch(directory: Path, server: str, tag: str, value: str) -> list[str]:
    """Copy the run with this tag, and all that is nested in it, from the server; returns the local ids, none where the
    server has no such run. A local run with the tag loses it: it has no more than a part.

    From then on the local copies are the record, and what is added to them goes into the same runs on the server.
    Killed anywhere, it may be called again. Raises ServerError, TrackingError.
    """
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_S)
    remote, local = mlflow_store.client_class()(server), mlflow_store.connect(directory)
    for entry in catalog.entries(directory):
        if MAKING in entry.tags:
            local.delete_run(entry.run_id)
    try:
        (top,) = _top(remote, tag, value) or (None,)
        if top is None:
            return []
        with mlflow_store.explained(mlflow_store.database(directory)):
            for entry in catalog.entries(directory):
                if entry.tags.get(tag) == value and not entry.parent:
                    local.delete_tag(entry.run_id, tag)
                    local.set_tag(entry.run_id, SUPERSEDED, value)
            made = _copy(remote, top, directory, local, None)
    except (OSError, _mlflow_error()) as error:
        said = " ".join(str(error).split())[:300]
        raise ServerError(f"tracking server {server}: the records of {value} cannot be fetched ({said})") from error
    for run_id, its_copy in made:
        remote.set_tag(its_copy, ORIGIN, run_id)
    for run_id, _ in reversed(made):  # the outermost first: from then on it is whole
        local.delete_tag(run_id, MAKING)
    return [run_id for run_id, _ in made]


def _mlflow_error() -> type[Exception]:
    from mlflow.exceptions import MlflowException

    return MlflowException


def _runs(remote: MlflowClient, condition: str, experiments: list[str]) -> list[Any]:
    found, token = [], None
    while True:
        page = remote.search_runs(experiments, condition, page_token=token, order_by=["attributes.start_time"])
        found += page
        if not (token := page.token):
            return found


def _top(remote: MlflowClient, tag: str, value: str) -> list[Any]:
    """The newest run with the tag that is nested in no other; none or one."""
    experiments = [found.experiment_id for found in remote.search_experiments()]
    runs = _runs(remote, f"tags.`{tag}` = '{value}'", experiments)
    return [run for run in runs if catalog.PARENT not in run.data.tags][-1:]


def _copy(
    remote: MlflowClient, run: Any, directory: Path, local: MlflowClient, parent: str | None
) -> list[tuple[str, str]]:
    """The run and all below it; returns (local id, id on the server), the innermost first."""
    from mlflow.entities import Metric, Param

    name = remote.get_experiment(run.info.experiment_id).name
    tags = {key: text for key, text in run.data.tags.items() if key not in (ORIGIN, catalog.PARENT)}
    tags |= {MAKING: "yes"} | ({catalog.PARENT: parent} if parent else {})
    experiment = Tracker(directory, name).experiment_id
    made = local.create_run(experiment, start_time=run.info.start_time, tags=tags, run_name=run.info.run_name)
    params = [Param(key, text) for key, text in run.data.params.items()]
    for at in range(0, len(params), PARAMS_PER_CALL):
        local.log_batch(made.info.run_id, params=params[at : at + PARAMS_PER_CALL])
    rows = [row for key in run.data.metrics for row in remote.get_metric_history(run.info.run_id, key)]
    metrics = [Metric(row.key, row.value, row.timestamp, row.step) for row in rows]
    for at in range(0, len(metrics), METRICS_PER_CALL):
        local.log_batch(made.info.run_id, metrics=metrics[at : at + METRICS_PER_CALL])
    if run.inputs.dataset_inputs:
        with mlflow_store.alone(mlflow_store.database(directory)):
            local.log_inputs(made.info.run_id, run.inputs.dataset_inputs)
    into = catalog.artifacts_of(made.info.artifact_uri)
    into.mkdir(parents=True, exist_ok=True)
    if remote.list_artifacts(run.info.run_id):
        remote.download_artifacts(run.info.run_id, "", str(into))
    below = []
    for child in _runs(remote, f"tags.`{catalog.PARENT}` = '{run.info.run_id}'", [run.info.experiment_id]):
        below += _copy(remote, child, directory, local, made.info.run_id)
    status = run.info.status if run.info.status != "RUNNING" else "KILLED"  # whoever ran it is gone
    local.set_terminated(made.info.run_id, status, run.info.end_time)
    return [*below, (made.info.run_id, run.info.run_id)]
