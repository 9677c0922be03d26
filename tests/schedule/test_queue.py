"""The queue of overnight A/Bs: what it keeps, in what order, and what many processes and a kill can do to it."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from orchestrator.schedule.job import MAY_BECOME, STATES, Job
from orchestrator.schedule.queue import KeyReused, NoSuchJob, NotPossible, Queue

JOB = Job(("+experiment=zpe", "box=cpu"), "cpu")


@pytest.fixture
def queue(tmp_path):
    return Queue(tmp_path)


def added(queue, **changes):
    return queue.add(replace(JOB, **changes))[0]


def test_a_job_comes_back_as_it_was_added(queue):
    wanted = replace(JOB, window="01:00-06:30", zone="Europe/Berlin", priority=3, by="tester", idempotency_key="k")
    made, new = queue.add(wanted)
    assert new and queue.get(made.id) == made
    assert replace(made, id=0, submitted_at_utc="") == wanted


def test_a_key_given_twice_adds_one_job(queue):
    first, _ = queue.add(replace(JOB, idempotency_key="k"))
    again, new = queue.add(replace(JOB, idempotency_key="k"))
    assert again == first and not new and len(queue.list()) == 1


def test_a_key_given_for_something_else_is_refused(queue):
    added(queue, idempotency_key="k")
    with pytest.raises(KeyReused, match="with another priority"):
        added(queue, idempotency_key="k", priority=1)


def test_a_dependency_must_be_there_and_be_readable(queue):
    with pytest.raises(NoSuchJob):
        added(queue, depends_on=("7",))
    with pytest.raises(Exception, match="write the id of a job"):
        added(queue, depends_on=("x:PASS",))
    first = added(queue)
    assert added(queue, depends_on=(f"{first.id}:PASS",)).depends_on == ("1:PASS",)


def test_pages_have_every_job_once_in_order(queue):
    ids = [added(queue, box="cpu" if n % 2 else "r9700x2").id for n in range(7)]
    seen, after = [], 0
    while page := queue.list(limit=3, after=after):
        seen += [job.id for job in page]
        after = seen[-1]
    assert seen == ids
    assert [job.id for job in queue.list(newest_first=True, limit=2)] == ids[:-3:-1]
    assert [job.id for job in queue.list(newest_first=True, after=ids[2])] == [ids[1], ids[0]]
    assert [job.id for job in queue.list(box="cpu", states=("queued",))] == ids[1::2]


def test_open_jobs_are_those_of_high_priority_first_then_the_oldest(queue):
    a, b, c = added(queue), added(queue, priority=2), added(queue)
    queue.cancel(added(queue).id)
    assert [job.id for job in queue.open_jobs()] == [b.id, a.id, c.id]


@pytest.mark.parametrize("state", STATES)
def test_a_state_changes_only_as_declared(queue, state):
    way = {"queued": (), "running": ("running",), "paused": ("running", "paused"), "missed": ("missed",)}
    for other in STATES:
        job = added(queue, box=f"{state}-{other}")
        for step in way.get(state, ("running", state)):
            queue.move(job.id, step, node=f"{state} {other}")
        if other in MAY_BECOME.get(state, ()):
            assert queue.move(job.id, other, node=f"{state} {other}").state == queue.get(job.id).state == other
        else:
            with pytest.raises(NotPossible, match=f"is {state} and cannot be {other}"):
                queue.move(job.id, other)


def test_a_running_job_is_asked_to_stop_and_a_waiting_one_is_cancelled(queue):
    waits, runs, ended = added(queue), added(queue, box="b"), added(queue, box="c")
    queue.claim(runs.id, "here")
    queue.claim(ended.id, "there")
    queue.move(ended.id, "done", verdict="PASS")
    assert queue.cancel(waits.id).state == "cancelled" and queue.get(waits.id).ended_at_utc
    assert queue.cancel(runs.id).cancel_asked and queue.get(runs.id).state == "running"
    assert queue.cancel(waits.id).state == "cancelled"
    with pytest.raises(NotPossible, match="done already"):
        queue.cancel(ended.id)


def test_every_change_is_an_event_with_its_number(queue):
    job = added(queue)
    queue.claim(job.id, "here")
    queue.move(job.id, "done", verdict="PASS")
    events = queue.events()
    assert [(e.seq, e.kind) for e in events] == [(1, "submitted"), (2, "running"), (3, "done")]
    assert events[2].data["verdict"] == "PASS" and queue.last_seq() == 3
    assert [e.seq for e in queue.events(after=1, job_id=job.id)] == [2, 3] and queue.events(after=3) == []


def test_one_node_runs_one_job_at_a_time(queue):
    first, second = added(queue), added(queue)
    assert queue.claim(first.id, "here").state == "running"
    assert queue.claim(second.id, "here") is None and queue.get(second.id).state == "queued"
    assert queue.claim(second.id, "there").node == "there"


def test_many_threads_claim_each_job_once_and_add_each_key_once(tmp_path):
    Queue(tmp_path)

    def work(n):
        queue = Queue(tmp_path)
        queue.add(replace(JOB, idempotency_key=f"key {n % 5}"))
        return [job.id for job in queue.open_jobs() if queue.claim(job.id, f"node {n}.{job.id}")]

    with ThreadPoolExecutor(8) as pool:
        claimed = [job_id for found in pool.map(work, range(24)) for job_id in found]
    queue = Queue(tmp_path)
    assert sorted(claimed) == [job.id for job in queue.list()] == [1, 2, 3, 4, 5]
    numbers = [event.seq for event in queue.events()]
    assert numbers == list(range(1, 11))


def test_a_watcher_misses_nothing_while_others_write(tmp_path):
    queue, seen, stop = Queue(tmp_path), [], threading.Event()

    def watch():
        while not (stop.is_set() and len(seen) == queue.last_seq()):
            seen.extend(event.seq for event in queue.events(after=seen[-1] if seen else 0, limit=3))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Queue(tmp_path).add(JOB), range(20)))
    stop.set()
    watcher.join(30)
    assert seen == list(range(1, 21))


CRASH = """
import os, signal, sqlite3, sys
from pathlib import Path
from orchestrator.schedule import queue as module
from orchestrator.schedule.job import Job

left = int(sys.argv[2])
class Dying(sqlite3.Connection):
    def execute(self, *given):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*given)
connect = sqlite3.connect
module.sqlite3.connect = lambda *given, **named: connect(*given, **named, factory=Dying)
queue = module.Queue(Path(sys.argv[1]))
job, _ = queue.add(Job(("x",), "cpu", idempotency_key="k"))
queue.claim(job.id, "here")
queue.move(job.id, "paused", boots_left=4)
print("whole")
"""


def test_a_kill_between_any_two_statements_leaves_jobs_and_events_in_step(tmp_path):
    """Each kill point in turn, on one file: the next process finds it whole and goes on."""
    source = tmp_path / "crash.py"
    source.write_text(CRASH)
    killed = 0
    for point in range(0, 40, 3):
        state = tmp_path / str(point)
        done = subprocess.run(
            [sys.executable, source, state, str(point)], capture_output=True, text=True, timeout=300, check=False
        )
        queue = Queue(state)
        events = [event.kind for event in queue.events()]
        jobs = queue.list()
        assert events in ([], ["submitted"], ["submitted", "running"], ["submitted", "running", "paused"])
        assert [job.state for job in jobs] == [{"submitted": "queued"}.get(kind, kind) for kind in events[-1:]]
        if jobs and jobs[0].state == "running":
            assert [job.id for job in queue.orphans()] == [jobs[0].id]
        if done.returncode == 0:
            assert "whole" in done.stdout
            break
        assert done.returncode == -signal.SIGKILL
        killed += 1
    assert killed >= 5


def test_a_thousand_jobs_are_one_page_in_a_few_milliseconds(queue):
    with queue._writing() as database:
        names = "overrides, box, schedule, window, zone, priority, depends_on, state, cancel_asked"
        row = ('["+experiment=zpe"]', "cpu", "nightly", "", "", 0, "[]", "queued", 0)
        database.executemany(f"INSERT INTO jobs ({names}) VALUES ({', '.join('?' * len(row))})", [row] * 1000)
    took_s = []
    for _ in range(9):
        began_s = time.perf_counter()
        assert len(queue.list()) == 1000
        took_s.append(time.perf_counter() - began_s)
    print(f"one page of 1,000 jobs: {1000 * min(took_s):.1f} ms")
    assert min(took_s) < 0.05


def test_a_file_of_another_version_is_refused(tmp_path):
    queue = Queue(tmp_path)
    with queue._reading() as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(Exception, match="version 99 of a queue"):
        Queue(tmp_path)


def test_what_is_no_queue_is_one_line(tmp_path):
    (tmp_path / "queue.sqlite").write_text(
        "not a database, and longer than that of SQLite's own first page header " * 9
    )
    with pytest.raises(Exception, match=r"queue\.sqlite: the queue cannot be used"):
        Queue(tmp_path)


def test_the_queue_imports_neither_mlflow_nor_numpy():
    code = "import sys, orchestrator.schedule.queue; print({'mlflow', 'numpy', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
