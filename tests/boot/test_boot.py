"""A boot against real processes: what is accepted, what makes it invalid, and that nothing survives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import boot, cli, compile_cache, engines, interrupts, journal, probe
from orchestrator.boot import check_port, serving
from orchestrator.engines.process import ProcessServer, kill_processes_of, processes_of
from orchestrator.errors import BootError, UsageError
from orchestrator.plan import as_json
from orchestrator.schema import Engine

STUB = Path(__file__).with_name("stub_server.py")
ENGINE = Engine("process", None, ready_timeout_s=10, stop_grace_s=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def stub_plan(plan_of):
    """A plan that starts the stub with a fault of its own."""

    def make(fault: str = ""):
        plan = plan_of("+variant=int5_i8_pg_zpe", "box=cpu", f"box.port={free_port()}")
        tail = plan.argv[plan.argv.index("--model") :]
        argv = (sys.executable, str(STUB), *tail, "--fault", fault, "--plugin-sha256", plan.plugin.sha256)
        return replace(plan, argv=argv)

    return make


def boot_once(plan, state: Path, engine: Engine = ENGINE):
    with serving(plan, engine, "measured", state) as running:
        assert processes_of(running.boot.nonce)
    assert processes_of(running.boot.nonce) == []
    return running.boot


def warm_cache(plan) -> None:
    compile_cache.mark(Path(plan.cache_dir), "warm", plan.plugin.sha256)


def test_a_server_as_planned_gives_a_usable_warm_boot(stub_plan, tmp_path):
    plan = stub_plan()
    warm_cache(plan)
    boot = boot_once(plan, tmp_path)
    assert (boot.status, boot.reasons, boot.cache_state) == ("ok", (), "warm")
    assert boot.kv_tokens == 46592 and boot.compiled_files == 0 and boot.boot_s > 0 and boot.rss_peak_bytes > 10**6
    (reading,) = boot.processes
    assert {k: v for k, v in reading.env.items() if k in plan.env} == dict(plan.env)


def test_a_measured_boot_answers_to_the_name_with_its_nonce_and_to_no_other(stub_plan, tmp_path):
    """A client of prod, on the same port, asks for the plain name, and must not be served by what is measured."""
    plan = stub_plan()
    with serving(plan, ENGINE, "measured", tmp_path) as running:
        assert list(probe.served_windows(running.target.base_url)) == [f"{plan.served_model}@{running.boot.nonce}"]
        (server,) = processes_of(running.boot.nonce)
        assert "--shutdown-timeout" not in server.cmdline()


def test_kv_tokens_are_never_read_on_a_cold_boot(stub_plan, tmp_path):
    boot = boot_once(stub_plan(), tmp_path)
    assert (boot.cache_state, boot.kv_tokens) == ("cold", None)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drops-a-knob", "RADIANCE_PQ_ZPE: the plan says '1'"),
        ("attests-nothing", "the plugin attested nothing"),
        ("attests-half", "attest-1.json is damaged"),
        ("adds-a-knob", "RADIANCE_PQ_NEW: the plugin in process"),
        ("no-layers", "no layer runs on the plugin's path"),
        ("other-plugin", "is build ffffffffffff"),
        ("compiles", "a warm boot compiled 1 files, for example inductor/ab/graph.so"),
    ],
)
def test_a_server_that_serves_but_is_not_the_planned_one_is_invalid(stub_plan, tmp_path, fault, said):
    plan = stub_plan(fault)
    warm_cache(plan)
    boot = boot_once(plan, tmp_path)
    assert boot.status == "invalid" and said in " ".join(boot.reasons)


def test_the_fault_of_a_dropped_knob_names_process_and_attestation(stub_plan, tmp_path):
    (reason,) = boot_once(stub_plan("drops-a-knob"), tmp_path).reasons
    assert "process" in reason and "has 'none'" in reason and "attests 'none'" in reason


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "exited with status 1: torchvision, torchaudio or torchcodec is a CUDA build"),
        ("hangs", "was not ready after 2 s"),
        ("speaks-no-http", "was not ready after 2 s"),
        ("other-model", "answers for somebody-elses, not for this boot"),
    ],
)
def test_a_server_that_does_not_come_up_is_one_line_and_gone(stub_plan, tmp_path, fault, said):
    plan = stub_plan(fault)
    with pytest.raises(BootError) as caught:
        boot_once(plan, tmp_path, replace(ENGINE, ready_timeout_s=2))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert all(json.loads(p.read_text())["ended"] for p in tmp_path.glob("boots/*/journal.json"))
    check_port(plan.host, plan.port)


@pytest.mark.parametrize("fault", ["ignores-sigterm", "leaves-a-child"])
def test_nothing_of_a_server_survives_its_boot(stub_plan, tmp_path, fault):
    boot_once(stub_plan(fault), tmp_path)


def test_a_secret_that_the_server_prints_is_neither_said_nor_kept(stub_plan, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    plan = replace(stub_plan("says-its-token"), secrets=("HF_TOKEN",))
    with pytest.raises(BootError) as failed:
        boot_once(plan, tmp_path)
    assert "401 for token ***" in failed.value.detail
    assert "hf_of_the_test" not in failed.value.detail + failed.value.log_path.read_text()


def test_a_failure_while_measuring_stops_the_server(stub_plan, tmp_path):
    with pytest.raises(RuntimeError, match="bench"), serving(stub_plan(), ENGINE, "measured", tmp_path) as running:
        raise RuntimeError("bench")
    assert processes_of(running.boot.nonce) == []


def test_a_server_killed_while_measured_is_invalid(stub_plan, tmp_path):
    with serving(stub_plan(), ENGINE, "measured", tmp_path) as running:
        for process in processes_of(running.boot.nonce):
            process.kill()
        time.sleep(0.2)
    assert running.boot.status == "invalid" and "killed by SIGKILL" in running.boot.reasons[-1]


def test_a_worker_killed_while_measured_is_invalid_and_its_memory_is_not_summed(stub_plan, tmp_path):
    with serving(stub_plan("has-a-worker"), ENGINE, "measured", tmp_path) as running:
        (worker,) = [reading for reading in running.boot.processes if reading.role == "worker"]
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.2)
    found = running.boot
    assert found.status == "invalid" and found.rss_peak_bytes is None
    assert found.reasons[-1] == f"ended while the server was measured: worker (pid {worker.pid})"


def test_a_worker_that_lives_is_no_fault(stub_plan, tmp_path):
    boot = boot_once(stub_plan("has-a-worker"), tmp_path)
    assert (boot.status, len(boot.processes)) == ("ok", 2) and boot.rss_peak_bytes


def test_a_proxy_of_the_environment_is_not_asked_for_the_server(stub_plan, tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert boot_once(stub_plan(), tmp_path).status == "ok"


def test_a_taken_port_is_refused_before_anything_starts(stub_plan, tmp_path):
    plan = stub_plan()
    with socket.socket() as taken:
        taken.bind((plan.host, plan.port))
        taken.listen()
        with pytest.raises(UsageError, match=f"box.port: {plan.host}:{plan.port} cannot be used"):
            boot_once(plan, tmp_path)
    assert not (tmp_path / "boots").exists()


def test_an_interpreter_that_does_not_exist_is_said(stub_plan, tmp_path):
    plan = stub_plan()
    with pytest.raises(BootError, match="/no/such/python does not start"):
        boot_once(replace(plan, argv=("/no/such/python", *plan.argv[1:])), tmp_path)


ORCHESTRATE = """\
import json, signal, sys, threading, time
from pathlib import Path
from orchestrator import cli
from orchestrator.boot import serving
from orchestrator.plan import ServePlan
from orchestrator.records import from_jsonable
from orchestrator.schema import Engine

plan = from_jsonable(ServePlan, json.loads(Path(sys.argv[1]).read_text()))
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # as those of numpy and MLflow

def run(_options):
    with serving(plan, Engine("process", None, 10, 1), "measured", Path(sys.argv[2])) as running:
        print(running.boot.nonce, flush=True)
        time.sleep(600)

cli.VERBS["run"] = run
sys.exit(cli.main(["run"]))
"""


def orchestrate(plan, root: Path) -> subprocess.Popen[str]:
    """An orchestrator in a process of its own that holds a boot of the plan and prints its nonce."""
    (root / "orchestrate.py").write_text(ORCHESTRATE)
    (root / "plan.json").write_text(as_json(plan))
    command = [sys.executable, str(root / "orchestrate.py"), str(root / "plan.json"), str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_server_of_a_killed_orchestrator_is_ended_by_the_next_start(stub_plan, tmp_path):
    plan = stub_plan()
    with orchestrate(plan, tmp_path) as orchestrator:
        nonce = orchestrator.stdout.readline().strip()
        assert nonce and processes_of(nonce)
        assert journal.reap(tmp_path) == [], "a boot whose orchestrator lives is left alone"
        orchestrator.send_signal(signal.SIGKILL)
    assert processes_of(nonce), "SIGKILL leaves the server: that is what the journal is for"
    (line,) = journal.reap(tmp_path)
    assert nonce in line and processes_of(nonce) == []
    assert journal.reap(tmp_path) == []
    check_port(plan.host, plan.port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_impatient_interrupt_does_not_leave_the_server_running(stub_plan, tmp_path, number):
    with orchestrate(stub_plan("ignores-sigterm"), tmp_path) as orchestrator:
        nonce = orchestrator.stdout.readline().strip()
        assert processes_of(nonce)
        for _ in range(4):
            orchestrator.send_signal(number)
            time.sleep(0.12)
        said = orchestrator.communicate(timeout=30)[1]
    assert orchestrator.returncode == 130 and processes_of(nonce) == []
    first, last = said.splitlines()
    assert first.startswith("stopping the server, at most ")
    assert last == "orchestrator: interrupted; every server of this run is down"
    assert json.loads((tmp_path / "boots" / nonce / "journal.json").read_text())["ended"]


def test_an_interrupt_while_the_server_starts_leaves_nothing(stub_plan, tmp_path, monkeypatch):
    start, nonces = engines.start, []

    def started_and_interrupted(*arguments):
        nonces.append(start(*arguments).nonce)
        raise KeyboardInterrupt

    monkeypatch.setattr(engines, "start", started_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        boot_once(stub_plan(), tmp_path)
    assert processes_of(nonces[0]) == []


def test_an_interrupt_while_the_server_stops_waits_for_its_end(stub_plan, tmp_path, monkeypatch):
    stop = ProcessServer.stop

    def interrupted_stop(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        stop(*arguments)

    monkeypatch.setattr(ProcessServer, "stop", interrupted_stop)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt),
        serving(stub_plan("ignores-sigterm"), ENGINE, "measured", tmp_path) as running,
    ):
        nonce = running.boot.nonce
    assert processes_of(nonce) == [] and signal.getsignal(signal.SIGTERM) is before


def test_a_boot_that_could_not_be_ended_is_said_and_stays_in_the_journal(stub_plan, tmp_path, monkeypatch, capsys):
    def run(_options):
        with serving(stub_plan(), ENGINE, "measured", tmp_path) as running:
            monkeypatch.setattr(ProcessServer, "stop", lambda *_: os.kill(os.getpid(), signal.SIGINT))
            monkeypatch.setattr(journal, "close_boot", lambda _: None)
            nonces.append(running.boot.nonce)

    nonces: list[str] = []
    monkeypatch.setitem(cli.VERBS, "run", run)
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    try:
        assert cli.main(["run"]) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        kill_processes_of(nonces[0])
        boot._opened.clear()
    assert f"of boot {nonces[0]} something may still run" in capsys.readouterr().err


def test_a_warm_up_that_was_killed_leaves_the_cache_cold(tmp_path):
    assert compile_cache.state(tmp_path) == "cold"
    compile_cache.mark(tmp_path, "warming", "a" * 64)
    assert compile_cache.state(tmp_path) == "cold"
    compile_cache.mark(tmp_path, "warm", "a" * 64)
    assert compile_cache.state(tmp_path) == "warm"


@pytest.mark.parametrize(
    "name", ["inductor/a/g.so", "vllm/c.json", "triton/k.hsaco", "aiter/jit/m.so", "home/.triton/k.so"]
)
def test_a_graph_that_is_new_or_written_again_counts_as_compiled(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    before = compile_cache.compiled(tmp_path)
    path.write_bytes(b"graph")
    assert compile_cache.compiled_since(tmp_path, before) == [name]
    before = compile_cache.compiled(tmp_path)
    assert compile_cache.compiled_since(tmp_path, before) == []
    os.utime(path, ns=(0, before[name] + 1))  # a recompile has the same hash, and so the same name
    assert compile_cache.compiled_since(tmp_path, before) == [name]


@pytest.mark.parametrize(("renamed", "said"), [(False, "belongs to plugin build bbbb"), (True, "belongs to cache key")])
def test_a_compile_cache_of_another_build_is_refused_before_anything_starts(stub_plan, tmp_path, renamed, said):
    plan = stub_plan()
    if renamed:
        compile_cache.mark(tmp_path / "another-key", "warm", plan.plugin.sha256)
        shutil.copytree(tmp_path / "another-key", plan.cache_dir)
    else:
        compile_cache.mark(Path(plan.cache_dir), "warm", "b" * 64)
    with pytest.raises(UsageError, match=said), serving(plan, ENGINE, "measured", tmp_path / "state"):
        pass
    assert not (tmp_path / "state" / "boots").exists()


def test_only_processes_with_the_nonce_are_ended():
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={"RADIANCE_BOOT_NONCE": "other"}
    )
    try:
        assert kill_processes_of("mine") == 0 and stranger.poll() is None
    finally:
        os.kill(stranger.pid, signal.SIGKILL)
        stranger.wait()
