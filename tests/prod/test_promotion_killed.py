"""SIGKILL of the orchestrator after each act of a promotion, with stub servers; the guard makes a pass after each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.engines.process import kill_processes_of
from orchestrator.promoting import promotion_runs, promotions
from orchestrator.recorded import catalog
from tests.boot.test_boot import free_port

SCRIPT = Path(__file__).with_name("kill_promotions.py")
KILLS = 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SCRIPT), str(root), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    for path in (root / "state" / "prod").glob("*/*"):
        kill_processes_of(path.name)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_promotion_was_killed_and_every_step_was_hit(killed):
    _, told, said = killed
    assert len(told) == KILLS and all(one["killed"] for one in told), said
    steps = {one["cut_off_while"] for one in told}
    assert steps == {"draining", "stopping", "booting", "checking", "moving", "restoring", "done"}


def test_prod_always_ends_on_exactly_one_of_the_two_plans_healthy_and_the_ledger_tells_which(killed):
    _, told, said = killed
    for one in told:
        assert one["guard"] == 0 and one["at_rest"], (one, said)
        forward = one["cut_off_while"] in ("moving", "done")
        assert one["on"] == ("candidate" if forward else "previous"), one
        assert one["ledger"] == [True, "moved" if forward else "restored"], one


def test_the_ledger_is_whole_and_mlflow_has_each_entry_once(killed):
    root, told, _ = killed
    entries = promotions.read(root / "state", "cpu")
    assert len(entries) == 1 + len(told)
    runs = [e for e in catalog.entries(root / "tracking") if e.experiment == promotion_runs.EXPERIMENT]
    assert sorted(e.tags["promotion.number"] for e in runs) == sorted(str(entry.number) for entry in entries)
    assert {e.status for e in runs} == {"FINISHED"}
