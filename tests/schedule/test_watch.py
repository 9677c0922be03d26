"""Whoever watches a unit: real processes that end, hang, ignore signals or die, and what is made of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from orchestrator.schedule import watch
from orchestrator.schedule.clock import Clock
from orchestrator.schedule.unit import Order

SAYS = """
import json, os, signal, sys, time
directory, does = sys.argv[1:]
with open(directory + "/heartbeat.json.new", "w") as said:
    json.dump({"slot": "block 1, boot 1, arm a", "expected_s": 0.1, "at_s": time.clock_gettime(time.CLOCK_BOOTTIME),
               "ready_s": 0.0, "run_id": "run1", "stack": "s", "boot_s": 9.0, "boots_left": 3}, said)
os.replace(directory + "/heartbeat.json.new", directory + "/heartbeat.json")
if does == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if does == "done":
    json.dump({"state": "done", "verdict": "PASS", "run_id": "run1"}, open(directory + "/outcome.json", "w"))
elif does == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
elif does == "stops":
    while not os.path.exists(directory + "/stop"):
        time.sleep(0.02)
    json.dump({"state": "paused", "reason": "as asked"}, open(directory + "/outcome.json", "w"))
elif does != "nothing":
    print("ready", flush=True)
    time.sleep(600)
"""


@dataclass
class Bench:
    """One order, for a process that does as it is told."""

    root: Path
    deadline_s: float = 60.0
    until_s: float = 3600.0

    @property
    def order(self) -> Order:
        until = (datetime.now(UTC) + timedelta(seconds=self.until_s)).isoformat()
        words = ("+experiment=zpe", "box=cpu", f"paths.state={self.root}", f"paths.tracking={self.root / 'runs'}")
        return Order("queue/1", words, until, until, 1.25, 2.0, self.deadline_s, 5.0)

    def conduct(self, does: str, **watching):
        def start(order, directory):
            return subprocess.Popen([sys.executable, "-c", SAYS, directory, does], start_new_session=True)

        return watch.conduct(self.order, Clock(), start=start, poll_s=0.05, grace_s=1.0, **watching)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_what_the_unit_says_of_itself_is_its_outcome(bench):
    heard = []
    outcome = bench.conduct("done", tell=heard.append)
    assert (outcome.state, outcome.verdict, outcome.prod_ok) == ("done", "PASS", True)
    assert outcome.held_s > 0 and [said.slot for said in heard] == ["block 1, boot 1, arm a"]


def test_a_boot_that_hangs_is_ended_at_its_deadline_and_is_a_fault(bench):
    bench.deadline_s = 1.0
    outcome = bench.conduct("hangs")
    assert outcome.state == "fault" and outcome.reason.startswith("hung: block 1, boot 1, arm a took longer than 1.2 s")
    assert (outcome.run_id, outcome.boots_left) == ("run1", 3)


def test_one_that_ignores_the_signal_is_killed(bench):
    bench.deadline_s = 1.0
    began_s = time.monotonic()
    assert bench.conduct("deaf").state == "fault"
    assert time.monotonic() - began_s > 2.0, "not before its grace is over"


def test_a_boot_that_runs_at_the_end_of_the_window_is_cut_off_and_that_is_no_fault(bench):
    bench.until_s = 1.0
    outcome = bench.conduct("hangs")
    assert (outcome.state, outcome.reason) == ("paused", "cut off at the window's end")


def test_one_that_dies_is_a_fault_that_says_how(bench):
    assert "was killed by signal 9" in bench.conduct("dies").reason
    assert "ended with status 0" in bench.conduct("nothing").reason, "an end without a word is no success"


def test_it_is_asked_to_stop_at_the_next_boundary_and_ended_where_that_is_wanted(bench):
    assert bench.conduct("stops", stopping=lambda: True).state == "paused"
    outcome = bench.conduct("hangs", ending=lambda: True)
    assert outcome.state == "paused" and outcome.reason.startswith("ended before its next boot boundary")


def test_an_interrupt_ends_the_unit_before_it_goes_on(bench, monkeypatch):
    started = []

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "_watch", interrupted)
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        bench.conduct("hangs")
    assert started[0].poll() == -signal.SIGTERM


def test_the_real_command_refuses_what_no_configuration_allows(bench):
    order = bench.order
    words = ("+experiment=gone", *order.overrides[1:])
    outcome = watch.conduct(Order("queue/2", words, *list(vars(order).values())[2:]), Clock(), poll_s=0.1)
    assert outcome.state == "refused" and "there is no experiment 'gone'" in outcome.reason


def test_a_unit_ends_when_whoever_watches_it_is_gone(tmp_path):
    """The scheduler is killed: nobody would end its unit in time, so the unit hears of it."""
    child = "from orchestrator.schedule import unit; import time; unit.end_with_parent(); print('up', flush=True); "
    parent = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child + 'time.sleep(600)'!r}], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    scheduler = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(scheduler.stdout.readline())
    assert scheduler.stdout.readline() == "up\n"
    scheduler.kill()
    scheduler.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_order_that_is_none_is_refused(tmp_path, capsys):
    from orchestrator import cli

    path = tmp_path / "order.json"
    path.write_text(json.dumps({"job": 1}))
    assert os.getppid() != 1
    assert cli.main(["schedule", "unit", str(path)]) == 2
    assert "no order of the scheduler" in capsys.readouterr().err
