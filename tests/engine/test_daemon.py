"""Daemons that go away under a boot, on one of our own; and orchestrators that do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import journal
from orchestrator.boot import check_port, serving
from orchestrator.engines import daemon
from orchestrator.engines.container import containers_of
from orchestrator.engines.process import processes_of
from orchestrator.errors import BootError
from orchestrator.plan import as_json
from tests.engine.conftest import IMAGE, Daemon, engine_of

pytestmark = pytest.mark.engine
BRIDGE = "paro-test0"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="starts a daemon")

ORCHESTRATE = """\
import json, sys, time
from pathlib import Path
from orchestrator.boot import serving
from orchestrator.plan import ServePlan
from orchestrator.records import from_jsonable
from orchestrator.schema import Engine
plan = from_jsonable(ServePlan, json.loads(Path(sys.argv[1]).read_text()))
with serving(plan, Engine(plan.engine, None, 60, 2), "measured", Path(sys.argv[2])) as running:
    print(running.boot.nonce, flush=True)
    time.sleep(600)
"""


@dataclass
class Dockerd:
    """A daemon with directories, a bridge and a socket of its own, beside whatever else runs here."""

    root: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return f"unix://{self.root}/docker.sock"

    def start(self) -> None:
        """Until it answers; one that was killed leaves a containerd that the next may have to be started twice for."""
        deadline = time.monotonic() + 60
        self._launch()
        while True:
            try:
                daemon.connect("docker", self.socket).close()
                return
            except daemon.Unreachable:
                if time.monotonic() > deadline:
                    raise AssertionError((self.root / "log").read_text()[-2000:]) from None
            if self.process.poll() is not None:
                self._launch()
            time.sleep(0.2)

    def _launch(self) -> None:
        places = [f"--{name}={self.root / name}" for name in ("data-root", "exec-root")]
        options = [f"--bridge={BRIDGE}", "--iptables=false", "--ip6tables=false", "--default-ulimit=nofile=4096:4096"]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["dockerd", *places, *options, f"--host={self.socket}", f"--pidfile={self.root}/pid"],
                stdout=log,
                stderr=log,
            )

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(60)


@pytest.fixture(scope="module")
def own_dockerd(docker_image_bytes, tmp_path_factory) -> Iterator[Dockerd]:
    made = Dockerd(tmp_path_factory.mktemp("dockerd"))
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", "172.31.251.1/24", "dev", BRIDGE], check=True)
        made.start()
        client = daemon.connect("docker", made.socket)
        client.images.load(docker_image_bytes)
        client.close()
        yield made
    finally:
        if made.process and made.process.poll() is None:
            made.end()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=True)
        _unmount(made.root)


@pytest.fixture(scope="module")
def docker_image_bytes(daemon_of) -> bytes:
    return b"".join(daemon_of("docker").client.images.get(IMAGE).save(named=IMAGE))


@pytest.fixture
def own_box(own_dockerd: Dockerd) -> Iterator[Daemon]:
    """The own daemon, running."""
    if own_dockerd.process.poll() is not None:
        own_dockerd.start()
    client = daemon.connect("docker", own_dockerd.socket)
    yield Daemon(engine_of("docker", own_dockerd.socket), client, client.images.get(IMAGE).id)
    client.close()


def _unmount(root: Path) -> None:
    """What a killed daemon left mounted under its own directories."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounts if path.startswith(str(root))), reverse=True):
        subprocess.run(["umount", "--lazy", path], check=False)


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_restarts_ends_the_boot_with_a_reason_and_nothing_is_left(
    stub_plan, own_dockerd, own_box, tmp_path, number
):
    plan = stub_plan(own_box, network="host")
    with serving(plan, own_box.engine, "measured", tmp_path) as running:
        own_dockerd.end(number)
        own_dockerd.start()
    assert running.boot.status == "invalid" and "ended while it was measured" in running.boot.reasons[-1]
    assert containers_of(own_box.client, running.boot.nonce) == [] and processes_of(running.boot.nonce) == []
    assert "KV cache size" in Path(running.boot.log_path).read_text()
    check_port(plan.host, plan.port)


@needs_root
def test_a_daemon_that_is_away_for_a_moment_while_a_server_loads_is_waited_for(
    stub_plan, own_dockerd, own_box, tmp_path
):
    """It says nothing about its containers: only when it is back is it known what became of them."""
    plan = stub_plan(own_box, network="host")
    with serving(plan, own_box.engine, "measured", tmp_path) as running:
        own_dockerd.process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        own_dockerd.process.send_signal(signal.SIGCONT)
    assert (running.boot.status, running.boot.reasons) == ("ok", ())


@needs_root
def test_a_daemon_that_stays_away_is_said_its_server_ended_and_the_next_start_removes_the_container(
    stub_plan, own_dockerd, own_box, tmp_path, monkeypatch
):
    monkeypatch.setattr(daemon, "OUTAGE_S", 2)
    plan = stub_plan(own_box, network="host")
    with (
        pytest.raises(BootError, match=r"docker cannot be reached .* is removed by the next start"),
        serving(plan, own_box.engine, "measured", tmp_path) as running,
    ):
        own_dockerd.end(signal.SIGKILL)
    nonce = running.boot.nonce
    assert processes_of(nonce) == []
    record = tmp_path / "boots" / nonce / "journal.json"
    content = json.loads(record.read_text())
    assert not content["ended"]
    record.write_text(json.dumps({**content, "owner": {**content["owner"], "pid": 2**22 - 1}}))  # as of one that died
    (line,) = journal.reap(tmp_path)
    assert "may still run; the next start tries again: " in line and "docker cannot be reached" in line
    own_dockerd.start()
    assert len(containers_of(own_box.client, nonce)) == 1
    (line,) = journal.reap(tmp_path)
    assert nonce in line and containers_of(own_box.client, nonce) == []
    assert journal.reap(tmp_path) == []


def test_the_container_of_a_killed_orchestrator_is_removed_by_the_next_start(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    (tmp_path / "orchestrate.py").write_text(ORCHESTRATE)
    (tmp_path / "plan.json").write_text(as_json(plan))
    command = [sys.executable, str(tmp_path / "orchestrate.py"), str(tmp_path / "plan.json"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orchestrator:
        nonce = orchestrator.stdout.readline().strip()
        assert nonce and len(containers_of(box.client, nonce)) == 1
        assert journal.reap(tmp_path) == [], "a boot whose orchestrator lives is left alone"
        orchestrator.send_signal(signal.SIGKILL)
    assert containers_of(box.client, nonce)[0].status == "running", "SIGKILL leaves the container"
    (line,) = journal.reap(tmp_path)
    assert nonce in line and containers_of(box.client, nonce) == [] and processes_of(nonce) == []
    assert journal.reap(tmp_path) == []
    check_port(plan.host, plan.port)
