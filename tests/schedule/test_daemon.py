"""The loop's passes, with a fleet and clocks that do as they are told."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from orchestrator.errors import UsageError
from orchestrator.schedule import daemon, summary
from orchestrator.schedule.decide import Node
from orchestrator.schedule.job import Job
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import Queue
from orchestrator.schedule.unit import Outcome

POLICY = Policy("01:00-06:00", "UTC", tries=2, nights=2, retry_min=10)
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
NIGHT = datetime(2026, 6, 2, 1, tzinfo=UTC)
JOB = Job(("x=<b>1</b>", "box=cpu"), "cpu", boot_s=900.0, boots_left=4)


@dataclass
class Hands:
    """A clock that is set by hand."""

    wall: datetime = NOON
    steady: float = 0.0
    boot: str = "1"

    def now(self):
        return self.wall

    def steady_s(self):
        return self.steady

    def boot_id(self):
        return self.boot

    def go(self, moment):
        self.steady += (moment - self.wall).total_seconds()
        self.wall = moment


@dataclass
class Told:
    """A fleet whose units end as they are told."""

    orders: dict = field(default_factory=dict)
    over: list = field(default_factory=list)
    stopped: list = field(default_factory=list)

    def nodes(self):
        return [Node("box1", ("cpu",), "stack1")]

    def start(self, job_id, order, node, tell):
        self.orders[job_id] = order

    def running(self):
        return set(self.orders) - {job_id for job_id, _ in self.over}

    def stop(self, job_id):
        self.stopped.append(job_id)

    def end(self, job_id, outcome):
        self.over.append((job_id, outcome))

    def ended(self):
        found, self.over = self.over, []
        for job_id, _ in found:
            del self.orders[job_id]
        return found

    def close(self):
        pass


@pytest.fixture
def world(tmp_path):
    clock, fleet = Hands(), Told()
    queue = Queue(tmp_path, lambda: clock.now().isoformat())
    return daemon.Scheduler(queue, fleet, clock, tmp_path, lambda *_: POLICY)


def at(world, moment):
    world.clock.go(moment)
    return world.tick()


def test_a_job_runs_in_its_window_and_its_verdict_is_kept(world):
    job, _ = world.queue.add(JOB)
    at(world, NOON)
    assert world.queue.get(job.id).state == "queued"
    at(world, NIGHT)
    order = world.fleet.orders[job.id]
    assert order.stop_by_utc == "2026-06-02T05:45:00+00:00" and not order.moved
    world.fleet.end(job.id, Outcome("done", "clear", "run1", "PASS", held_s=3600, prod=("prod serves",)))
    at(world, NIGHT + timedelta(hours=1))
    done = world.queue.get(job.id)
    assert (done.state, done.verdict, done.run_id, done.box_hours) == ("done", "PASS", "run1", 1.0)


def test_faults_are_tried_again_as_often_as_declared_and_do_not_block_the_queue(world):
    first, _ = world.queue.add(JOB)
    second, _ = world.queue.add(JOB)
    at(world, NIGHT)
    world.fleet.end(first.id, Outcome("fault", "hung: boot 2"))
    at(world, NIGHT + timedelta(minutes=5))
    assert world.queue.get(first.id).state == "queued" and second.id in world.fleet.orders
    world.fleet.end(second.id, Outcome("done", "", "r", "FAIL"))
    at(world, NIGHT + timedelta(minutes=20))
    world.fleet.end(first.id, Outcome("fault", "hung: boot 2"))
    at(world, NIGHT + timedelta(minutes=25))
    failed = world.queue.get(first.id)
    assert (failed.state, failed.faults, failed.reason) == ("failed", 2, "hung: boot 2")


def test_a_pass_reads_a_policy_once_however_many_jobs_have_it_and_the_next_pass_again(world):
    read = []
    world.load = lambda *asked: read.append(asked) or POLICY
    for zone in ("", "", "UTC"):
        world.queue.add(replace(JOB, zone=zone))
    for passes in (1, 2):
        world.tick()
        assert sorted(read) == sorted([("nightly", "", ""), ("nightly", "", "UTC")] * passes)


def test_a_box_in_somebody_elses_hands_is_no_fault(world):
    job, _ = world.queue.add(JOB)
    for n in range(4):
        at(world, NIGHT + n * timedelta(minutes=15))
        world.fleet.end(job.id, Outcome("busy", "box cpu is in use"))
        at(world, NIGHT + n * timedelta(minutes=15, seconds=1))
    assert (world.queue.get(job.id).state, world.queue.get(job.id).faults) == ("queued", 0)


def test_a_lost_box_is_no_fault_and_the_job_is_marked_as_moved(world):
    job, _ = world.queue.add(JOB)
    at(world, NIGHT)
    world.fleet.end(job.id, Outcome("lost", "its box is gone"))
    world.fleet.nodes = lambda: [Node("box2", ("cpu",), "stack1")]
    at(world, NIGHT + timedelta(minutes=5))
    at(world, NIGHT + timedelta(minutes=16))
    assert world.fleet.orders[job.id].moved and world.queue.get(job.id).node == "box2"
    world.fleet.end(job.id, Outcome("fault", "the tracking server does not answer"))
    at(world, NIGHT + timedelta(minutes=20))
    at(world, NIGHT + timedelta(minutes=31))
    assert world.fleet.orders[job.id].moved, "what was not fetched is not begun anew"
    assert world.queue.get(job.id).faults == 1 and world.queue.get(job.id).box_hours == pytest.approx(5 / 60)


def test_what_is_cancelled_while_it_runs_is_asked_to_stop_and_then_cancelled(world):
    job, _ = world.queue.add(JOB)
    at(world, NIGHT)
    world.queue.cancel(job.id)
    at(world, NIGHT + timedelta(minutes=1))
    assert world.fleet.stopped == [job.id]
    world.fleet.end(job.id, Outcome("paused", "stopped, as asked"))
    at(world, NIGHT + timedelta(minutes=2))
    assert world.queue.get(job.id).state == "cancelled"


def test_one_that_ran_when_the_scheduler_was_killed_goes_on_and_its_hours_count(world, monkeypatch):
    job, _ = world.queue.add(JOB)
    at(world, NIGHT)
    at(world, NIGHT + timedelta(hours=1))
    monkeypatch.setattr("orchestrator.owner.Owner.alive", lambda self: False)
    world.fleet.orders.clear()
    world.clock.go(NIGHT + timedelta(hours=2))
    world.clock.boot, world.clock.steady = "2", 3.0
    lines = world.tick()
    assert any("rebooted; by its wall clock 60 minutes" in line for line in lines)
    assert job.id in world.fleet.orders and world.queue.get(job.id).box_hours == pytest.approx(1.0)
    assert [e.kind for e in world.queue.events(job_id=job.id)][-2:] == ["paused", "running"]


@pytest.mark.parametrize(("minutes", "said"), [(90, "forward by 90 minutes"), (-90, "back by 90 minutes")])
def test_a_clock_that_is_set_is_said_and_opens_no_window_twice(world, minutes, said):
    world.queue.add(JOB)
    at(world, NIGHT + timedelta(hours=2))
    world.clock.wall += timedelta(minutes=minutes)
    assert any(said in line for line in world.tick())
    world.tick()
    assert [e.kind for e in world.queue.events()].count("window opened") == 1
    assert len(world.fleet.orders) == 1


def test_nights_in_which_nothing_was_up_are_missed_and_after_enough_of_them_so_is_the_job(world):
    job, _ = world.queue.add(JOB)
    at(world, NOON)
    lines = at(world, NOON + timedelta(days=1))
    assert any("was missed" in line for line in lines) and world.queue.get(job.id).nights == 1
    assert not summary.last(world.state).seen
    at(world, NOON + timedelta(days=2))
    assert world.queue.get(job.id).state == "missed"
    assert "2 windows went by without it" in world.queue.get(job.id).reason


def test_the_summary_says_what_was_decided_what_was_not_what_it_cost_and_what_comes_next(world):
    done, _ = world.queue.add(JOB)
    waits, _ = world.queue.add(replace(JOB, overrides=("y", "box=cpu")))
    at(world, NIGHT)
    world.fleet.end(done.id, Outcome("done", "<script>", "run1", "FAIL", held_s=7200, prod=("x",), prod_ok=False))
    at(world, NIGHT + timedelta(hours=2))
    world.fleet.end(waits.id, Outcome("paused", "cut off", "run2", held_s=3600, prod=("prod is back",)))
    lines = at(world, NIGHT + timedelta(hours=5, minutes=1))
    found = summary.last(world.state)
    assert [(row.job_id, row.verdict, row.hours) for row in found.decided] == [(done.id, "FAIL", 2.0)]
    assert [(row.job_id, row.state, row.reason) for row in found.undecided] == [(waits.id, "paused", "cut off")]
    assert found.box_hours == 3.0 and found.prod == ("box1: prod is back",) and found.prod_ok
    assert found.next[0][2] == "2026-06-03T01:00:00+00:00"
    assert any("1 FAIL; 1 not decided; 3.0 box-hours" in line for line in lines)
    page = summary.as_html(found)
    assert "&lt;script&gt;" in page and "<script>" not in page and "<b>1</b>" not in page


def test_prod_that_is_not_back_is_the_first_thing_that_the_summary_says(world):
    job, _ = world.queue.add(JOB)
    at(world, NIGHT)
    world.fleet.end(job.id, Outcome("done", "", "r", "PASS", prod=("prod of box cpu is NOT back",), prod_ok=False))
    at(world, NIGHT + timedelta(hours=1))
    at(world, NIGHT + timedelta(hours=5))
    assert "PROD IS NOT AS IT SHOULD BE" in summary.last(world.state).headline


@pytest.fixture
def hook():
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if self.path == "/slow":
                threading.Event().wait(8)
            self.send_response(200 if self.path != "/refuses" else 500)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", got
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "said"), [("/", ""), ("/refuses", "HTTP Error 500"), ("/slow", "no answer within 2 s")]
)
def test_the_webhook_gets_the_summary_and_cannot_hold_up_the_night(hook, path, said):
    url, got = hook
    found = summary.Summary("w", "", "", True, (), (), 0.0, (), True, (), ())
    line = summary.send(found, url + path, 2)
    assert (said in line) if said else line == ""
    assert got[0]["headline"] == "nothing decided; 0 not decided; 0.0 box-hours"


def test_two_schedulers_do_not_work_on_one_queue(tmp_path):
    with daemon.alone(tmp_path), pytest.raises(UsageError, match="another scheduler"), daemon.alone(tmp_path):
        pass


def test_a_job_whose_schedule_is_gone_fails_and_the_others_go_on(world):
    gone, _ = world.queue.add(replace(JOB, schedule="gone"))
    fine, _ = world.queue.add(JOB)

    def load(name, window, zone):
        if name == "gone":
            raise UsageError("schedule=gone: there is no schedule 'gone'")
        return POLICY

    world.load = load
    at(world, NIGHT)
    assert world.queue.get(gone.id).state == "failed" and fine.id in world.fleet.orders


def test_a_schedule_that_goes_while_its_job_runs_ends_nothing(world):
    job, _ = world.queue.add(JOB)
    at(world, NIGHT)

    def load(*_):
        raise UsageError("there is no schedule 'nightly'")

    world.load = load
    at(world, NIGHT + timedelta(hours=6))
    world.fleet.end(job.id, Outcome("fault", "it died", "run1"))
    lines = at(world, NIGHT + timedelta(hours=7))
    assert world.queue.get(job.id).state == "failed"
    assert any("it died; there is no schedule" in line for line in lines)


def test_the_loop_runs_until_it_is_told_to_stop_and_only_once(tmp_path):
    command = [sys.executable, "-m", "orchestrator", "schedule", "run", f"paths.state={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert "queue.sqlite; boxes: " in first.stdout.readline()
        deadline = time.monotonic() + 60
        while Queue(tmp_path).note(daemon.PULSE) is None:
            assert time.monotonic() < deadline
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert second.returncode == 2 and "another scheduler works on the queue" in second.stderr
        first.terminate()
        assert first.wait(60) == 130
    finally:
        first.kill()
        first.communicate()
