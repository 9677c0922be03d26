"""A night in fast time on a Ray cluster of two boxes, one of which is lost in the middle."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from functools import partial

import psutil
import pytest

from orchestrator import prod
from orchestrator.fleet import RayFleet, offer
from orchestrator.progress import Progress
from orchestrator.recorded import catalog
from orchestrator.schedule import daemon
from orchestrator.schedule.decide import Node
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import Queue
from orchestrator.schedule.unit import Order, Outcome
from tests.prod.conftest import end
from tests.schedule import night
from tests.schedule.conftest import NAMES
from tests.schedule.fast_time import FastClock, TimeServer
from tests.schedule.test_night import submitted
from tests.tracking.servers import Server, free_port

ray = pytest.importorskip("ray", reason="needs Ray: pip install -e '.[fleet]'")
STACK = "stack0000"  # of the simulated servers
START = datetime(2026, 6, 1, 22, tzinfo=UTC)
OPENS, CLOSES = datetime(2026, 6, 1, 23, tzinfo=UTC), datetime(2026, 6, 2, 21, tzinfo=UTC)
LOSS = datetime(2026, 6, 2, 0, 42, tzinfo=UTC)  # everybody else acts at whole multiples of five minutes
SMALL = {"object_store_memory": 80 * 2**20}
POLICY = Policy("23:00-21:00", "UTC", ready_min=15)


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False} | SMALL)
    made.boxes = {name: made.add_node(num_cpus=1, resources=offer("cpu", name, STACK), **SMALL) for name in NAMES}
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def lose(cluster, name: str, box) -> None:
    """The machine loses its power: all of it is gone at once, and Ray sees a node die."""
    raylet = psutil.Process(cluster.boxes[name].all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()
    end(box.slot().nonce)
    cluster.remove_node(cluster.boxes[name], allow_graceful=False)


def test_an_ab_whose_box_is_lost_goes_on_from_its_records_on_a_box_of_the_same_stack(tmp_path, boxes, cluster):
    (tmp_path / "port").write_text(str(free_port()))
    server = Server(f"sqlite:///{tmp_path / 'server.db'}", tmp_path)
    time = TimeServer(START)
    fate = FastClock(time.port, "fate")
    fate.expect("fate")
    queue = Queue(tmp_path / "state", FastClock(time.port).iso)
    ids = submitted(queue, long="shorter")
    fate.expect("scheduler")
    stop, lines = threading.Event(), []
    clock = FastClock(time.port, "scheduler")
    conduct = partial(night.conduct_on_ray, root=tmp_path, port=time.port, server=server.url)
    fleet = night.FastRayFleet(cluster.address, conduct)
    fleet.clock = clock
    assert [(node.name, node.kinds, node.stack) for node in fleet.nodes()] == [
        (name, ("cpu",), STACK) for name in NAMES
    ]
    scheduler = daemon.Scheduler(queue, fleet, clock, tmp_path / "state", lambda *_: POLICY)

    def serve() -> None:
        try:
            daemon.loop(scheduler, lines.append, threading.Event(), stop, 300)
        except BaseException as error:
            lines.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            clock.leave()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        fate.wait_until(LOSS)
        moved = queue.get(ids["long"])
        lost = moved.node
        lose(cluster, lost, boxes[lost])
        assert moved.state == "running"
        _until(lambda: lost not in {node.name for node in fleet.nodes()})
        fate.wait(30 * 60)
        assert all(outcome.ok for outcome in prod.guard(boxes[lost].state, Progress(quiet=True))), "it boots again"
        fate.wait_until(CLOSES - timedelta(seconds=1))
        healthy = {name: box.healthy() for name, box in boxes.items()}
        fate.wait(20 * 60)
    finally:
        stop.set()
        fate.leave()
        thread.join(60)
        print(*lines, sep="\n")
        for name, number in ids.items():
            print(name, queue.get(number))
        server.kill()
        time.close()
    assert not thread.is_alive(), "the loop ends when it is told to"
    jobs = {name: queue.get(number) for name, number in ids.items()}
    assert healthy == dict.fromkeys(NAMES, True)
    assert {name: (job.state, job.verdict) for name, job in jobs.items()} == {
        "better": ("done", "PASS"),
        "worse": ("done", "FAIL"),
        "hangs": ("done", "PASS"),
        "after a pass": ("done", "PASS"),
        "after a fail": ("cancelled", ""),
        "long": ("done", "PASS"),
    }
    assert jobs["long"].node != lost and jobs["long"].stack == STACK and jobs["long"].faults == 0
    assert_nothing_was_done_twice(jobs["long"], boxes, lost)


def assert_nothing_was_done_twice(job, boxes, lost: str) -> None:
    """The boots that the lost box finished are of the record, and the other made only those that were missing."""
    other = boxes[job.node].root / "tracking"
    finished = [e for e in catalog.entries(other, parent=job.run_id) if e.status == "FINISHED"]
    slots = [(e.tags["ab.block"], e.tags["ab.position"]) for e in finished]
    assert len(slots) == len(set(slots)) == 16
    before = [
        e
        for e in catalog.entries(boxes[lost].root / "tracking")
        if e.tags.get("kind") == "boot" and e.status == "FINISHED" and e.parent != job.run_id
    ]
    here = {(e.tags["owner.pid"], e.tags["ab.block"], e.tags["ab.position"]) for e in finished}
    began = {(e.tags["owner.pid"], e.tags["ab.block"], e.tags["ab.position"]) for e in before}
    assert 0 < len(here & began) < 16


def _until(true, seconds: float = 120) -> None:
    import time

    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_node_without_a_box_is_none(cluster):
    fleet = RayFleet(cluster.address)
    assert {node.name for node in fleet.nodes()} == set(NAMES)
    assert len(ray.nodes()) == 3, "the head offers no box"


def test_a_unit_for_a_node_that_has_just_died_is_lost(cluster):
    """Ray itself keeps such a task for ever, as one whose node may come yet."""
    fleet = RayFleet(cluster.address)
    gone, other = (Node(name, ("cpu",), STACK) for name in NAMES)
    cluster.remove_node(cluster.boxes[gone.name], allow_graceful=False)
    _until(lambda: [node.name for node in fleet.nodes()] == [other.name])
    fleet.conduct = lambda *_args, **_more: Outcome("done")
    for job_id, node in ((1, gone), (2, other)):
        fleet.start(job_id, Order("queue/1", (), "", "", 1.0, 1.0, 60.0, 60.0), node, lambda said: None)
    ended: dict[int, str] = {}
    _until(lambda: ended.update({job_id: outcome.state for job_id, outcome in fleet.ended()}) or len(ended) == 2)
    assert ended == {1: "lost", 2: "done"} and not fleet.running()
