"""Promotions and rollbacks asked for through the API: kept, done one at a time, never twice."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from orchestrator import lease
from orchestrator.schedule.job import Job
from orchestrator.schedule.queue import KeyReused, Queue
from orchestrator.service import moves
from orchestrator.service.moves import Move, Mover, Moves
from tests.service.world import environment

HERE = socket.gethostname()


class Site:
    """A queue, moves, and a child that writes which move it did."""

    def __init__(self, state):
        self.state, self.queue, self.moves = state, Queue(state), Moves(state)
        self.done, self.lines = state / "done", []

    def command(self, move, places):
        script = f"open({str(self.done)!r}, 'a').write('{move.id} '); print('first'); print('of {move.box}')"
        return [sys.executable, "-c", f"{script}; raise SystemExit({int(move.to == 13)})"]

    @contextmanager
    def mover(self, command=None):
        stop, wake = threading.Event(), threading.Event()
        mover = Mover(
            self.moves, self.queue, self.state, [], stop, wake, self.lines.append, command or self.command, 0.05, 0.2
        )
        thread = threading.Thread(target=mover.work)
        thread.start()
        try:
            yield mover
        finally:
            stop.set()
            wake.set()
            thread.join()

    def settled(self, number):
        deadline = time.monotonic() + 120
        while (move := self.moves.get(number)).state in ("queued", "running"):
            assert time.monotonic() < deadline, move
            time.sleep(0.02)
        return move


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_a_move_is_done_once_and_says_how_it_ended(site):
    for to in (1, 13, 2):
        site.moves.add(Move("rollback", "cpu", to=to))
    with site.mover():
        ended = [site.settled(number) for number in (1, 2, 3)]
    assert [(move.state, move.reason) for move in ended] == [
        ("done", "of cpu"), ("failed", "of cpu"), ("done", "of cpu")
    ]  # fmt: skip
    with site.mover():
        time.sleep(0.3)
    assert site.done.read_text() == "1 2 3 "
    kinds = [event.kind for event in site.queue.events()]
    assert kinds == ["move running", "move done", "move running", "move failed", "move running", "move done"]


def test_one_move_is_claimed_by_one(site):
    for _ in range(12):
        site.moves.add(Move("rollback", "cpu"))
    with ThreadPoolExecutor(6) as pool:
        claimed = [move.id for move in pool.map(lambda _: site.moves.claim(), range(12))]
    assert sorted(claimed) == list(range(1, 13))
    assert site.moves.claim() is None


def test_a_move_whose_service_was_killed_is_failed_and_not_done_again(site):
    site.moves.add(Move("rollback", "cpu"))
    script = (
        "import os, signal, sys; from pathlib import Path; from orchestrator.service.moves import Moves; "
        "Moves(Path(sys.argv[1])).claim(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, site.state], env=environment(), timeout=120)
    assert site.moves.get(1).state == "running"
    with site.mover():
        ended = site.settled(1)
    assert ended.state == "failed" and "the service ended while it ran" in ended.reason
    assert not site.done.exists()


@pytest.mark.parametrize(("node", "waits"), [(HERE, True), ("another-machine", False)])
def test_a_move_waits_for_an_ab_of_its_own_box_on_this_machine_only(site, node, waits):
    job, _ = site.queue.add(Job(("+experiment=zpe",), "cpu"))
    site.queue.claim(job.id, node)
    site.moves.add(Move("rollback", "cpu"))
    site.moves.add(Move("rollback", "r9700x2"))
    with site.mover() as mover:
        assert site.settled(2).state == "done"
        if waits:
            time.sleep(0.3)
            assert site.moves.get(1).state == "queued"
            site.queue.move(job.id, "done")
            mover.wake.set()
        assert site.settled(1).state == "done"
    assert site.done.read_text() == ("2 1 " if waits else "1 2 ")


def test_a_move_waits_for_a_box_that_somebody_uses_and_is_then_done(site):
    site.moves.add(Move("rollback", "cpu"))
    site.moves.add(Move("rollback", "r9700x2"))
    with lease.hold("cpu", "a run by hand", site.state), site.mover():
        assert site.settled(2).state == "done"
        time.sleep(0.5)
        waiting = site.moves.get(1)
        assert (waiting.state, waiting.ended_at_utc) == ("queued", "") and "box cpu is in use by" in waiting.reason
        assert [event.kind for event in site.queue.events()].count("move waits") == 1, "said once, not at each look"
    with site.mover():
        ended = site.settled(1)
    assert (ended.state, ended.reason) == ("done", "of cpu") and site.done.read_text() == "2 1 "


def test_a_move_whose_box_is_taken_just_before_it_waits_too(site):
    said = "orchestrator: box cpu is in use by process 7 (A/B, since 01:00); wait for it to end, or stop it"
    seen = site.state / "seen"
    busy_once = (
        f"import pathlib, sys; seen = pathlib.Path({str(seen)!r}); first = not seen.exists(); seen.touch(); "
        f"print({said!r} if first else 'it serves'); sys.exit(2 if first else 0)"
    )
    site.moves.add(Move("rollback", "cpu"))
    with site.mover(lambda move, places: [sys.executable, "-c", busy_once]):
        ended = site.settled(1)
    assert (ended.state, ended.reason) == ("done", "it serves")
    kinds = [event.kind for event in site.queue.events()]
    assert kinds == ["move running", "move waits", "move running", "move done"]


def test_a_box_is_held_as_long_as_its_lease(tmp_path):
    assert not lease.is_held("cpu", tmp_path)
    with lease.hold("cpu", "a run", tmp_path):
        assert lease.is_held("cpu", tmp_path) and not lease.is_held("r9700x2", tmp_path)
    assert not lease.is_held("cpu", tmp_path)


def test_a_key_used_for_another_move_is_refused(site):
    first, new = site.moves.add(Move("rollback", "cpu", to=1, idempotency_key="k"))
    assert new and site.moves.add(Move("rollback", "cpu", to=1, idempotency_key="k")) == (first, False)
    for other in (Move("rollback", "cpu", to=2, idempotency_key="k"), Move("promote", "cpu", "abcd", 1, "", "k")):
        with pytest.raises(KeyReused):
            site.moves.add(other)
    assert len(site.moves.list()) == 1


def test_the_api_keeps_a_move_answers_with_it_and_refuses_its_key_for_another(world, client):
    headers = world.auth("promote", **{"Idempotency-Key": "k"})
    first, again = (client.post("/v1/prod/cpu/rollback", json={"to": 1}, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 200) and first.json() == again.json()
    assert first.json()["by"] == "promote" and "idempotency_key" not in first.json()
    assert client.get(first.headers["location"], headers=world.auth("read")).json() == first.json()
    assert client.post("/v1/prod/cpu/rollback", json={"to": 2}, headers=headers).status_code == 409
    assert client.post("/v1/prod/toaster/rollback", json={}, headers=headers).status_code == 404
    assert client.post("/v1/prod/cpu/promote", json={"run_id": "abcd"}, headers=headers).status_code == 404
    assert len(world.moves.list()) == 1


def test_rollback_itself_says_why_a_box_without_a_history_stays_as_it_is(site):
    site.moves.add(Move("rollback", "cpu"))
    places = [f"paths.{name}={site.state / name}" for name in ("state", "cache", "tracking")]

    def command(move, _places):
        return ["env", f"PYTHONPATH={environment()['PYTHONPATH']}", *moves.command(move, places)]

    with site.mover(command):
        ended = site.settled(1)
    assert ended.state == "failed" and ended.reason.startswith("orchestrator: ") and "cpu" in ended.reason


def test_a_child_that_cannot_be_started_fails_its_move_and_not_the_mover(site):
    for to in (1, 2):
        site.moves.add(Move("rollback", "cpu", to=to))
    with site.mover(lambda move, places: ["/nowhere/at/all"] if move.to == 1 else site.command(move, places)):
        assert "could not be started" in site.settled(1).reason
        assert site.settled(2).state == "done"


def test_no_run_id_reaches_a_command_line_unless_it_is_one():
    with pytest.raises(Exception, match="no id of a run"):
        moves.command(Move("promote", "cpu", run_id="--force"), [])
