"""Prepared checkpoints: named by all that decides their bytes, used only while they are what their manifest says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import checkpoint, config, prepare
from orchestrator.checkpoint import Checkpoint
from orchestrator.errors import UsageError
from orchestrator.progress import Progress


@pytest.fixture
def experiment():
    return config.load(["+variant=int5", "box=cpu"])


@pytest.fixture
def prepared(tmp_path: Path) -> Checkpoint:
    """A directory as `prepare` leaves it."""
    directory = tmp_path / "int5"
    directory.mkdir()
    files = {"config.json": b"{}", "model.safetensors": b"12345678", "recipe.json": b"of the model it was made from"}
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    (directory / "manifest.json").write_text(json.dumps({"files": entries}))
    (directory / "recipe.json").write_text('{"bits": 5}')
    return Checkpoint(str(directory), {"bits": 5}, "id")


def test_whatever_decides_a_checkpoints_bytes_gives_it_another_name(experiment):
    model, weights = experiment.box.model, experiment.variant.weights
    base = (model, weights, Path("/cache"), "builder", "calibration")
    others = [
        (replace(model, group_size=128), *base[1:]),
        (replace(model, krot=1), *base[1:]),
        (replace(model, source=replace(model.source, sha256="0" * 64)), *base[1:]),
        (replace(model, quantize=replace(model.quantize, seed=9)), *base[1:]),
        (replace(model, quantize=replace(model.quantize, steps=9)), *base[1:]),
        (model, replace(weights, bits=4), *base[2:]),
        (*base[:3], "another builder", base[4]),
        (*base[:4], "another text"),
    ]
    names = {checkpoint.locate(*arguments).path for arguments in (base, *others)}
    assert len(names) == 1 + len(others)


def test_a_directory_made_by_another_recipe_is_not_prepared(prepared):
    assert prepare.is_prepared(prepared)
    assert not prepare.is_prepared(replace(prepared, recipe={"bits": 4}))


def test_an_intact_checkpoint_is_taken_as_it_is(experiment, prepared):
    assert prepare.ensure(experiment, prepared, prepared, Progress(quiet=True)) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"12345679", "model.safetensors is not what its manifest says"),
        ("model.safetensors", b"1234567", "model.safetensors is not what its manifest says"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("config.json", b"{ }", "config.json is not what its manifest says"),
        ("manifest.json", b"[]", "manifest.json is missing or unreadable"),
        ("manifest.json", b'{"files": {}}', "manifest.json names no file"),
    ],
)
def test_a_checkpoint_that_changed_on_disk_is_refused(experiment, prepared, name, content, said):
    path = Path(prepared.path) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"is damaged: {said}; remove the directory"):
        prepare.ensure(experiment, prepared, prepared, Progress(quiet=True))
