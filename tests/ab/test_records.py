"""What is recorded, read without MLflow: the same as MLflow's own client reads; listed, compared, recomputed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.abtest import ab_run, hours
from orchestrator.errors import UsageError
from orchestrator.recorded import mlflow_store
from orchestrator.recorded.tracking import Tracker
from orchestrator.records import Measurement
from tests.ab.test_process import catalog, parent, recorded, start

ROOT = Path(__file__).parents[2]


def measurement(value: float, **changes) -> Measurement:
    values = {
        "bench": "prefill",
        "status": "ok",
        "reason": "",
        "metrics": {"prefill.ttft_ms.len256": value},
        "samples": (),
        "config": {"runs": 3},
        "corpora": {"prose": "00ff"},
        "notes": (),
        "started_at_utc": "",
        "duration_s": 1.0,
    }
    return Measurement(**values | changes)


@pytest.fixture
def store(tmp_path, empty_store):
    """Adds a finished run to a store of its own; returns the run's id."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())

    def add(value: float = 20.0, found: Measurement | None = None, **tags) -> str:
        tags = {"box": "cpu", "stack": "s", "source": "measured", "verdict": "OK", **tags}
        run = Tracker(tmp_path, tags["box"]).start("int4", {"a": "1"}, tags)
        run.log_measurement(found or measurement(value))
        run.finish("FINISHED", "because")
        return run.run_id

    add.directory = tmp_path
    return add


def run(store, *arguments: str) -> int:
    return cli.main([*arguments, f"paths.tracking={store.directory}", "box=cpu"])


def test_entries_are_what_mlflow_reads(store):
    ids = [store(20.0), store(21.0)]
    Tracker(store.directory, "cpu").remove(store(22.0))
    client = mlflow_store.connect(store.directory)
    found = {entry.run_id: entry for entry in catalog.entries(store.directory)}
    assert found.keys() == set(ids), "a removed run is not there"
    for run_id, entry in found.items():
        theirs = client.get_run(run_id)
        assert entry.tags == theirs.data.tags and entry.metrics == theirs.data.metrics
        assert (entry.status, entry.name) == (theirs.info.status, theirs.info.run_name)
        assert entry.started_s == theirs.info.start_time / 1000 and entry.ended_s == theirs.info.end_time / 1000
        assert entry.artifacts.as_uri() == theirs.info.artifact_uri
        assert entry.experiment == client.get_experiment(theirs.info.experiment_id).name


def test_a_run_is_found_by_the_beginning_of_its_id(store):
    run_id = store()
    assert catalog.find(store.directory, run_id[:10]).run_id == run_id
    with pytest.raises(UsageError, match="has no such run"):
        catalog.find(store.directory, "ffffffffffff")


def test_a_run_of_its_own_says_how_long_a_boot_takes_by_its_parts(store):
    run_id = store()
    Tracker(store.directory, "cpu").log(run_id).log_metrics({"boot.ready_s": 30.0})
    assert hours.boot_s(catalog.find(store.directory, run_id)) == 31.0
    assert hours.boot_s(catalog.find(store.directory, store())) is None, "its boot is not recorded"


def test_list_shows_runs_and_abs_with_their_verdicts_and_boots_on_demand(new_world, capsys):
    world = new_world(b_better=0.05)
    start(world)
    capsys.readouterr()
    where = f"paths.tracking={world.root / 'tracking'}"
    assert cli.main(["list", where]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if parent(world).run_id in line]
    assert "PASS" in line and "boots" in line and "int4 | int5" in line
    assert cli.main(["list", "--all", where]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 1 + 4 * recorded(world).look
    assert cli.main(["list", "--json", where]) == 0
    assert {entry["run_id"] for entry in json.loads(capsys.readouterr().out)} >= {parent(world).run_id}


def test_list_leaves_published_results_to_all_and_says_how_many_there_are(store, capsys):
    measured, published = store(), store(source="published")
    assert run(store, "list") == 0
    out = capsys.readouterr().out
    assert measured in out and published not in out and "1 published results" in out
    assert run(store, "list", "--all") == 0 and published in capsys.readouterr().out


def test_list_starts_fast_and_without_mlflow(store):
    store()
    command = [sys.executable, "-X", "importtime", "-m", "orchestrator", "list", f"paths.tracking={store.directory}"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"mlflow", "numpy", "scipy", "matplotlib"}
    assert time.monotonic() - began < 10  # a loose bound: the machine may be busy


def test_verdict_recomputes_shows_and_leaves_with_the_same_status(new_world, capsys):
    world = new_world(b_better=-0.05)
    assert start(world) == 1
    capsys.readouterr()
    where = f"paths.tracking={world.root / 'tracking'}"
    assert cli.main(["verdict", parent(world).run_id[:12], where]) == 1
    said = capsys.readouterr()
    assert "FAIL" in said.out and "has not ended" not in said.err
    client = mlflow_store.connect(world.root / "tracking")
    client.update_run(parent(world).run_id, status="RUNNING")
    assert cli.main(["verdict", parent(world).run_id, where]) == 1
    assert "the A/B has not ended (RUNNING)" in capsys.readouterr().err
    client.update_run(parent(world).run_id, status="FINISHED")
    assert cli.main(["verdict", "--json", parent(world).run_id, where]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "FAIL"
    boot = catalog.entries(world.root / "tracking", parent=parent(world).run_id)[0]
    assert cli.main(["verdict", boot.run_id, where]) == 2
    assert "is no A/B" in capsys.readouterr().err


def test_resume_takes_what_the_ab_was_begun_with_and_nothing_else(new_world, capsys):
    world = new_world(b_better=0.05)
    ab_run.start(world.test(port=world.port), ["box=cpu", "gate.alpha=0.05"], quiet=True)
    words = ["ab", "--resume", parent(world).run_id, f"paths.tracking={world.root / 'tracking'}", "box=cpu"]
    assert cli.main([*words, "gate.alpha=0.05"]) == 0
    capsys.readouterr()
    assert cli.main([*words, "gate.alpha=0.1"]) == 2
    assert "was not begun with gate.alpha=0.1; leave it out" in capsys.readouterr().err


def test_a_reader_that_left_does_not_change_the_verdict(new_world):
    world = new_world(b_better=0.0005, sd=0.004)
    assert start(world) == 4
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "orchestrator", "verdict", parent(world).run_id]
    done = subprocess.run(
        [*command, f"paths.tracking={world.root / 'tracking'}"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (4, "")


def test_compare_puts_runs_side_by_side(store, capsys):
    a, b = store(20.0), store(21.0)
    assert run(store, "compare", a, b) == 0
    out = capsys.readouterr().out
    assert "prefill.ttft_ms.len256" in out and "+5.00%" in out
    assert (
        "- no interval: single boots have one only from the noise of their box" in out and "other programs" not in out
    )


def test_compare_says_which_run_was_disturbed(store, capsys):
    a, b = store(20.0), store(21.0)
    mlflow_store.connect(store.directory).log_metric(b, "boot.other_cpu_share", 0.53)
    assert run(store, "compare", a, b) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "other programs used" in line]
    assert len(said) == 1 and said[0].startswith(f"- {b[:8]} (int4): other programs used 53% of the processors")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"stack": "another"}, "stack: s and another"),
        ({"box": "r9700x2"}, "box: cpu and r9700x2"),
        ({"source": "published"}, "source: measured and published"),
        ({"verdict": "INVALID"}, "verdict: "),
        ({"found": measurement(1.0, config={"runs": 5})}, "prefill.config.runs: 3 and 5"),
        ({"found": measurement(1.0, corpora={"prose": "11"})}, "prefill.corpora.prose: 00ff and 11"),
    ],
)
def test_compare_refuses_what_cannot_be_paired_and_says_why(store, capsys, other, said):
    assert run(store, "compare", store(), store(**other)) == 2
    assert said in capsys.readouterr().err


def test_compare_of_a_run_with_itself_is_refused(store, capsys):
    a, b = store(), store()
    assert run(store, "compare", a, b, a[:12]) == 2
    assert f"run {a} is there twice, and a run differs in nothing from itself" in capsys.readouterr().err


def test_compare_and_verdict_want_run_ids(store, capsys):
    assert run(store, "compare", store()) == 2 and run(store, "verdict") == 2
    assert "compare takes two runs or more" in capsys.readouterr().err
