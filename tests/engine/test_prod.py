"""Prod in a container: it outlives its starter, is taken down and brought back, and its daemon restarts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import config, prod, prod_server, slot
from orchestrator.engines.container import containers_of
from orchestrator.errors import BootError
from orchestrator.inputs import Inputs
from orchestrator.places import Mount
from orchestrator.progress import Progress
from orchestrator.slot import Slot

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
STUBS = ROOT / "tests" / "prod"
QUIET = Progress(quiet=True)


@pytest.fixture
def serve(stub_plan, tmp_path: Path):
    """Fills the slot with a server in a container of `box`; every boot of it is ended afterwards."""
    used = []

    def make(box, **container) -> Slot:
        plan = stub_plan(box, **container)
        mounts = (*plan.container.mounts, Mount(str(STUBS), "/stubs", read_only=True))
        argv = tuple("/stubs/stub_vllm.py" if word.endswith("stub_server.py") else word for word in plan.argv)
        plan = replace(plan, argv=argv, container=replace(plan.container, mounts=mounts))
        cpu = config.load_machine(["box=cpu"]).box
        used.append(box)
        return prod_server.boot(Slot(plan, box.engine, cpu, "now", "tester", ""), tmp_path, QUIET)

    yield make
    for path in (tmp_path / "prod").glob("*/*"):
        for container in containers_of(used[0].client, path.name):
            container.remove(force=True)


def guard(state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", "guard", "--quiet", "box=cpu", f"paths.state={state}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)


def test_prod_is_displaced_and_back_in_a_container_of_its_own(serve, box, machine, tmp_path):
    before = serve(box)
    experiment = config.load(["+variant=int5", "box=cpu"])
    inputs = Inputs(experiment, tmp_path, tmp_path, *machine, "c" * 64)
    with prod.displaced(inputs, QUIET):
        assert containers_of(box.client, before.nonce) == [] and slot.displacement(tmp_path, "cpu")
    after = slot.load(tmp_path, "cpu")
    assert prod_server.is_healthy(after) and after.nonce != before.nonce
    assert slot.displacement(tmp_path, "cpu") is None
    (container,) = containers_of(box.client, after.nonce)
    assert container.labels["paro-orchestrator.purpose"] == "prod"


def test_the_guard_brings_prod_back_after_the_run_that_took_it_down_was_killed(serve, box, tmp_path):
    before = serve(box)
    command = [sys.executable, "-m", "tests.prod.a_run", "sleep", f"paths.state={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout.readline() == "displaced\n"
        run.kill()
    assert containers_of(box.client, before.nonce) == [] and slot.displacement(tmp_path, "cpu")
    done = guard(tmp_path)
    assert done.returncode == 0 and "is back:" in done.stdout, done.stderr
    after = slot.load(tmp_path, "cpu")
    assert prod_server.is_healthy(after) and after.nonce != before.nonce
    assert slot.displacement(tmp_path, "cpu") is None


def test_the_guard_boots_prod_whose_container_somebody_removed(serve, box, tmp_path):
    before = serve(box)
    (container,) = containers_of(box.client, before.nonce)
    container.remove(force=True)
    done = guard(tmp_path)
    assert done.returncode == 0 and "is back:" in done.stdout, done.stderr
    assert prod_server.is_healthy(slot.load(tmp_path, "cpu"))


def test_docker_itself_restarts_prod_that_crashes_under_the_same_name(serve, docker_box, tmp_path):
    before = serve(docker_box)
    (container,) = containers_of(docker_box.client, before.nonce)
    assert container.attrs["HostConfig"]["RestartPolicy"]["Name"] == "on-failure"
    pid = container.attrs["State"]["Pid"]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not (prod_server.is_healthy(before) and state_pid(docker_box, before) != pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert guard(tmp_path).returncode == 0 and slot.load(tmp_path, "cpu") == before


def state_pid(box, prod_slot: Slot) -> int:
    (container,) = containers_of(box.client, prod_slot.nonce)
    return container.attrs["State"]["Pid"]


def test_stopping_prod_removes_its_container_and_nothing_restarts_it(serve, box, tmp_path):
    before = serve(box)
    assert "its slot is empty" in prod.stop(tmp_path, "cpu", QUIET)
    assert containers_of(box.client, before.nonce) == [] and guard(tmp_path).stdout == ""


def test_prod_whose_device_is_missing_leaves_no_container_that_the_guard_would_wait_for(serve, docker_box, tmp_path):
    """After a reboot the guard can be there before the devices are."""
    with pytest.raises(BootError, match="does not start"):
        serve(docker_box, devices=("/dev/no-such-device",))
    left = slot.load(tmp_path, "cpu")
    assert containers_of(docker_box.client, left.nonce) == [] and left.failed_boots == 1


def test_a_container_that_was_made_and_never_started_is_not_alive(serve, docker_box, tmp_path):
    served = serve(docker_box)
    prod_server.end(served)
    made = docker_box.client.containers.create(
        docker_box.image_id, labels={"paro-orchestrator.nonce": served.nonce}, name=f"paro-{served.nonce}"
    )
    assert made.status == "created" and not prod_server.is_alive(served)
