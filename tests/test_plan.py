"""The plan: complete, pure, and different where and only where the variant is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import knobs, plan
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable, to_jsonable

VARIANTS = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "variant").glob("*.yaml"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_shipped_variant_has_a_plan_that_survives_json(plan_of, variant):
    made = plan_of(f"+variant={variant}", "box=cpu")
    assert from_jsonable(plan.ServePlan, json.loads(json.dumps(to_jsonable(made)))) == made
    assert made.quantized == (variant != "bf16")


def test_the_json_has_the_documented_top_level_keys(plan_of):
    data = json.loads(plan.as_json(plan_of("+variant=int5_i8_pg_zpe", "box=cpu")))
    assert {"port", "env", "argv", "image", "cache_dir", "fingerprint"} <= data.keys()


def test_the_env_states_every_knob_and_inherits_nothing(plan_of, monkeypatch):
    monkeypatch.setenv("STRAY_VARIABLE", "1")
    env = plan_of("+variant=int5", "box=cpu").env
    assert knobs.REGISTRY.keys() <= env.keys() and "STRAY_VARIABLE" not in env


def test_rendering_twice_gives_the_same_fingerprint(plan_of):
    assert plan_of("+variant=int5", "box=cpu") == plan_of("+variant=int5", "box=cpu")


@pytest.mark.parametrize(
    "override",
    ["+variant.knobs.RADIANCE_PQ_ZPE=1", "+variant.serve.max-num-seqs=4", "box.serve.max-model-len=2048"],
)
def test_whatever_can_change_a_compiled_graph_changes_the_cache_directory(plan_of, override):
    base, other = plan_of("+variant=int5", "box=cpu"), plan_of("+variant=int5", "box=cpu", override)
    assert base.cache_dir != other.cache_dir and base.fingerprint != other.fingerprint


def test_another_plugin_build_or_stack_gets_another_cache_directory(machine, tmp_path, no_checkpoint):
    from orchestrator import config

    build, stack = machine
    experiment = config.load(["+variant=int5", "box=cpu"])
    dirs = {
        plan.render(experiment, no_checkpoint, b, tmp_path, s, tmp_path).cache_dir
        for b in (build, replace(build, sha256="d" * 64))
        for s in (stack, replace(stack, fingerprint="other"))
    }
    assert len(dirs) == 4


def test_a_boot_adds_its_nonce_and_nothing_else(plan_of, tmp_path):
    made = plan_of("+variant=int5", "box=cpu")
    argv, env, name = plan.with_nonce(made, "abc123", tmp_path)
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 3] == (made.served_model, name) and name.endswith("@abc123")
    assert set(argv) - set(made.argv) == {name}
    assert {k: v for k, v in env.items() if k not in made.env} == {
        "RADIANCE_BOOT_NONCE": "abc123",
        "RADIANCE_ATTEST_DIR": str(tmp_path),
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+variant.serve.port=1", "port is the plan's to set"),
        ("variant.speculation.tokens=3", "without a method"),
        ("variant.speculation.method=ngram", "needs at least 1"),
        ("+variant.serve.x=[1]", "not a plain value"),
    ],
)
def test_what_a_variant_may_not_declare_is_refused(plan_of, override, said):
    with pytest.raises(UsageError, match=said):
        plan_of("+variant=int5", "box=cpu", override)


def test_speculation_reaches_the_command_line(plan_of):
    argv = plan_of("+variant=bf16", "box=cpu", "variant.speculation.method=ngram", "variant.speculation.tokens=5").argv
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config == {"method": "ngram", "num_speculative_tokens": 5}
