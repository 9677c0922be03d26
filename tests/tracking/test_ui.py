"""The verb `ui`: MLflow's UI on the right store, with the links that one wants, and nothing left when it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from orchestrator import cli, ui
from orchestrator.recorded import catalog
from orchestrator.recorded.tracking import Tracker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """An A/B with a report, a boot, a later single run and a published result."""
    directory = tmp_path_factory.mktemp("a store")
    tracker = Tracker(directory, "cpu")
    above = tracker.start("int4 | int5", {}, {"kind": "ab"})
    boot = tracker.start("1.1 a int4", {}, {"kind": "boot"}, above.run_id)
    boot.log_metrics({f"decode.ms_per_step.ctx{context}": 9.0 for context in (512, 1024)})
    boot.finish("FINISHED")
    above.log_text("report.html", "<p>a page</p>")
    above.set_tag("verdict", "FAIL")
    above.finish("FINISHED")
    tracker.start("int4", {}, {}).finish("FINISHED")
    tracker.start("published x", {}, {"source": "published"}).finish("FINISHED")
    return directory


def last_ab(store: Path) -> catalog.Entry:
    return next(entry for entry in catalog.entries(store) if entry.is_ab)


def test_the_links_are_to_the_last_ab_and_its_report(store):
    entry = last_ab(store)
    lines = ui.links(store, "http://here")
    run = f"http://here/#/experiments/{entry.experiment_id}/runs/{entry.run_id}"
    models = "?workflowType=machine_learning"  # of MLflow's two sets of pages the one with runs
    assert lines[1].split()[2] == f"http://here/#/experiments/{entry.experiment_id}/runs{models}"
    assert lines[2].split()[2] == run + models and "(FAIL: int4 | int5)" in lines[2]
    assert lines[3].split()[2] == f"{run}/artifacts/report.html{models}"
    assert lines[4].strip() == (entry.artifacts / "report.html").as_uri()
    assert entry.run_id in lines[5] and "&compareRunsMode=CHART&workflowType=" in lines[5]


def test_an_ab_whose_suite_has_one_place_has_no_link_to_curves(tmp_path):
    tracker = Tracker(tmp_path, "cpu")
    above = tracker.start("int4 | int5", {}, {"kind": "ab"})
    boot = tracker.start("1.1 a int4", {}, {"kind": "boot"}, above.run_id)
    boot.log_metrics({"decode.ms_per_step.ctx512": 9.0})
    boot.finish("FINISHED")
    above.log_text("report.html", "<p>a page</p>")
    above.finish("FINISHED")
    assert not any("its curves" in line for line in ui.links(tmp_path, "http://here"))


def test_without_an_ab_the_link_is_to_the_last_run(tmp_path):
    tracker = Tracker(tmp_path, "cpu")
    tracker.start("older", {}, {}).finish("FINISHED")
    time.sleep(0.01)
    tracker.start("newer", {}, {}).finish("FINISHED")
    tracker.start("published x", {}, {"source": "published"}).finish("FINISHED")
    lines = ui.links(tmp_path, "http://here")
    assert lines[2].startswith("last run") and "newer" in lines[2] and len(lines) == 4


def test_where_nothing_is_recorded_it_says_so_in_one_line(tmp_path, capsys):
    assert cli.main(["ui", f"paths.tracking={tmp_path}", "box=cpu"]) == 2
    err = capsys.readouterr().err
    assert "nothing is recorded" in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "and makes nothing"


def test_a_taken_port_is_passed_over():
    with socket.socket() as holder:
        with contextlib.suppress(OSError):  # somebody else has it, which is as good
            holder.bind((ui.HOST, ui.FIRST_PORT))
        assert ui.free_port() > ui.FIRST_PORT


def test_it_serves_this_store_on_loopback_and_ends_with_all_its_processes(store):
    command = [sys.executable, "-m", "orchestrator", "ui", f"paths.tracking={store}", "box=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    too_long = threading.Timer(310, process.kill)
    too_long.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("stop it"):
            break
    too_long.cancel()
    url = lines[0].split()[-1]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    with urllib.request.urlopen(
        f"{url}/ajax-api/2.0/mlflow/runs/get?run_id={last_ab(store).run_id}", timeout=60
    ) as answer:
        assert json.load(answer)["run"]["info"]["run_name"] == "int4 | int5"
    children = psutil.Process(process.pid).children(recursive=True)
    addresses = {
        c.laddr.ip for child in children for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    assert children and addresses == {"127.0.0.1"}
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0 and process.stderr.read() == "starting MLflow's UI\n"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_a_ui_that_dies_is_told(store, monkeypatch):
    monkeypatch.setattr(ui, "command", lambda directory, port: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(ui.NoUI, match="exit status 7"):
        ui.serve(store)
