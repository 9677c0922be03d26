"""MLflow's own UI on the local store, on loopback, and the links that one opens first."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from orchestrator import labels
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.catalog import Entry

HOST, FIRST_PORT, PORTS = "127.0.0.1", 5000, 20
READY_S, STOP_S = 300, 10
MODELS = "workflowType=machine_learning"  # of its two sets of pages, that with runs and metrics; the other has traces
ENVIRONMENT = {  # of the UI's processes
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its queues are for judging texts; eight processes less
}


class NoUI(OrchestratorError):
    """MLflow's UI did not come up."""

    exit_code = 1


def command(directory: Path, port: int) -> list[str]:
    """What opens MLflow's UI on the store, on loopback."""
    store = mlflow_store.uri(mlflow_store.database(directory))
    artifacts = (directory / "artifacts").resolve().as_uri()
    words = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--default-artifact-root", artifacts]
    return [*words, "--host", HOST, "--port", str(port), "--workers", "1", "--app-name", "paro-orchestrator"]


def how(directory: Path) -> str:
    """The command line that opens the UI on the store, ready to paste."""
    return shlex.join([sys.executable, "-m", "orchestrator", "ui", f"paths.tracking={directory.resolve()}"])


def serve(directory: Path) -> int:
    """Start the UI, print its links, and stay until interrupted. Raises UsageError where nothing is recorded."""
    if mlflow_store.database(directory).exists():
        print("starting MLflow's UI", file=sys.stderr, flush=True)
    with running(directory, free_port()) as (process, url):
        for line in links(directory, url):
            print(line, flush=True)
        with suppress(KeyboardInterrupt):
            raise NoUI(f"MLflow's UI ended by itself (exit status {process.wait()})")
    return 0


@contextmanager
def running(directory: Path, port: int, log: Path | None = None) -> Iterator[tuple[subprocess.Popen, str]]:
    """(the UI's process, its address), up. What it says goes to `log`, or nowhere."""
    if not mlflow_store.database(directory).exists():
        raise UsageError(
            f"nothing is recorded in {directory.resolve()}; measure something first, or set paths.tracking to the store"
        )
    with (log or Path(os.devnull)).open("a") as said:
        process = subprocess.Popen(
            command(directory, port), stdout=said, stderr=said, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    url = f"http://{HOST}:{port}"
    try:
        _until_ready(process, url)
        yield process, url
    finally:
        _end(process)


def links(directory: Path, url: str) -> list[str]:
    """The UI's address, and those of a box's runs, of the last A/B and its report; without an A/B, of the last run."""
    entries = catalog.entries(directory)
    lines = [f"MLflow UI   {url}"]
    last = next((entry for entry in entries if entry.is_ab and (entry.artifacts / "report.html").exists()), None)
    what = "last A/B"
    if last is None:
        own = (entry for entry in entries if not entry.is_published and not entry.parent)
        last, what = next(own, None), "last run"
    if last is None:
        return [*lines, "stop it with Ctrl-C"]
    lines.append(f"all runs    {url}/#/experiments/{last.experiment_id}/runs?{MODELS}")
    state = last.tags.get("verdict", last.status)
    lines.append(f"{what:<11} {run_url(url, last)}  ({state}: {last.name})")
    if (report := last.artifacts / "report.html").exists():
        lines.append(f"its report  {run_url(url, last, '/artifacts/report.html')}")
        lines.append(f"            {report.resolve().as_uri()}")
    if last.is_ab and any(labels.curves(boot.metrics) for boot in catalog.entries(directory, parent=last.run_id)):
        lines.append(f"its curves  {curves_url(url, last)}")
    return [*lines, "stop it with Ctrl-C"]


def curves_url(url: str, entry: Entry) -> str:
    """The charts of an A/B's boots, each a line: against context, prompt length, concurrency and drafted position.

    By name, because by date MLflow folds the boots away under their A/B, and draws that alone.
    """
    nested = quote(f"tags.`{catalog.PARENT}` = '{entry.run_id}'")
    shown = f"searchFilter={nested}&orderByKey=attributes.run_name&orderByAsc=true&compareRunsMode=CHART&{MODELS}"
    return f"{url}/#/experiments/{entry.experiment_id}/runs?{shown}"


def run_url(url: str, entry: Entry, page: str = "") -> str:
    return f"{url}/#/experiments/{entry.experiment_id}/runs/{entry.run_id}{page}?{MODELS}"


def free_port() -> int:
    """The first free one from 5000 on. Raises NoUI where 20 in a row are taken."""
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise NoUI(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} of {HOST} are taken; end one of their owners")


def _until_ready(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoUI(
                f"MLflow's UI did not start (exit status {process.returncode}); `{' '.join(process.args)}` says why"
            )
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise NoUI(f"MLflow's UI did not answer at {url} for {READY_S} s")


def _end(process: subprocess.Popen) -> None:
    """It and its workers, which share its process group."""
    for end in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, end)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return
