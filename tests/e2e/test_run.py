"""The main job on a real server: SmolLM2-135M, quantized here, served by vLLM's CPU build with the plugin."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.engines.process import processes_of
from orchestrator.labels import BENCHES
from orchestrator.recorded import catalog
from tests.e2e.conftest import ROOT, end
from tests.e2e.peer_lm_eval import disagreements

pytestmark = pytest.mark.vllm
VARIANT = "+variant=int5_i8_pg_zpe"
UNTIMED = ("~suite.benches.gsm8k", "~suite.benches.betterbench")  # betterbench is INVALID where the machine is busy


def test_the_first_run_prepares_measures_and_says_where_its_record_is(first_run, machine):
    assert first_run.returncode == 0, first_run.stdout + first_run.stderr
    assert "quantize smollm2-135m-instruct to int5: done" in first_run.stderr
    assert "no KL reference" in first_run.stderr and "warmup boot of int5_i8_pg_zpe: done" in first_run.stderr
    (run,) = machine.runs()
    assert run.info.run_id in first_run.stdout and "orchestrator ui" in first_run.stdout
    (report,) = [line.removeprefix("report: ") for line in first_run.stdout.splitlines() if line.startswith("report: ")]
    assert Path(report).read_text().startswith("<!")
    assert run.data.tags["kl_reference"] == "made"
    assert "Time per step" in first_run.stdout and "Mean KL" in first_run.stdout


def test_the_record_holds_what_is_needed_to_judge_and_recompute_it(first_run, machine):
    (run,) = machine.runs()
    assert (run.info.status, run.data.tags["verdict"]) == ("FINISHED", "OK")
    assert {"git", "plan", "stack", "box", "plugin", "checkpoint"} <= run.data.tags.keys()
    assert run.data.params["variant.weights.bits"] == "5"
    artifacts = machine.tracking / "artifacts" / run.info.run_id / "artifacts"
    measurements = catalog.measurements(artifacts)
    assert measurements.keys() == set(BENCHES)
    for name, measurement in measurements.items():
        assert measurement.status == "ok" and measurement.samples, name
        assert measurement.metrics.items() <= run.data.metrics.items(), name
    assert json.loads((artifacts / "plan.json").read_text())["fingerprint"] == run.data.tags["plan"]
    assert "<html" in (artifacts / "report.html").read_text()
    boots = [json.loads(path.read_text()) for path in artifacts.glob("boots/*/boot.json")]
    assert sorted(boot["purpose"] for boot in boots) == ["measured", "reference", "warmup", "warmup"]


def test_the_measured_boot_is_warm_compiled_nothing_and_every_layer_is_attested(first_run, machine):
    (run,) = machine.runs()
    (path,) = (machine.tracking / "artifacts" / run.info.run_id / "artifacts").glob("boots/*-measured/boot.json")
    boot = json.loads(path.read_text())
    assert (boot["cache_state"], boot["compiled_files"], boot["status"]) == ("warm", 0, "ok")
    assert boot["kv_tokens"] > 10_000
    assert {"api_server", "engine_core"} <= {reading["role"] for reading in boot["processes"]}
    (loaded,) = [a for a in boot["attestations"] if a["layers"]]
    assert loaded["counts"]["ours"] == len(loaded["layers"]) == 120  # 30 decoder layers of four merged projections
    assert {layer["bits"] for layer in loaded["layers"]} == {5}
    assert {layer["kind"] for layer in loaded["unquantized"]} == {"embedding", "lm_head"}


def test_lm_eval_extracts_and_scores_every_completion_as_we_do(first_run, machine):
    (run,) = machine.runs()
    artifacts = machine.tracking / "artifacts" / run.info.run_id / "artifacts"
    samples = catalog.measurements(artifacts)["gsm8k"].samples
    assert len(samples) == 16
    assert disagreements([s["completion"] for s in samples], [s["answer"] for s in samples]) == []


def test_a_second_run_prepares_nothing_and_boots_warm_at_once(first_run, machine):
    before = machine.journal()
    second = machine.run(VARIANT, "suite=smoke", *UNTIMED)
    assert second.returncode == 0, second.stdout + second.stderr
    assert not any(word in second.stderr for word in ("convert", "quantize", "warmup", "reference boot"))
    assert len(machine.journal() - before) == 1
    assert machine.runs()[0].data.tags["kl_reference"] == "reused"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_orchestrator_killed_mid_run_leaves_no_server_and_a_killed_record(first_run, machine, number):
    before = machine.journal()
    command = machine.command(VARIANT, "suite=smoke")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        while "decode_ctx on int5_i8_pg_zpe: started" not in (line := process.stderr.readline()):
            assert line, "the run ended before it measured anything"
        (nonce,) = machine.journal() - before
        assert processes_of(nonce)
        time.sleep(1)
        said = end(process, number)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted" in said
        assert processes_of(nonce) == []
    else:
        third = machine.run(VARIANT, "suite=smoke", *UNTIMED)
        assert third.returncode == 0, third.stdout + third.stderr
        assert f"boot {nonce}" in third.stderr and processes_of(nonce) == []
    killed = [run for run in machine.runs() if run.info.status == "KILLED"]
    assert len(killed) == (1 if number == signal.SIGINT else 2)
    assert not [run for run in machine.runs() if run.info.status == "RUNNING"]
