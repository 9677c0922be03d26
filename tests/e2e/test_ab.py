"""Real A/Bs on a real server: int4 against int5, and an A/A that is killed and gone on with. About 50 minutes.

They run where PARO_NIGHTLY is set: `PARO_NIGHTLY=1 python -m pytest tests/e2e/test_ab.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import replace

import pytest

from orchestrator.abtest import attempts
from orchestrator.engines.process import processes_of
from orchestrator.judging.gate import Criterion
from orchestrator.judging.verdict import judge
from orchestrator.recorded import catalog
from tests.e2e.conftest import ROOT, Machine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("PARO_NIGHTLY" not in os.environ, reason="takes 50 minutes; set PARO_NIGHTLY=1"),
]
TIMEOUT_S = 3600
TWO_BLOCKS = "gate.looks=[2]"
EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}
SPEED_ONLY = ("suite=smoke", "~suite.benches.kld", "~suite.benches.gsm8k", "~suite.benches.betterbench")


def command(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = machine.command(*arguments)
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, check=False)


def only(machine: Machine, kind: str) -> catalog.Entry:
    (found,) = [entry for entry in catalog.entries(machine.tracking) if entry.tags.get("kind") == kind]
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    """One of its own: the tests of single runs look at what is there when they begin."""
    return Machine(tmp_path_factory.mktemp("ab"))


@pytest.fixture(scope="module")
def int4_against_int5(machine: Machine) -> subprocess.CompletedProcess[str]:
    documents = "suite.benches.kld.documents=12"  # the fewest that give an interval
    arms = ("+variant@a=int4", "+variant@b=int5", "gate=format")
    return command(machine, "ab", *arms, TWO_BLOCKS, "suite=smoke", documents)


def test_int4_against_int5_ends_in_a_verdict_with_a_line_for_each_criterion(int4_against_int5, machine):
    done = int4_against_int5
    whole = only(machine, "ab")
    assert whole.status == "FINISHED" and done.returncode == EXIT[whole.tags["verdict"]], done.stdout + done.stderr
    assert done.stdout.index("at most 8 boots") < done.stdout.index(whole.tags["verdict"])
    verdict = json.loads((whole.artifacts / attempts.VERDICT).read_text())
    metrics = {criterion["metric"] for criterion in verdict["criteria"]}
    assert {"kl.mean_nats.prose", "decode.ms_per_step.ctx512", "prefill.prompt_tok_per_s.len512"} <= metrics
    assert all(criterion["sentence"] in done.stdout for criterion in verdict["criteria"])


def test_five_bits_are_closer_to_the_reference_than_four(int4_against_int5, machine):
    verdict = json.loads((only(machine, "ab").artifacts / attempts.VERDICT).read_text())
    (kl,) = [criterion for criterion in verdict["criteria"] if criterion["metric"] == "kl.mean_nats.prose"]
    assert kl["effect"] < 0 and kl["state"] == "PASS"


def test_its_eight_boots_are_warm_nested_runs_of_both_arms(int4_against_int5, machine):
    boots = catalog.entries(machine.tracking, parent=only(machine, "ab").run_id)
    assert sorted(entry.tags["ab.arm"] for entry in boots) == ["a"] * 4 + ["b"] * 4
    for entry in boots:
        boot = catalog.measured_boot(entry.artifacts)
        assert (boot.status, boot.cache_state, boot.compiled_files) == ("ok", "warm", 0)
        bits = {layer["bits"] for attestation in boot.attestations for layer in attestation["layers"]}
        assert bits == {4 if entry.tags["ab.arm"] == "a" else 5}
        assert processes_of(boot.nonce) == []


def test_the_verdict_is_the_same_from_the_records_alone(int4_against_int5, machine):
    whole, before = only(machine, "ab"), machine.journal()
    again = command(machine, "verdict", whole.run_id)
    assert again.returncode == int4_against_int5.returncode and whole.tags["verdict"] in again.stdout, again.stderr
    assert machine.journal() == before, "nothing was booted"


@pytest.fixture(scope="module")
def aa_killed_once(machine: Machine, int4_against_int5) -> subprocess.CompletedProcess[str]:
    """An A/A whose orchestrator is killed during its third boot, and gone on with."""
    arms = ("+variant@a=int4", "+variant@b=int4", "kind=floor")
    words = machine.command("ab", *arms, TWO_BLOCKS, *SPEED_ONLY)
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        for awaited in ("boot 3 of at most 8", "decode_ctx on int4: started"):
            while awaited not in (line := process.stderr.readline()):
                assert line, f"it ended before {awaited}"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    return command(machine, "ab", "--resume", only(machine, "floor").run_id)


def test_a_killed_aa_goes_on_and_its_boots_are_all_there_once(aa_killed_once, machine):
    done, whole = aa_killed_once, only(machine, "floor")
    assert done.returncode == EXIT[whole.tags["verdict"]], done.stdout + done.stderr
    assert "2 of at most 8 boots are there" in done.stderr
    found = attempts.read(machine.tracking, whole.run_id, attempts.read_design(whole))
    finished = [attempt.slot for attempt in found if attempt.state == "finished"]
    assert len(finished) == len(set(finished)) == 8
    assert [attempt.state for attempt in found if attempt.state != "finished"] == ["cut off"]


def test_the_aa_does_not_pass_for_a_better_arm(aa_killed_once, machine):
    whole = only(machine, "floor")
    design = attempts.read_design(whole)
    results = [a.result for a in attempts.read(machine.tracking, whole.run_id, design) if a.state == "finished"]
    faster = Criterion("decode.ms_per_step.ctx*", "superior", "primary", min_effect=0.02)
    verdict = judge(replace(design.test.gate, criteria={"decode": faster}), results, {})
    assert verdict.state in ("FAIL", "INCONCLUSIVE"), verdict


def test_its_floors_are_shown(aa_killed_once, machine):
    shown = command(machine, "floor")
    assert shown.returncode == 0 and "decode.ms_per_step.ctx512" in shown.stdout, shown.stderr
    assert re.search(r"\d\.\d\d%", shown.stdout)


def test_list_has_both_with_their_verdicts(aa_killed_once, machine):
    shown = command(machine, "list")
    for kind in ("ab", "floor"):
        (line,) = [line for line in shown.stdout.splitlines() if only(machine, kind).run_id in line]
        assert only(machine, kind).tags["verdict"] in line and "8 boots" in line
