"""Runs on a real tracking server, on PostgreSQL: it holds what the local store holds, once, whatever happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.mirror import ORIGIN, Mirror, ServerError
from orchestrator.recorded.tracking import RunLog, Tracker
from tests.tracking.servers import Lossy, Postgres, Server, free_port
from tests.tracking.test_tracking import measurement

CURVE = {f"decode.ms_per_step.ctx{at}": 20.0 + at / 1000 for at in (0, 512, 8192)}
TEN_AT_ONCE = """
    import os, sys, traceback
    from pathlib import Path
    from orchestrator.recorded import mlflow_store
    from orchestrator.recorded.tracking import Tracker
    from tests.tracking.test_tracking import measurement
    mlflow_store.client_class()
    def boot(number):
        tracker = Tracker(Path(sys.argv[1]), "ten", sys.argv[2] or None)
        run = tracker.start(f"boot {number}", {"n": str(number)}, {"ab.arm": "ab"[number % 2]})
        for bench in ("decode", "prefill"):
            metrics = {f"{bench}.m{n}.ctx{at}": number + n + at / 1e6 for n in range(20) for at in (0, 512)}
            run.log_measurement(measurement(bench, metrics=metrics))
        run.finish("FINISHED")
    children = []
    for number in range(10):
        if not (pid := os.fork()):
            code = 1
            try:
                boot(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    database = Postgres()
    try:
        running = Server(database.uri, tmp_path_factory.mktemp("server"))
        yield running
        running.kill()
    finally:
        database.stop()


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("empty")
    mlflow_store.connect(directory)
    return directory / "mlflow.db"


@pytest.fixture
def store(tmp_path, empty) -> Path:
    shutil.copyfile(empty, tmp_path / "mlflow.db")
    return tmp_path


def a_run(tracker: Tracker, name: str = "int5", parent: str | None = None) -> RunLog:
    """A whole one: parameters, tags, metrics, curves, corpora, samples, files."""
    run = tracker.start(name, {f"p{n}": str(n) for n in range(120)}, {"variant": name, "stack": "s"}, parent)
    run.log_measurement(measurement(metrics=CURVE))
    run.log_text("boots/1-measured/server.log", "a line\n" * 100)
    run.log_text("report.html", "<p>naïve</p>")
    run.log_measurement(measurement("empty", samples=(), metrics={}))
    run.finish("FINISHED", "because")
    return run


def contents(client, run_id: str) -> dict:
    """All that a store has of a run; `parent` is another id on each store, and so left out."""
    run = client.get_run(run_id)
    tags = {key: value for key, value in run.data.tags.items() if key not in (ORIGIN, catalog.PARENT)}
    files = {}

    def walk(path: str | None) -> None:
        for item in client.list_artifacts(run_id, path):
            if item.is_dir:
                walk(item.path)
            else:
                files[item.path] = Path(client.download_artifacts(run_id, item.path)).read_bytes()

    walk(None)
    return {
        "name": run.info.run_name,
        "status": (run.info.status, run.info.start_time, run.info.end_time),
        "params": run.data.params,
        "tags": tags,
        "metrics": {
            name: sorted((row.step, row.value, row.timestamp) for row in client.get_metric_history(run_id, name))
            for name in run.data.metrics
        },
        "datasets": sorted(
            (found.dataset.name, found.dataset.digest, found.dataset.source, found.tags[0].value)
            for found in run.inputs.dataset_inputs
        ),
        "files": files,
    }


def copies(server_url: str, run_id: str) -> list[str]:
    client = mlflow_store.client_class()(server_url)
    everywhere = [found.experiment_id for found in client.search_experiments()]
    return [found.info.run_id for found in client.search_runs(everywhere, f"tags.`{ORIGIN}` = '{run_id}'")]


def require_equal(store: Path, server_url: str, run_id: str) -> str:
    """The id of the only copy, which has all that the local run has."""
    (copy,) = copies(server_url, run_id)
    here, there = mlflow_store.connect(store), mlflow_store.client_class()(server_url)
    assert contents(there, copy) == contents(here, run_id)
    return copy


def said_by(store: Path, server: str) -> tuple[Tracker, list[str]]:
    lines: list[str] = []
    return Tracker(store, "cpu", server, lines.append), lines


def test_a_run_is_on_the_server_with_all_that_the_local_store_has(store, server):
    tracker, said = said_by(store, server.url)
    run = a_run(tracker)
    copy = require_equal(store, server.url, run.run_id)
    client = mlflow_store.client_class()(server.url)
    assert client.get_run(copy).info.artifact_uri.startswith("mlflow-artifacts:"), "the server passes artifacts on"
    points = client.get_metric_history(copy, "curve/decode.ms_per_step.by_ctx")
    assert sorted((point.step, point.value) for point in points) == [(0, 20.0), (512, 20.512), (8192, 28.192)]
    assert said == [] and Mirror(store, server.url).waiting() == []


def test_a_boot_is_nested_in_the_copy_of_its_ab(store, server):
    tracker, _ = said_by(store, server.url)
    above = tracker.start("int4 | int5", {}, {"kind": "ab"})
    boot = a_run(tracker, "1.1 a int4", above.run_id)
    client = mlflow_store.client_class()(server.url)
    (copy,) = copies(server.url, above.run_id)
    assert client.get_run(copy).info.status == "RUNNING", "it is seen while it runs"
    assert client.get_run(require_equal(store, server.url, boot.run_id)).data.tags[catalog.PARENT] == copy
    above.set_tag("verdict", "PASS")
    above.finish("FINISHED")
    require_equal(store, server.url, above.run_id)


def test_what_is_logged_later_and_what_is_removed_follow(store, server):
    tracker, _ = said_by(store, server.url)
    run = a_run(tracker)
    again = tracker.resume(run.run_id)
    again.log_metrics({"late": 1.0})
    again.log_text("report.html", "another page")
    again.finish("KILLED", "interrupted")
    require_equal(store, server.url, run.run_id)
    assert catalog.find(store, run.run_id).tags["end_reason"] == "interrupted"
    tracker.resume(run.run_id)
    assert catalog.find(store, run.run_id).tags["end_reason"] == "", "why it ended is true no more"
    Mirror(store, server.url).push()
    tracker.remove(run.run_id)
    Mirror(store, server.url).push()
    assert copies(server.url, run.run_id) == []


def test_a_server_that_is_away_stops_nothing_and_gets_the_runs_later(store, server, capsys):
    away = f"http://127.0.0.1:{free_port()}"
    tracker, said = said_by(store, away)
    runs = [a_run(tracker, f"away {n}") for n in range(2)]
    assert len(said) == 1, "said once, not for each run"
    assert "does not answer" in said[0] and "record is whole" in said[0] and "orchestrator sync" in said[0]
    places = [f"paths.tracking={store}", "box=cpu"]
    assert cli.main(["sync", f"paths.tracking_server={away}", *places]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["sync", f"paths.tracking_server={server.url}", *places]) == 0
    assert "2 runs uploaded" in capsys.readouterr().out
    for run in runs:
        require_equal(store, server.url, run.run_id)
    assert cli.main(["sync", f"paths.tracking_server={server.url}", *places]) == 0
    assert "0 runs uploaded" in capsys.readouterr().out


def test_whichever_answer_is_lost_the_run_is_there_once_and_whole(store, server):
    tracker, _ = said_by(store, f"http://127.0.0.1:{free_port()}")
    tracker.start("before", {"p": "1"}, {"variant": "small"}).finish("FINISHED")
    Mirror(store, server.url).push()  # the experiment is there
    run, way = tracker.start("small", {"p": "1"}, {"variant": "small"}), Lossy(server.port)
    run.log_metrics(CURVE)
    run.log_text("report.html", "<p>naïve</p>")
    run.finish("FINISHED")
    try:
        losses = 0
        while True:
            way.requests = 0
            lost = losses + 2  # the first is the question for its health
            way.loses = lambda number, lost=lost: number == lost
            try:
                Mirror(store, way.url).push()
            except ServerError as error:
                assert "broke off" in str(error) or "refuses" in str(error)
                losses += 1
                continue
            break
        assert losses > 8, "each of its requests was lost once"
    finally:
        way.stop()
    require_equal(store, server.url, run.run_id)


@pytest.mark.parametrize("which", ["sqlite alone", "with the server"])
def test_ten_boots_that_log_at_once_lose_no_row(store, server, which):
    url = server.url if which == "with the server" else ""
    command = [sys.executable, "-c", textwrap.dedent(TEN_AT_ONCE), str(store), url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    here = mlflow_store.connect(store)
    found = here.search_runs([here.get_experiment_by_name("ten").experiment_id])
    assert sorted(run.info.run_name for run in found) == sorted(f"boot {n}" for n in range(10))
    for run in found:
        number = int(run.data.params["n"])
        for bench in ("decode", "prefill"):
            for n in range(20):
                for at in (0, 512):
                    assert run.data.metrics[f"{bench}.m{n}.ctx{at}"] == number + n + at / 1e6
        assert len(run.data.metrics) == 2 * 20 * 3, "and their curves"
        assert run.info.status == "FINISHED"
    ids = [run.info.run_id for run in found]
    rows = Counter((run_id, *row) for run_id in ids for row in catalog.metric_rows(store, run_id))
    assert len(rows) == 10 * 2 * 20 * 4 and set(rows.values()) == {1}
    if url:
        assert rows_of_copies(server, ids) == rows
        assert all(len(copies(url, run_id)) == 1 for run_id in ids)


def rows_of_copies(server: Server, ids: Sequence[str]) -> Counter:
    """Every metric row that PostgreSQL has of the copies of these runs: (local run's id, name, value, ms, step)."""
    import psycopg

    asked = (
        "SELECT tags.value, metrics.key, metrics.value, timestamp, step FROM metrics JOIN tags USING (run_uuid) "
        "WHERE tags.key = %s AND tags.value = ANY(%s)"
    )
    with psycopg.connect(server.backend) as database:
        return Counter(database.execute(asked, (ORIGIN, list(ids))).fetchall())


@pytest.mark.parametrize("request_number", [5, 9])
def test_a_server_that_is_killed_while_it_is_sent_to_loses_and_doubles_nothing(store, server, request_number):
    tracker, _ = said_by(store, f"http://127.0.0.1:{free_port()}")
    runs = [a_run(tracker, f"restart {n}") for n in range(2)]
    way = Lossy(server.port)

    def kill(number: int) -> bool:
        if number == request_number:
            server.kill()
        return number == request_number

    way.loses = kill
    try:
        with pytest.raises(ServerError):
            Mirror(store, way.url).push()
        with pytest.raises(ServerError, match="does not answer"):
            Mirror(store, server.url).push()
        server.start()
        Mirror(store, way.url).push()
    finally:
        way.stop()
    for run in runs:
        require_equal(store, server.url, run.run_id)


def test_an_upload_that_is_killed_goes_on_and_doubles_nothing(store, server):
    tracker, _ = said_by(store, f"http://127.0.0.1:{free_port()}")
    runs = [a_run(tracker, f"killed {n}") for n in range(3)]
    chance, killed = random.Random(7), 0
    for _ in range(8):
        if not (pid := os.fork()):
            try:
                Mirror(store, server.url).push()
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.02, 0.5))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert killed
    Mirror(store, server.url).push()
    for run in runs:
        require_equal(store, server.url, run.run_id)


def test_a_damaged_note_of_what_was_sent_doubles_nothing(store, server):
    tracker, _ = said_by(store, server.url)
    run = a_run(tracker)
    (note,) = (store / "mirror").glob("*/*.json")
    whole = json.loads(note.read_text())
    for content in ("", "{", json.dumps(whole | {"state": ""}), json.dumps({"more": 1})):
        note.write_text(content)
        Mirror(store, server.url).push()
        require_equal(store, server.url, run.run_id)


@pytest.mark.parametrize("address", ["mlruns", "sqlite:///x.db", "http://", "ftp://host"])
def test_an_address_that_is_no_servers_is_one_line(store, address):
    with pytest.raises(UsageError, match=r"paths\.tracking_server") as caught:
        Tracker(store, "cpu", address)
    assert "\n" not in str(caught.value)


def test_a_password_in_the_address_is_refused_and_not_repeated(store):
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        Mirror(store, "http://me:secret@127.0.0.1:9/")
    assert "secret" not in str(caught.value)
