"""What has gone wrong with containers, each against a real daemon: said in one line, and nothing is left of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orchestrator import compile_cache
from orchestrator.boot import check_port, serving
from orchestrator.engines import daemon
from orchestrator.engines.container import LABEL, ContainerServer, containers_of
from orchestrator.engines.process import processes_of
from orchestrator.errors import BootError, UsageError
from orchestrator.schema import Engine
from tests.engine.conftest import IMAGE, PYTHON, Daemon, free_port

pytestmark = pytest.mark.engine


def nonces(state: Path) -> list[str]:
    return [path.parent.name for path in sorted(state.glob("boots/*/journal.json"))]


def assert_nothing_left(box: Daemon, state: Path) -> str:
    """Of any boot in `state`; returns the last one's log."""
    for nonce in nonces(state):
        assert containers_of(box.client, nonce) == [] and processes_of(nonce) == []
        assert json.loads((state / "boots" / nonce / "journal.json").read_text())["ended"]
    return (state / "boots" / nonces(state)[-1] / "server.log").read_text()


def boot_fails(plan, box: Daemon, state: Path, timeout_s: float = 60, purpose: str = "measured") -> str:
    """Boots a plan that does not come up; returns the one line that says why."""
    engine = replace(box.engine, ready_timeout_s=timeout_s)
    with pytest.raises(BootError) as caught, serving(plan, engine, purpose, state):
        raise AssertionError("it came up")
    assert "\n" not in str(caught.value)
    check_port(plan.host, plan.port)
    return str(caught.value)


@contextmanager
def later(act, state: Path, log_says: str):
    """Call `act(nonce)` on a thread as soon as the log of the boot under `state` has the words."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for nonce in nonces(state):
                log = state / "boots" / nonce / "server.log"
                if log.exists() and log_says in log.read_text():
                    act(nonce)
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


@contextmanager
def strange_server(port: int, model: str):
    """Another server's answers on the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": model, "max_model_len": 4096}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def kill(box: Daemon, nonce: str) -> None:
    (container,) = containers_of(box.client, nonce)
    container.kill()


def test_a_server_that_dies_is_said_with_its_known_cause(stub_plan, box, tmp_path):
    said = boot_fails(stub_plan(box, "dies"), box, tmp_path)
    assert "exited with status 1: torchvision, torchaudio or torchcodec is a CUDA build" in said
    assert_nothing_left(box, tmp_path)


def test_the_log_of_a_dead_container_is_complete_and_in_order(stub_plan, box, tmp_path):
    assert "exited with status 3" in boot_fails(stub_plan(box, "talks-and-dies"), box, tmp_path)
    numbers = [int(line.removeprefix("line ")) for line in assert_nothing_left(box, tmp_path).splitlines()]
    assert sorted(numbers) == list(range(5000))
    for stream in (0, 1):  # stdout and stderr are two pipes: each is in order
        own = [number for number in numbers if bool(number % 7) == stream]
        assert own == sorted(own)


def test_a_server_that_hangs_ends_at_the_deadline(stub_plan, box, tmp_path):
    assert "was not ready after 3 s" in boot_fails(stub_plan(box, "hangs"), box, tmp_path, timeout_s=3)
    assert_nothing_left(box, tmp_path)


def test_a_server_that_outlives_its_failed_engine_is_not_waited_for(stub_plan, docker_box, tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.boot.FAILED_ENGINE_S", 1)
    assert "its engine failed" in boot_fails(stub_plan(docker_box, "engine-fails"), docker_box, tmp_path)
    assert_nothing_left(docker_box, tmp_path)


@pytest.mark.parametrize("purpose", ["measured", "warmup"])
def test_a_container_killed_while_it_loads_is_said_and_the_cache_stays_cold(stub_plan, box, tmp_path, purpose):
    plan = stub_plan(box, "hangs")
    cache = Path(plan.cache_dir)
    compile_cache.mark(cache, "warming", plan.plugin.sha256)
    with later(lambda nonce: kill(box, nonce), tmp_path, "linear layers"):
        assert "killed by SIGKILL" in boot_fails(plan, box, tmp_path, purpose=purpose)
    assert_nothing_left(box, tmp_path)
    assert compile_cache.state(cache) == "cold"


@pytest.mark.parametrize("purpose", ["measured", "warmup"])
def test_a_container_killed_while_it_is_used_makes_the_boot_invalid(stub_plan, box, tmp_path, purpose):
    with serving(stub_plan(box), box.engine, purpose, tmp_path) as running:
        kill(box, running.boot.nonce)
    assert running.boot.status == "invalid"
    assert "the server ended while it was measured (killed by SIGKILL)" in running.boot.reasons
    assert_nothing_left(box, tmp_path)


def test_a_container_that_somebody_removes_makes_the_boot_invalid(stub_plan, box, tmp_path):
    with serving(stub_plan(box), box.engine, "measured", tmp_path) as running:
        (container,) = containers_of(box.client, running.boot.nonce)
        container.remove(force=True)
    assert "its container was removed by somebody else" in running.boot.reasons[-1]
    assert_nothing_left(box, tmp_path)


def test_a_container_that_runs_out_of_memory_is_said_so(stub_plan, box, tmp_path):
    said = boot_fails(stub_plan(box, "eats-memory", memory_gib=0.125), box, tmp_path)
    assert "out of memory (the limit of its container is 0.125 GiB)" in said
    assert_nothing_left(box, tmp_path)


def test_a_missing_image_is_one_line_with_the_command_that_mends_it(stub_plan, box, tmp_path):
    wanted = replace(box, image_id="")
    for image, command in (("no-such-image:1", f"{box.kind} pull no-such-image:1"), ("paro-cpu:no", "build-cpu.sh")):
        with (
            pytest.raises(UsageError, match=f"has no image {image}; run `.*{command}"),
            serving(stub_plan(wanted, image=image), box.engine, "measured", tmp_path),
        ):
            pass
    assert_nothing_left(box, tmp_path)


def test_a_name_that_no_image_can_have_and_a_port_that_is_none_are_one_line(docker_box):
    with pytest.raises(UsageError, match=r"box.container.image: docker refuses 'Bad Name' \(.*\); correct it"):
        daemon.image_id(docker_box.engine, "Bad Name")
    with pytest.raises(UsageError, match=r"engine.socket: docker cannot be reached at tcp://127.0.0.1:none"):
        daemon.connect("docker", "tcp://127.0.0.1:none")


def test_docker_behind_the_socket_of_podman_is_refused(docker_box):
    engine = Engine("podman", None, 60, 2, daemon.socket_of(docker_box.engine))
    with pytest.raises(UsageError, match=r"engine.socket: at .* is docker, not podman; write engine=docker"):
        daemon.image_id(engine, "paro-stub:1")


def test_an_image_that_was_removed_since_the_plan_is_said(stub_plan, box, tmp_path):
    plan = stub_plan(replace(box, image_id=f"sha256:{'0' * 64}"))
    with pytest.raises(UsageError, match="no longer has paro-stub"), serving(plan, box.engine, "measured", tmp_path):
        pass
    assert_nothing_left(box, tmp_path)


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_an_engine_that_cannot_be_reached_is_one_line(stub_plan, docker_box, tmp_path, kind):
    engine = replace(docker_box.engine, kind=kind, socket=str(tmp_path / "nobody.sock"))
    with (
        pytest.raises(UsageError, match=rf"engine.socket: {kind} cannot be reached at unix://.*nobody.sock .*; run `"),
        serving(stub_plan(docker_box), engine, "measured", tmp_path),
    ):
        pass
    assert all(json.loads(path.read_text())["ended"] for path in tmp_path.glob("boots/*/journal.json"))


def test_a_strangers_server_on_the_port_is_refused_before_anything_starts(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    with (
        strange_server(plan.port, "a-model"),
        pytest.raises(UsageError, match="cannot be used"),
        serving(plan, box.engine, "measured", tmp_path),
    ):
        pass
    assert nonces(tmp_path) == []


def test_a_port_taken_between_the_check_and_the_start_is_said(stub_plan, docker_box, tmp_path, monkeypatch):
    plan = stub_plan(docker_box)
    monkeypatch.setattr("orchestrator.boot.check_port", lambda *_: None)
    with (
        strange_server(plan.port, "a-model"),
        pytest.raises(BootError, match=r"does not start .*already"),
        serving(plan, docker_box.engine, "measured", tmp_path),
    ):
        pass
    assert_nothing_left(docker_box, tmp_path)


def test_a_dying_server_that_still_answers_under_the_shared_name_is_not_taken_for_ours(stub_plan, box, tmp_path):
    """Both on the host's network: the old one answers well and under the very name that is being booted."""
    plan = stub_plan(box, "binds-late", network="host")
    served = strange_server(plan.port, plan.served_model)
    with (
        later(lambda _: served.__enter__(), tmp_path, "KV cache size"),
        pytest.raises(BootError) as caught,
        serving(plan, box.engine, "measured", tmp_path),
    ):
        raise AssertionError("it was taken for ours")
    served.__exit__(None, None, None)
    assert f"answers for {plan.served_model}, not for this boot" in str(caught.value)
    assert_nothing_left(box, tmp_path)


def test_a_compile_cache_of_another_plugin_build_is_refused_before_a_container_is_made(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    compile_cache.mark(Path(plan.cache_dir), "warm", "b" * 64)
    with (
        pytest.raises(UsageError, match=r"belongs to plugin build bbbb.*remove that directory"),
        serving(plan, box.engine, "measured", tmp_path),
    ):
        pass
    assert nonces(tmp_path) == []


def test_a_server_with_another_plugin_build_than_the_planned_one_is_invalid(stub_plan, box, tmp_path):
    plan = stub_plan(box)
    other = replace(plan, plugin=replace(plan.plugin, sha256="b" * 64))
    with serving(other, box.engine, "measured", tmp_path) as running:
        pass
    assert running.boot.status == "invalid"
    assert any("the plan's is bbbbbbbbbbbb" in reason for reason in running.boot.reasons)
    assert_nothing_left(box, tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_full_disk_under_the_cache_is_said(stub_plan, box, tmp_path):
    plan = stub_plan(box, "fills-the-cache")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", plan.cache_dir], check=True)
    try:
        assert "the disk is full" in boot_fails(plan, box, tmp_path)
        assert_nothing_left(box, tmp_path)
    finally:
        subprocess.run(["umount", plan.cache_dir], check=True)


def test_a_log_that_cannot_be_completed_does_not_leave_the_container(stub_plan, docker_box, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ContainerServer, "_complete_log", full)
    with (
        pytest.raises(OSError, match="No space left"),
        serving(stub_plan(docker_box), docker_box.engine, "measured", tmp_path),
    ):
        pass
    (nonce,) = nonces(tmp_path)
    assert containers_of(docker_box.client, nonce) == []


def test_a_process_that_outlives_its_container_is_ended_with_it(stub_plan, box, tmp_path):
    with serving(stub_plan(box), box.engine, "measured", tmp_path) as running:
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        env = {"RADIANCE_BOOT_NONCE": running.boot.nonce}
        survivor = subprocess.Popen(sleep, env=env, start_new_session=True)
    survivor.wait(5)
    assert_nothing_left(box, tmp_path)


def test_only_what_carries_our_label_and_the_nonce_is_removed(stub_plan, box, tmp_path):
    """Containers with our kind of name, another boot's label, or the nonce under another label stay as they are."""
    sleep = {"entrypoint": [PYTHON], "command": ["-c", "import time; time.sleep(600)"]}
    mine = f"test-{free_port()}"
    strangers = [
        box.client.containers.run(box.image_id, detach=True, name=f"paro-{mine}", **sleep),
        box.client.containers.run(box.image_id, detach=True, labels={f"{LABEL}.nonce": f"other-{mine}"}, **sleep),
    ]
    try:
        with serving(stub_plan(box), box.engine, "measured", tmp_path) as running:
            labels = {"nonce": running.boot.nonce}
            strangers.append(box.client.containers.run(box.image_id, detach=True, labels=labels, **sleep))
        assert_nothing_left(box, tmp_path)
        for stranger in strangers:
            stranger.reload()
            assert stranger.status == "running"
    finally:
        for stranger in strangers:
            stranger.remove(force=True)


def IMAGE_OF(box: Daemon) -> str:
    return box.image_id


def test_a_name_that_is_taken_is_said_and_its_holder_survives(stub_plan, docker_box, tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.journal.new_nonce", lambda: "abcdef012345")
    holder = docker_box.client.containers.create(IMAGE, name="paro-abcdef012345")
    try:
        assert "already in use" in boot_fails(stub_plan(docker_box), docker_box, tmp_path)
        holder.reload()
        assert holder.status == "created"
    finally:
        holder.remove()


def test_a_group_that_this_machine_lacks_is_refused(stub_plan, docker_box, tmp_path):
    plan = stub_plan(docker_box, groups=("no-such-group",))
    with (
        pytest.raises(UsageError, match="no group no-such-group"),
        serving(plan, docker_box.engine, "measured", tmp_path),
    ):
        pass


def test_sockets_of_both_engines_come_from_the_environment_or_the_usual_place(monkeypatch):
    from tests.engine.conftest import engine_of

    for name in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert daemon.socket_of(engine_of("docker")) == "unix:///var/run/docker.sock"
    assert daemon.socket_of(engine_of("podman")).endswith("/podman/podman.sock")
    assert daemon.socket_of(engine_of("docker", "/x.sock")) == "unix:///x.sock"
    monkeypatch.setenv("CONTAINER_HOST", "unix:///y.sock")
    assert daemon.socket_of(engine_of("podman")) == "unix:///y.sock"
    monkeypatch.setenv("CONTAINER_HOST", "")
    assert daemon.socket_of(engine_of("podman")).endswith("/podman/podman.sock")
