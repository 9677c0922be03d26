"""Whole runs on real processes: whatever happens to server or bench, exit status, tag, record and text agree."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orchestrator import cli, compile_cache, config, measured_boot, run
from orchestrator.engines.process import processes_of
from orchestrator.errors import BootError, InvalidMeasurement, UsageError
from orchestrator.inputs import Inputs
from orchestrator.plan import ServePlan
from orchestrator.plugin_build import PluginBuild
from orchestrator.recorded import mlflow_store
from orchestrator.schema import Experiment, Suite
from orchestrator.stack import Stack
from tests.boot.test_boot import free_port

SERVER = Path(__file__).with_name("measured_server.py")
SUITE = Suite("tiny", 1, {"prefill": {"lengths_tokens": [32], "runs": 1, "warmup_runs": 0}})
NUMBER = "prefill.ttft_ms.len32"


@dataclass(frozen=True)
class StubInputs(Inputs):
    """The inputs of a real run, with the measured server in place of vLLM."""

    fault: str = ""

    def plan(self) -> ServePlan:
        plan = super().plan()
        tail = plan.argv[plan.argv.index("--model") :]
        return replace(
            plan,
            argv=(sys.executable, str(SERVER), *tail, "--fault", self.fault, "--plugin-sha256", plan.plugin.sha256),
        )


@dataclass
class Site:
    """One machine. `faults` maps a port of the box to what its server does wrong."""

    root: Path
    faults: dict[int, str]

    def experiment(self, fault: str = "", suite: Suite = SUITE) -> Experiment:
        port = free_port()
        self.faults[port] = fault
        places = [f"paths.{name}={self.root / name}" for name in ("cache", "state", "tracking")]
        overrides = ["+variant=int5_i8_pg_zpe", "box=cpu", f"box.port={port}", "box.disk_free_gib=0", *places]
        found = config.load(overrides)
        return replace(found, suite=suite, engine=replace(found.engine, ready_timeout_s=20, stop_grace_s=2))

    def gather(self, experiment: Experiment) -> StubInputs:
        build = PluginBuild("0.1.0", "a" * 64, "b" * 64, str(self.root / "plugin"))
        cache, state = self.root / "cache", self.root / "state"
        stack = Stack({"engine": "process"}, "stack0000")
        return StubInputs(experiment, cache, state, build, stack, "c" * 64, fault=self.faults[experiment.box.port])

    def warm(self, experiment: Experiment) -> Path:
        plan = self.gather(experiment).plan()
        cache_dir = Path(plan.cache_dir)
        compile_cache.mark(cache_dir, "warm", plan.plugin.sha256)
        return cache_dir

    def records(self) -> list:
        """The MLflow runs, oldest first."""
        client = mlflow_store.connect(self.root / "tracking")
        experiments = [found.experiment_id for found in client.search_experiments()]
        return client.search_runs(experiments, order_by=["attributes.start_time ASC"])

    def artifact(self, path: str) -> Path:
        (record,) = self.records()
        return self.root / "tracking" / "artifacts" / record.info.run_id / "artifacts" / path

    def nothing_runs(self) -> bool:
        return not any(processes_of(path.name) for path in (self.root / "state" / "boots").glob("*"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path, {})
    monkeypatch.setattr(measured_boot, "gather", made.gather)
    monkeypatch.setattr(measured_boot.prepare, "ensure", lambda *_: [])
    monkeypatch.setattr(measured_boot.plugin_build, "materialize", lambda *_: None)
    return made


def measure(site: Site, fault: str = "", warm: bool = True) -> int:
    experiment = site.experiment(fault)
    if warm:
        site.warm(experiment)
    return run.run(experiment, ["box=cpu"], quiet=True)


def said(site: Site) -> tuple[str, str]:
    (record,) = site.records()
    return record.info.status, record.data.tags["verdict"]


def test_a_good_run_is_0_with_its_numbers_everywhere(site, capsys):
    experiment = site.experiment()
    assert run.run(experiment, ["box=cpu"], quiet=True) == 0
    assert said(site) == ("FINISHED", "OK") and site.nothing_runs()
    (record,) = site.records()
    assert record.data.metrics[NUMBER] > 0 and record.data.metrics["boot.kv_tokens"] == 46592
    assert 0 <= record.data.metrics["boot.other_cpu_share"] <= 1
    stored = json.loads(site.artifact("measurements/prefill.json").read_text())
    assert stored["metrics"][NUMBER] == record.data.metrics[NUMBER]
    assert "TTFT, len 32" in capsys.readouterr().out
    said_before = json.loads(site.artifact("expected_s.json").read_text())
    assert set(said_before["expected_s"]) == {"prefill"} and said_before["rates"]["prefill_tok_per_s"] > 0
    boots = [json.loads(path.read_text())["purpose"] for path in site.artifact("boots").glob("*/boot.json")]
    assert sorted(boots) == ["measured", "warmup"], "the cache was cold"
    assert compile_cache.state(Path(site.gather(experiment).plan().cache_dir)) == "warm"


def test_a_suite_says_how_long_it_will_take_before_it_starts(site, capsys):
    experiment = site.experiment()
    site.warm(experiment)
    assert run.run(experiment, ["box=cpu"]) == 0
    lines = capsys.readouterr().err.splitlines()
    (said_at,) = (
        n for n, line in enumerate(lines) if line.startswith("suite tiny: about 0.0 s of measuring (prefill ")
    )
    (began_at,) = (n for n, line in enumerate(lines) if line.startswith("prefill on int5_i8_pg_zpe: started"))
    assert said_at < began_at


def test_a_bench_without_a_result_is_3(site, capsys):
    assert measure(site, "fails-requests") == 3
    assert said(site) == ("FINISHED", "INVALID")
    (record,) = site.records()
    assert NUMBER not in record.data.metrics and record.data.tags["invalid.prefill"]
    assert "INVALID" in capsys.readouterr().out
    assert ">INVALID<" in site.artifact("report.html").read_text()


def test_a_boot_that_is_found_invalid_after_its_benches_has_no_numbers(site, capsys):
    assert measure(site, "compiles") == 3
    assert said(site) == ("FINISHED", "INVALID")
    (record,) = site.records()
    assert "a warm boot compiled 1 files" in record.data.tags["end_reason"]
    assert not record.data.metrics
    assert json.loads(site.artifact("measurements/prefill.json").read_text())["metrics"] == {}
    assert site.artifact("samples/prefill.jsonl").read_text().count("\n") == 2, "what was measured is kept"
    out = capsys.readouterr().out
    assert "TTFT" not in out and "a warm boot compiled" in out
    assert NUMBER not in site.artifact("report.html").read_text()


def test_a_knob_that_did_not_arrive_is_3_before_anything_is_measured(site):
    with pytest.raises(InvalidMeasurement, match="RADIANCE_PQ_ZPE") as caught:
        measure(site, "drops-a-knob")
    assert caught.value.exit_code == 3 and said(site) == ("FAILED", "INVALID") and site.nothing_runs()


def test_a_boot_that_fails_is_1(site):
    with pytest.raises(BootError) as caught:
        measure(site, "dies")
    assert caught.value.exit_code == 1 and said(site) == ("FAILED", "FAILED") and site.nothing_runs()


def test_a_warm_up_whose_server_died_leaves_the_cache_cold(site):
    experiment = site.experiment("dies-when-used")
    with pytest.raises(InvalidMeasurement):
        run.run(experiment, ["box=cpu"], quiet=True)
    assert compile_cache.state(Path(site.gather(experiment).plan().cache_dir)) == "cold"


def test_a_warm_up_that_is_invalid_in_the_end_leaves_the_cache_cold(site, monkeypatch):
    experiment = site.experiment()

    async def warm(target, *_):
        for path in (site.root / "state" / "boots").glob("*"):
            for process in processes_of(path.name):
                process.kill()
        await asyncio.sleep(0.3)

    monkeypatch.setattr(measured_boot, "warm", warm)
    with pytest.raises(InvalidMeasurement, match="killed by SIGKILL"):
        run.run(experiment, ["box=cpu"], quiet=True)
    assert compile_cache.state(Path(site.gather(experiment).plan().cache_dir)) == "cold"


def test_a_suite_without_benches_is_refused_before_anything_starts(site):
    experiment = site.experiment(suite=Suite("empty", 1, {}))
    with pytest.raises(UsageError, match="no bench left, so nothing would be measured"):
        run.run(experiment, ["box=cpu"], quiet=True)
    assert not (site.root / "tracking").exists()


def test_no_measurement_is_no_pass_in_status_tag_and_report_alike(site, monkeypatch):
    measured = measured_boot.measure
    monkeypatch.setattr(measured_boot, "measure", lambda session: (measured(session), session.measurements.clear()))
    assert measure(site) == 3
    assert said(site) == ("FINISHED", "INVALID")
    assert "nothing was measured" in site.artifact("report.html").read_text()


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_of_the_output_that_left_does_not_change_the_run(site, tmp_path, both):
    """As in `run | true` and `run 2>&1 | true`; in a process of its own, whose end flushes stdout once more."""
    port = free_port()
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from orchestrator import cli, measured_boot, run\nfrom tests.run import test_run as t\n"
        f"site = t.Site(Path({str(tmp_path)!r}), {{}})\nt.free_port = lambda: {port}\n"
        "measured_boot.gather = site.gather\nmeasured_boot.prepare.ensure = lambda *_: []\n"
        "measured_boot.plugin_build.materialize = lambda *_: None\n"
        "experiment = site.experiment()\nsite.warm(experiment)\n"
        "cli.VERBS['run'] = lambda options: run.run(experiment, ['box=cpu'])\n"
        "sys.exit(cli.main(['run']))\n"
    )
    read, write = os.pipe()
    os.close(read)
    errors = write if both else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=errors, text=True, check=False)
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert said(site) == ("FINISHED", "OK")


def jobs(site: Site, *faults: str) -> list[tuple[Experiment, list[str]]]:
    found = [(site.experiment(fault), ["box=cpu", f"job={number}"]) for number, fault in enumerate(faults)]
    for experiment, _ in found:
        site.warm(experiment)
    return found


def test_a_job_that_fails_does_not_drop_the_rest_and_the_worst_status_is_returned(site, capsys):
    assert run.run_all(jobs(site, "dies", "fails-requests", ""), quiet=True) == 3
    verdicts = [record.data.tags["verdict"] for record in site.records()]
    assert verdicts == ["FAILED", "INVALID", "OK"]
    errors = capsys.readouterr().err
    assert "job box=cpu job=0: the server of variant" in errors and "job box=cpu job=1: exit status 3" in errors


def test_a_mistake_in_the_last_job_stops_the_first(site):
    (first, _) = jobs(site, "", "")
    last = (site.experiment(suite=Suite("empty", 1, {})), ["job=last"])
    with pytest.raises(UsageError, match="no bench left"):
        run.run_all([first, last], quiet=True)
    assert not (site.root / "tracking").exists() and not (site.root / "state" / "boots").exists()


def test_the_command_line_checks_and_runs_every_job(site, monkeypatch):
    seen: list[Callable] = []
    monkeypatch.setattr(run, "run_all", lambda found, quiet: seen.extend(found) or 1)
    assert cli.VERBS["run"](cli.parse(["run", "-m", "+variant=int5,bf16", "box=cpu"])) == 1
    assert [experiment.variant.name for experiment, _ in seen] == ["int5", "bf16"]
