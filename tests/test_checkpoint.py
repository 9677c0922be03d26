"""Checkpoints that are found: named, identified by what they hold, and missed in one line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import checkpoint, inputs
from orchestrator.checkpoint import Checkpoint
from orchestrator.errors import UsageError

R9700X2 = ("box=r9700x2", "speculation@variant.speculation=dflash7")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"12345678")
    return directory


def test_a_directory_without_a_model_has_no_content_id(tmp_path):
    assert checkpoint.content_id(tmp_path) == "" and checkpoint.content_id(tmp_path / "none") == ""


def test_a_fine_tune_written_over_a_model_is_another_model(model):
    before = checkpoint.content_id(model)
    assert before == checkpoint.content_id(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert checkpoint.content_id(model) != before


def test_another_config_is_another_model(model):
    before = checkpoint.content_id(model)
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert checkpoint.content_id(model) != before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("box.models_dir=null",), "box.models_dir: not set, and Qwen3.8-27B-PARO is no absolute path"),
        (("~box.model.checkpoints.int4",), "has no int4 checkpoint .it has: bf16, int5"),
        (("box.model.drafter=null",), "box.model.drafter: model qwen3.8-27b has no drafter"),
    ],
)
def test_a_checkpoint_that_is_not_named_is_one_line_with_its_key(plan_of, overrides, said):
    with pytest.raises(UsageError, match=said):
        plan_of("+variant=int4", *R9700X2, *overrides)


def test_what_the_plan_names_and_the_machine_lacks_is_said_before_anything_starts(plan_of, tmp_path):
    plan = plan_of("+variant=int4", *R9700X2, f"box.models_dir={tmp_path}")
    here = Checkpoint("/models/x", {}, "0123")
    lacks = [
        (plan, "Qwen3.8-27B-PARO: no model is there; .* box.models_dir or box.model.checkpoints.int4"),
        (replace(plan, checkpoint=here), "Qwen3.8-27B-DFlash2-FP8: no drafter is there"),
        (replace(plan, checkpoint=here, drafter=None), "box.container.image: docker cannot be asked for .*0.9.3"),
        (
            replace(
                plan,
                checkpoint=here,
                drafter=None,
                container=replace(plan.container, image_id="sha256:1", groups=("gpu",)),
            ),
            "no group gpu",
        ),
    ]
    for lacking, said in lacks:
        with pytest.raises(UsageError, match=said):
            inputs.require_present(lacking)


def test_a_plan_that_lacks_nothing_is_let_through(plan_of):
    inputs.require_present(plan_of("+variant=int4", "box=cpu"))
