"""One set of directories for the whole session: the model is prepared and compiled once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# A shell starts a job in the background with SIGINT ignored, and what we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 900
FIT_STEPS = 12  # a fifth of the demo's: a minute less for each checkpoint, and the order of the formats is the same


@dataclass
class Machine:
    """Where runs keep their things: models and compile caches under `root`, records under `root/records`."""

    root: Path
    records: str = "records"
    port: int = field(default_factory=lambda: free_port())

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def state(self) -> Path:
        return self.root / self.records / "state"

    @property
    def tracking(self) -> Path:
        return self.root / self.records / "mlruns"

    def overrides(self) -> list[str]:
        places = [f"paths.cache={self.cache}", f"paths.state={self.state}", f"paths.tracking={self.tracking}"]
        return ["box=cpu", f"box.port={self.port}", f"box.model.quantize.steps={FIT_STEPS}", *places]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *arguments, *self.overrides()]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, cwd=ROOT, check=False)

    def runs(self):
        """Every MLflow run, newest first."""
        from orchestrator.recorded.mlflow_store import connect

        client = connect(self.tracking)
        experiments = [found.experiment_id for found in client.search_experiments()]
        return client.search_runs(experiments, order_by=["attributes.start_time DESC"])

    def journal(self) -> set[str]:
        """The nonces of all boots so far."""
        return {path.parent.name for path in self.state.glob("boots/*/journal.json")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Machine:
    return Machine(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def first_run(machine: Machine) -> subprocess.CompletedProcess[str]:
    """The demo's variant from nothing: prepares, makes the reference, warms, measures."""
    return machine.run("+variant=int5_i8_pg_zpe", "suite=smoke")


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send the signal to the orchestrator alone; returns what it wrote to stderr since."""
    process.send_signal(number)
    try:
        return process.communicate(timeout=120)[1]
    finally:
        process.kill()
