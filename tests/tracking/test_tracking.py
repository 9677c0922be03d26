"""Runs in a real MLflow store: what is written can be read again, and every failure is one line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from orchestrator.recorded import catalog, mlflow_store, tracking
from orchestrator.recorded.mlflow_store import TrackingError
from orchestrator.recorded.tracking import Tracker
from orchestrator.records import Measurement


def measurement(bench: str = "decode", **changes) -> Measurement:
    values = {
        "bench": bench,
        "status": "ok",
        "reason": "",
        "metrics": {"decode.ms_per_step.ctx512": 21.5, "decode.tok_per_s.ctx512": 46.5},
        "samples": ({"id": "a", "text": "naïve <b>", "ms": [1.5, 2.5]}, {"id": "b", "text": "", "ms": []}),
        "config": {"contexts": [0, 512]},
        "corpora": {"prose": "00ff"},
        "notes": ("one note",),
        "started_at_utc": "2026-01-02T03:04:05Z",
        "duration_s": 12.5,
    }
    return Measurement(**values | changes)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """One store for the tests that only add runs: making one takes a second."""
    directory = tmp_path_factory.mktemp("store")
    Tracker(directory, "cpu").start("first", {}, {}).finish("FINISHED")
    return directory


@pytest.fixture
def own_store(store, tmp_path) -> Path:
    """A store for a test that damages or locks it."""
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / "mlflow.db").write_bytes((store / "mlflow.db").read_bytes())
    return directory


@pytest.fixture
def client(store):
    return mlflow_store.connect(store)


def child(script: str, *arguments: object, **options) -> subprocess.Popen:
    """A process of its own that runs `script`; its arguments are sys.argv[1:]."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


RUN_AND_WAIT = """
    import sys, time
    from pathlib import Path
    from orchestrator.recorded.tracking import Tracker
    run = Tracker(Path(sys.argv[1]), "cpu").start("killed", {"bits": "5"}, {})
    run.log_metrics({"decode.ms_per_step.ctx0": 20.0})
    print(run.run_id, flush=True)
    time.sleep(600)
"""


# What is written


def test_a_run_holds_its_parameters_tags_metrics_and_end(store, client):
    run = Tracker(store, "cpu").start("int5", {"weights.bits": "5", "mode": "int8"}, {"box": "cpu", "cold": "no"})
    run.log_metrics({"decode.ms_per_step.ctx512": 21.25})
    run.finish("FAILED", "the check of int5 failed")
    stored = client.get_run(run.run_id)
    assert stored.info.status == "FAILED"
    assert stored.info.run_name == "int5"
    assert stored.data.params == {"weights.bits": "5", "mode": "int8"}
    assert stored.data.metrics == {"decode.ms_per_step.ctx512": 21.25}
    assert stored.data.tags["box"] == "cpu"
    assert stored.data.tags["end_reason"] == "the check of int5 failed"
    assert stored.data.tags["owner.pid"] == str(os.getpid())


def test_a_measurement_comes_back_as_it_went_in(store):
    tracker = Tracker(store, "cpu")
    run = tracker.start("round trip", {}, {})
    decode, empty = measurement(), measurement("kl", metrics={}, samples=())
    run.log_measurement(decode)
    run.log_measurement(empty)
    run.finish("FINISHED")
    assert catalog.measurements(run.artifacts) == {"decode": decode, "kl": empty}


def test_many_samples_are_packed_and_come_back(store):
    tracker = Tracker(store, "cpu")
    run = tracker.start("packed", {}, {})
    big = measurement(samples=tuple({"n": n, "text": "words " * 20} for n in range(10_000)))
    run.log_measurement(big)
    packed = run.artifacts / "samples" / "decode.jsonl.gz"
    assert packed.stat().st_size < 100_000
    assert not packed.with_suffix("").exists()
    assert catalog.measurements(run.artifacts)["decode"] == big


def test_the_samples_are_one_json_record_a_line(store):
    run = Tracker(store, "cpu").start("lines", {}, {})
    run.log_measurement(measurement())
    lines = (run.artifacts / "samples" / "decode.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]


def test_an_invalid_measurement_is_a_tag_with_its_reason(store, client):
    run = Tracker(store, "cpu").start("invalid", {}, {})
    run.log_measurement(measurement(status="invalid", reason="all 8 requests failed", metrics={"decode.errors": 8.0}))
    assert client.get_run(run.run_id).data.tags["invalid.decode"] == "all 8 requests failed"


def test_more_values_than_mlflow_takes_in_one_call(store, client):
    run = Tracker(store, "cpu").start("many", {f"p{n}": str(n) for n in range(250)}, {})
    run.log_metrics({f"m.{n}": float(n) for n in range(2500)})
    data = client.get_run(run.run_id).data
    assert len(data.params) == 250 and len(data.metrics) == 2500
    assert data.metrics["m.2499"] == 2499.0 and data.params["p249"] == "249"


def test_a_long_value_is_cut_where_one_sees_it_and_kept_whole_in_a_file(store, client):
    value = "x" * 50_000 + "end"
    run = Tracker(store, "cpu").start("long", {"serve/argv": value, "exact": "y" * 6000}, {"log": value})
    data = client.get_run(run.run_id).data
    for shown, kind, name in ((data.params["serve/argv"], "params", "serve_argv"), (data.tags["log"], "tags", "log")):
        file = f"long_values/{kind}.{name}.txt"
        assert shown.startswith("xxx") and shown.endswith(f"[cut: 50003 characters, the whole in {file}]")
        assert (run.artifacts / file).read_text() == value
    assert data.params["exact"] == "y" * 6000


def test_files_and_json_become_artifacts_that_mlflow_lists(store, client, tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"\x00binary and text\n")
    run = Tracker(store, "cpu").start("artifacts", {}, {})
    run.log_file(log, "boots/1/server.log")
    run.log_json("plan.json", {"port": 8000})
    assert {item.path for item in client.list_artifacts(run.run_id)} == {"boots", "plan.json"}
    assert [item.path for item in client.list_artifacts(run.run_id, "boots/1")] == ["boots/1/server.log"]
    assert (run.artifacts / "boots/1/server.log").read_bytes() == log.read_bytes()
    assert json.loads((run.artifacts / "plan.json").read_text()) == {"port": 8000}


def test_a_metric_name_that_mlflow_refuses_is_named(store):
    run = Tracker(store, "cpu").start("names", {}, {})
    with pytest.raises(TrackingError, match="tok/s@512") as caught:
        run.log_metrics({"fine": 1.0, "tok/s@512": 2.0})
    assert "\n" not in str(caught.value)


def test_a_file_to_log_that_does_not_exist_is_named(store, tmp_path):
    run = Tracker(store, "cpu").start("missing", {}, {})
    with pytest.raises(TrackingError, match="No such file"):
        run.log_file(tmp_path / "gone.log", "server.log")
    assert list(run.artifacts.iterdir()) == []


def test_an_experiment_that_was_deleted_in_the_ui_is_restored(own_store):
    client = mlflow_store.connect(own_store)
    client.delete_experiment(client.get_experiment_by_name("cpu").experiment_id)
    Tracker(own_store, "cpu").start("two", {}, {}).finish("FINISHED")
    assert client.get_experiment_by_name("cpu").lifecycle_stage == "active"


# Runs whose process is gone


def test_a_run_killed_with_sigkill_is_found_and_marked_at_the_next_start(store, client):
    process = child(RUN_AND_WAIT, store)
    run_id = process.stdout.readline().strip()
    assert client.get_run(run_id).info.status == "RUNNING"
    tracker = Tracker(store, "another experiment")
    assert run_id not in tracker.reap(), "its process still lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tracker.reap() == [run_id]
    stored = client.get_run(run_id)
    assert stored.info.status == "KILLED"
    assert f"pid {process.pid}" in stored.data.tags["end_reason"]
    assert stored.data.metrics == {"decode.ms_per_step.ctx0": 20.0}, "what it had measured stays"
    assert tracker.reap() == []


def test_a_zombie_counts_as_gone(store):
    process = child(RUN_AND_WAIT, store)
    run_id = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Tracker(store, "cpu").reap() == [run_id]
    process.wait()


def test_a_reused_pid_does_not_keep_a_dead_run_alive(store, client):
    tracker = Tracker(store, "cpu")
    run = tracker.start("pid reused", {}, {})
    run.set_tag("owner.start_time", "1.0")
    assert tracker.reap() == [run.run_id]
    assert client.get_run(run.run_id).info.status == "KILLED"


def test_runs_of_others_and_of_other_hosts_stay_as_they_are(store, client):
    tracker = Tracker(store, "cpu")
    elsewhere = tracker.start("elsewhere", {}, {})
    elsewhere.set_tag("owner.host", "another-host")
    elsewhere.set_tag("owner.pid", "1")
    foreign = client.create_run("0")
    assert tracker.reap() == []
    for run_id in (elsewhere.run_id, foreign.info.run_id):
        assert client.get_run(run_id).info.status == "RUNNING"


def test_more_dead_runs_than_one_page_of_mlflow(own_store, monkeypatch):
    tracker = Tracker(own_store, "cpu")
    runs = []
    for n in range(7):
        run = tracker.start(f"dead {n}", {}, {})
        run.set_tag("owner.start_time", "1.0")
        runs.append(run.run_id)
    search = tracker._client.search_runs
    monkeypatch.setattr(tracker._client, "search_runs", lambda *a, **k: search(*a, **k, max_results=3))
    assert sorted(tracker.reap()) == sorted(runs)


# The store


def test_a_process_killed_while_the_database_is_made_leaves_a_store_that_opens(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from orchestrator.recorded.mlflow_store import connect
        connect(Path(sys.argv[1]))
    """
    making = tmp_path / "mlflow.db.making"
    process = child(script, tmp_path)
    deadline = time.monotonic() + 60
    while not (making.exists() and making.stat().st_size > 100_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    Tracker(tmp_path, "cpu").start("after", {}, {}).finish("FINISHED")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mlflow.lock", "mlflow.db"]


def test_two_processes_that_start_at_once_make_one_store_and_lose_no_run(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from orchestrator.recorded.tracking import Tracker
        for n in range(5):
            run = Tracker(Path(sys.argv[1]), "cpu").start(f"{sys.argv[2]} {n}", {"n": str(n)}, {})
            run.log_metrics({f"m.{i}": float(i) for i in range(100)})
            run.finish("FINISHED")
    """
    processes = [child(script, tmp_path, name) for name in ("a", "b")]
    for process in processes:
        assert process.communicate()[1] == "", "nothing is printed by MLflow, alembic or Python"
        assert process.returncode == 0
    client = mlflow_store.connect(tmp_path)
    experiment = client.get_experiment_by_name("cpu").experiment_id
    runs = client.search_runs([experiment])
    assert sorted(run.info.run_name for run in runs) == sorted(f"{name} {n}" for name in "ab" for n in range(5))
    assert all(len(run.data.metrics) == 100 for run in runs)


def test_nothing_is_sent_over_a_network(tmp_path):
    script = """
        import socket, sys
        from pathlib import Path
        tried = []
        socket.socket.connect = lambda self, address: tried.append(address)
        socket.getaddrinfo = lambda *arguments, **_: tried.append(arguments) or []
        from orchestrator.recorded.tracking import Tracker
        run = Tracker(Path(sys.argv[1]), "cpu").start("quiet", {"a": "b"}, {})
        run.log_metrics({"m": 1.0})
        run.finish("FINISHED")
        import mlflow.telemetry
        assert mlflow.telemetry.get_telemetry_client() is None
        print(tried)
    """
    out, errors = child(script, tmp_path).communicate()
    assert (out, errors) == ("[]\n", "")


def test_importing_the_module_does_not_import_mlflow():
    heavy = "('mlflow', 'sqlalchemy', 'pandas')"
    script = f"import sys, orchestrator.recorded.tracking; print([m for m in {heavy} if m in sys.modules])"
    assert child(script).communicate()[0] == "[]\n"


# Failures


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@contextlib.contextmanager
def small_disk(directory: Path, size: str):
    """A file system of `size` that really fills up; only root can mount one."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@contextlib.contextmanager
def filling(directory: Path, database: bytes):
    """`directory` with a started run and no room left: a full tmpfs as root, a file size limit as anybody else."""
    if os.geteuid() == 0:
        with small_disk(directory, "4m"):
            (directory / "mlflow.db").write_bytes(database)
            run = Tracker(directory, "full disk").start("full", {}, {})
            with contextlib.suppress(OSError), (directory / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(b"\0" * 4096)
                    ballast.flush()
            yield run
    else:
        directory.mkdir()
        (directory / "mlflow.db").write_bytes(database)
        run = Tracker(directory, "full disk").start("full", {}, {})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            yield run
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_during_a_run_is_one_line_and_leaves_nothing_half_written(store, tmp_path):
    directory = tmp_path / "full"
    with filling(directory, (store / "mlflow.db").read_bytes()) as run:
        big = measurement(samples=tuple({"n": n, "text": os.urandom(60).hex()} for n in range(2000)))
        with pytest.raises(TrackingError) as caught:
            run.log_measurement(big)
        one_line(caught, str(directory), "the disk is full", "paths.tracking")
        assert [path for path in run.artifacts.rglob("*") if path.is_file()] == []
        with pytest.raises(TrackingError) as caught:
            run.log_metrics({f"metric.{'x' * 100}.{n}": float(n) for n in range(20_000)})
        one_line(caught, str(directory / "mlflow.db"), "free some space")


def test_a_full_disk_before_the_database_exists_leaves_no_database(tmp_path):
    script = """
        import resource, signal, sys
        from pathlib import Path
        from orchestrator.recorded.mlflow_store import TrackingError, connect
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        try:
            connect(Path(sys.argv[1]))
        except TrackingError as error:
            print(error)
    """
    out, errors = child(script, tmp_path).communicate()
    assert errors == ""
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/mlflow\.db: .*free some space.*\n", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mlflow.lock"]


def test_a_locked_database_at_the_start_is_one_line(own_store, monkeypatch):
    monkeypatch.setattr(mlflow_store, "LOCK_WAIT_S", 0.2)
    holder = sqlite3.connect(own_store / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TrackingError) as caught:
        Tracker(own_store, "cpu")
    one_line(caught, str(own_store / "mlflow.db"), "locked by another process", "fuser")
    holder.execute("ROLLBACK")
    Tracker(own_store, "cpu").start("two", {}, {}).finish("FINISHED")


def test_a_database_locked_during_a_run_is_one_line(own_store):
    import sqlalchemy

    run = Tracker(own_store, "cpu").start("one", {}, {})

    def wait_less(_connection, _cursor, statement, parameters, _context, _many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 100"), parameters

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", wait_less, retval=True)
    holder = sqlite3.connect(own_store / "mlflow.db", isolation_level=None)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TrackingError) as caught:
            run.log_metrics({"m": 1.0})
        one_line(caught, "locked by another process")
    finally:
        holder.execute("ROLLBACK")
        sqlalchemy.event.remove(sqlalchemy.engine.Engine, "before_cursor_execute", wait_less)
    run.log_metrics({"m": 2.0})


@contextlib.contextmanager
def read_only(directory: Path):
    """No permission stops root, so root remounts the directory read-only."""
    if os.geteuid() == 0:
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
    else:
        for path in (directory / "mlflow.db", directory):
            path.chmod(path.stat().st_mode & ~0o222)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", directory], check=True)
        else:
            directory.chmod(0o755)


def test_a_read_only_database_is_one_line(own_store):
    with read_only(own_store), pytest.raises(TrackingError) as caught:
        Tracker(own_store, "cpu")
    one_line(caught, str(own_store / "mlflow.db"), "cannot be written", "make it writable")


def test_a_file_in_the_place_of_the_directory_is_one_line(tmp_path):
    (tmp_path / "mlruns").write_text("")
    with pytest.raises(TrackingError) as caught:
        Tracker(tmp_path / "mlruns", "cpu")
    one_line(caught, str(tmp_path / "mlruns"), os.strerror(errno.EEXIST))


def test_a_file_that_is_no_database_is_one_line_and_is_not_overwritten(tmp_path):
    (tmp_path / "mlflow.db").write_text("my notes, " * 1000)
    with pytest.raises(TrackingError) as caught:
        Tracker(tmp_path, "cpu")
    one_line(caught, "is not an SQLite database", "move it away")
    assert (tmp_path / "mlflow.db").read_text().startswith("my notes")


def test_a_database_of_another_mlflow_is_one_line(own_store):
    with contextlib.closing(sqlite3.connect(own_store / "mlflow.db", isolation_level=None)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'unknown'")
    with pytest.raises(TrackingError) as caught:
        Tracker(own_store, "cpu").start("two", {}, {})
    one_line(caught, "was made by another MLflow", "mlflow db upgrade")


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), mlflow_store.explained(Path("mlflow.db")):
        _ = 1 / 0


def test_the_lengths_that_mlflow_allows_are_still_the_ones_we_cut_at():
    from mlflow.utils import validation

    assert tracking.PARAM_LENGTH == validation.MAX_PARAM_VAL_LENGTH
    assert tracking.TAG_LENGTH == validation.MAX_TAG_VAL_LENGTH
    assert tracking.PARAMS_PER_CALL == validation.MAX_PARAMS_TAGS_PER_BATCH
    assert tracking.METRICS_PER_CALL == validation.MAX_METRICS_PER_BATCH
