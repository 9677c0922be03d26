"""A box with prod on it: real servers, real orchestrators in processes of their own, and nothing left afterwards."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator import engines, prod_server, slot
from orchestrator.plan import ServePlan, with_nonce
from orchestrator.progress import Progress
from orchestrator.schema import Engine
from orchestrator.slot import Slot

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("stub_vllm.py")
ENGINE = Engine("process", None, ready_timeout_s=10, stop_grace_s=2)
QUIET = Progress(quiet=True)
RUN = Path(__file__).with_name("a_run.py")


@dataclass
class Site:
    """The state directory of one box, and what was started on it."""

    root: Path
    plan: ServePlan
    experiment: object
    orchestrators: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def broken(self) -> Path:
        """Where this file exists, prod dies at its start."""
        return self.root / "broken"

    @property
    def displaced_file(self) -> Path:
        return self.state / "prod" / "cpu.displaced.json"

    def serve(self, *arguments: str, **box: object) -> Slot:
        """Fill the slot and serve it."""
        plan = replace(self.plan, argv=(*self.plan.argv, *arguments))
        new = Slot(plan, ENGINE, replace(self.experiment.box, **box), slot.now_utc(), "tester", "")
        return prod_server.boot(new, self.state, QUIET)

    def serve_unready(self, load_s: float) -> Slot:
        """Fill the slot with a server that needs so long, and give up on it after one second."""
        plan = replace(self.plan, argv=(*self.plan.argv, "--slow-start", str(load_s)))
        new = Slot(plan, ENGINE, self.experiment.box, slot.now_utc(), "tester", "loading00000")
        slot.save(self.state, new)
        directory = slot.directory(self.state, new)
        (directory / "attest").mkdir(parents=True)
        argv, env, _ = with_nonce(plan, new.nonce, directory / "attest")
        engines.start(plan, ENGINE, argv, env, new.nonce, directory, {})
        return replace(new, engine=replace(ENGINE, ready_timeout_s=1))

    def stranger(self) -> subprocess.Popen[str]:
        """Somebody else's server on the port."""
        command = [sys.executable, "-m", "http.server", str(self.plan.port), "--bind", self.plan.host]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        self.orchestrators.append(process)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((self.plan.host, self.plan.port)) == 0:
                    return process

    def slot(self) -> Slot:
        return slot.load(self.state, "cpu")

    def healthy(self) -> bool:
        """Whether the slot serves, under the nonce that it says."""
        found = self.slot()
        return found is not None and prod_server.is_healthy(found)

    def run(self, does: str, drain_timeout_s: float = 5) -> subprocess.Popen[str]:
        """An orchestrator that takes the box from prod, says `displaced`, and then `does` something."""
        overrides = [
            f"paths.state={self.state}",
            f"box.port={self.plan.port}",
            f"box.drain_timeout_s={drain_timeout_s}",
        ]
        command = [sys.executable, str(RUN), does, *overrides]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        process = subprocess.Popen(command, **pipes)
        self.orchestrators.append(process)
        return process

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`python -m orchestrator WORDS` on this state directory."""
        command = [sys.executable, "-m", "orchestrator", *words, "box=cpu", f"paths.state={self.state}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


@pytest.fixture
def site(plan_of: Callable[..., ServePlan], tmp_path: Path) -> Iterator[Site]:
    from orchestrator import config

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = ["+variant=bf16", "box=cpu", f"box.port={port}"]
    plan = plan_of(*overrides)
    tail = plan.argv[plan.argv.index("--model") :]
    made = Site(tmp_path, plan, config.load(overrides))
    made.plan = replace(plan, argv=(sys.executable, str(STUB), *tail, "--broken", str(made.broken)))
    yield made
    for process in made.orchestrators:
        process.kill()
        process.communicate()
    for path in (made.state / "prod").glob("*/*"):  # every boot of prod that there was
        end(path.name)


def end(nonce: str) -> None:
    from orchestrator.engines.process import kill_processes_of

    kill_processes_of(nonce)


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    said = process.stdout.readline().strip()
    assert said == line, said + process.stderr.read()


def record(path: Path) -> dict:
    return json.loads(path.read_text())
