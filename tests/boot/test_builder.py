"""The builder of checkpoints ends with the orchestrator that started it, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from orchestrator import owner, prepare
from orchestrator.errors import OrchestratorError
from orchestrator.progress import Stage

SLEEP = 'import os, time; print(\'{"event": "progress", "done": %d, "total": 1}\' % os.getpid(), flush=True)'
BUILDER = [sys.executable, "-c", f"{SLEEP}; time.sleep(600)"]
SCRIPT = (
    "import json, sys\nfrom pathlib import Path\nfrom orchestrator import prepare\n"
    "class Stage:\n    def advance(self, done, *_):\n        print(done, flush=True)\n"
    "with prepare._exclusive(Path(sys.argv[1])) as lock:\n"
    "    prepare._run_builder(json.loads(sys.argv[2]), Stage(), lock)\n"
)


def test_the_builder_of_a_killed_orchestrator_dies_with_it(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model.lock"), json.dumps(BUILDER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orchestrator:
        builder = psutil.Process(int(orchestrator.stdout.readline()))
        orchestrator.send_signal(signal.SIGKILL)
    try:
        assert not [p for p in psutil.wait_procs([builder], timeout=5)[1] if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        if builder.is_running():
            builder.kill()


def test_a_builder_that_was_left_is_ended_by_the_next_start(tmp_path: Path):
    left = subprocess.Popen(BUILDER, stdout=subprocess.DEVNULL, start_new_session=True)
    lock = tmp_path / "model.lock"
    lock.write_text(json.dumps(asdict(owner.of(left.pid))))
    try:
        with prepare._exclusive(lock):
            assert left.wait(5) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', json.dumps({**asdict(owner.of(os.getpid()))})])
def test_nothing_else_is_ended(tmp_path: Path, content):
    """Not by a lock without a builder, and not by one whose pid has another process by now."""
    if content.startswith('{"pid": ') and "start_time_s" in content:
        content = json.dumps({**json.loads(content), "start_time_s": 1.0})
    lock = tmp_path / "model.lock"
    lock.write_text(content)
    with prepare._exclusive(lock):
        pass


def test_a_builder_that_cannot_start_is_one_line(tmp_path: Path):
    stage = Stage("quantize", None, lambda: 0.0, 0.0)
    with (
        prepare._exclusive(tmp_path / "model.lock") as lock,
        pytest.raises(OrchestratorError, match=r"/no/such/python does not start .*engine.python="),
    ):
        prepare._run_builder(["/no/such/python"], stage, lock)
    assert (tmp_path / "model.lock").read_text() == ""
