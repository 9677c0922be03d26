"""Two nights in fast time: six gates, two boxes, a reboot, a hung boot, a clock change, a gate that fails.

Simulated servers; the real scheduler, queue, A/B state machine, records, leases, prod and guard.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from orchestrator import prod, slot
from orchestrator.progress import Progress
from orchestrator.recorded import catalog
from orchestrator.schedule import summary
from orchestrator.schedule.job import Job
from orchestrator.schedule.queue import Queue
from tests.prod.conftest import end
from tests.schedule import night, scheduler
from tests.schedule.fast_time import FastClock, TimeServer

START = datetime(2026, 10, 24, 20, tzinfo=UTC)  # clocks go back in the night that follows
FIRST = datetime(2026, 10, 24, 23, tzinfo=UTC), datetime(2026, 10, 25, 5, 30, tzinfo=UTC)
SECOND = datetime(2026, 10, 26, 0, tzinfo=UTC), datetime(2026, 10, 26, 5, 30, tzinfo=UTC)
REBOOT = datetime(2026, 10, 25, 3, 10, tzinfo=UTC)


def boot(root: Path, fate: FastClock) -> subprocess.Popen:
    """Start the machine's scheduler."""
    fate.expect(scheduler.NAME)
    with (root / "scheduler.log").open("ab") as log:
        command = [sys.executable, "-m", scheduler.__name__, root, str(fate.port)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def power_off(running: subprocess.Popen, boxes) -> None:
    """All that runs on the machine ends at once: scheduler, units, prod."""
    for process in [*psutil.Process(running.pid).children(recursive=True), running]:
        process.kill()
    running.wait()
    for box in boxes.values():
        end(box.slot().nonce)


def submitted(queue: Queue, long: str = "long") -> dict[str, int]:
    """Six gates; what they are called here -> their ids."""
    job = Job((), "cpu")
    ids = {}
    for name, kind, priority, after in (
        ("long", long, 1, ()),
        ("hangs", "hangs", 0, ()),
        ("worse", "worse", 0, ()),
        ("better", "better", 2, ()),
        ("after a pass", "better", 0, ("better:PASS",)),
        ("after a fail", "better", 0, ("worse:PASS",)),
    ):
        needed = tuple(f"{ids[text.partition(':')[0]]}:PASS" for text in after)
        wanted = replace(job, overrides=night.overrides(kind), priority=priority, depends_on=needed)
        boots = 4 * night.KINDS[kind][1][-1]
        ids[name] = queue.add(replace(wanted, boot_s=night.BOOT_S, boots_left=boots))[0].id
    return ids


def test_two_nights_with_a_reboot_a_hung_boot_a_clock_change_and_a_gate_that_fails(tmp_path, boxes):
    time = TimeServer(START)
    fate = FastClock(time.port, "fate")
    fate.expect("fate")
    queue = Queue(tmp_path / "state", fate.iso)
    ids = submitted(queue)
    healthy = {}

    def look(at: datetime, what: str) -> None:
        fate.wait_until(at)
        healthy[what] = {name: box.healthy() for name, box in boxes.items()}

    running = boot(tmp_path, fate)
    try:
        look(FIRST[0] - timedelta(minutes=5), "evening")
        look(FIRST[0] + timedelta(hours=1), "in the first night")
        fate.wait_until(REBOOT)
        power_off(running, boxes)
        time.reboot("boot 2")
        fate.wait(12 * 60)
        for box in boxes.values():  # the guard's timer, 30 s after a boot
            assert all(outcome.ok for outcome in prod.guard(box.state, Progress(quiet=True)))
        running = boot(tmp_path, fate)
        look(FIRST[1], "first morning")
        look(SECOND[0] - timedelta(minutes=5), "next evening")
        look(SECOND[1], "second morning")
        fate.wait(10 * 60)
    finally:
        running.kill()
        running.wait()
        time.close()
    said = (tmp_path / "scheduler.log").read_text()
    print(said)
    jobs = {name: queue.get(number) for name, number in ids.items()}
    for name, job in jobs.items():
        print(name, job)

    everywhere = {"left": True, "right": True}
    assert healthy["in the first night"] == {"left": False, "right": False}, "both boxes are used"
    for what in ("evening", "first morning", "next evening", "second morning"):
        assert healthy[what] == everywhere, what
    for box in boxes.values():
        assert slot.displacement(box.state, "cpu") is None

    verdicts = {name: (job.state, job.verdict) for name, job in jobs.items()}
    assert verdicts == {
        "better": ("done", "PASS"),
        "worse": ("done", "FAIL"),
        "hangs": ("done", "PASS"),
        "after a pass": ("done", "PASS"),
        "after a fail": ("cancelled", ""),
        "long": ("done", "PASS"),
    }
    assert {name: job.faults for name, job in jobs.items() if job.faults} == {"hangs": 1}
    faults = [e for e in queue.events(job_id=ids["hangs"], kind="paused") if "hung" in e.data["reason"]]
    assert "block 1, boot 2, arm b took longer than 1 h 00 min" in faults[0].data["reason"]
    assert queue.events(job_id=ids["worse"], kind="running")[0].at_utc < faults[0].data["not_before_utc"], "meanwhile"
    assert f"job {jobs['worse'].id}, which it depends on, is done FAIL" in jobs["after a fail"].reason
    assert_nothing_ran_outside(queue)
    assert_records_are_whole(jobs, boxes)
    assert_summaries(tmp_path, jobs)


def assert_nothing_ran_outside(queue: Queue) -> None:
    """Every boot began inside a window, early enough to end before prod's return; no node ran two jobs at once."""
    holds: dict[str, int] = {}
    for event in queue.events():
        at = datetime.fromisoformat(event.at_utc)
        if event.kind == "boot" and event.data["reason"]:
            opens, closes = FIRST if at < FIRST[1] else SECOND
            assert opens <= at <= closes - timedelta(minutes=scheduler.POLICY.return_min), event
        if event.kind == "running":
            assert event.data["node"] not in holds, event
            holds[event.data["node"]] = event.job_id
        elif event.kind in ("paused", "done", "failed", "queued", "cancelled"):
            holds = {node: job_id for node, job_id in holds.items() if job_id != event.job_id}


def assert_records_are_whole(jobs, boxes) -> None:
    """Each A/B is one run on one box, with every boot of its design finished once."""
    for name, job in jobs.items():
        if job.state != "done":
            continue
        directory = boxes[job.node].root / "tracking"
        entry = catalog.find(directory, job.run_id)
        made = [e for e in catalog.entries(directory, parent=job.run_id) if e.status == "FINISHED"]
        slots = [(e.tags["ab.block"], e.tags["ab.position"]) for e in made]
        assert len(slots) == len(set(slots)) == {"long": 28, "worse": 4}.get(name, 8)
        assert entry.tags["verdict"] == job.verdict and entry.tags["source"] == "simulated"
    runs = [e for box in boxes.values() for e in catalog.entries(box.root / "tracking") if e.is_ab]
    assert len(runs) == 5, "no A/B was begun twice"


def assert_summaries(root: Path, jobs) -> None:
    files = sorted((root / "state" / summary.DIRECTORY).glob("*.json"))
    assert [path.name[:10] for path in files] == ["2026-10-25", "2026-10-26"]
    first, second = (summary.from_jsonable(summary.Summary, summary.json.loads(path.read_text())) for path in files)
    by_id = {job.id: name for name, job in jobs.items()}
    assert {by_id[row.job_id] for row in first.decided} == {"better", "hangs"}
    assert {by_id[row.job_id]: row.state for row in first.undecided} == {
        "long": "paused",
        "worse": "paused",
        "after a pass": "queued",
        "after a fail": "queued",
    }
    assert {by_id[row.job_id] for row in second.decided} == {"long", "worse", "after a pass"}
    assert [(by_id[row.job_id], row.state) for row in second.undecided] == [("after a fail", "cancelled")]
    assert any("rebooted" in line for line in first.clock) and second.clock == ()
    assert first.prod_ok and second.prod_ok
    assert [by_id[int(row[0])] for row in first.next] == ["long", "worse", "after a pass", "after a fail"]
    assert {row[2] for row in first.next} == {"2026-10-26T00:00:00+00:00"}
    assert "it fits into a whole one" in first.next[2][3] and second.next == ()
    hours = sum(job.box_hours for job in jobs.values())
    assert first.box_hours + second.box_hours == pytest.approx(hours)
    assert (28 + 4 + 3 * 8) * 0.25 <= hours <= 2 * 12, "every boot was paid for, and boxes were not held for more"
    page = summary.as_html(first)
    assert "2 PASS" in page and "simulated=long" in page
