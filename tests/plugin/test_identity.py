"""A checkpoint that PyPI `paroquant` wrote means here what it means to `paroquant`.

`PAROQUANT_PYTHON` names the interpreter of an environment with paroquant==0.1.16 and torch, for example
    python -m venv /tmp/pq && /tmp/pq/bin/pip install torch safetensors tqdm transformers paroquant==0.1.16
benchmarks/format_identity.py does the writing; what of it is not paroquant's own code, it says itself.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.formats.catalog import read_layers
from tests.plugin.conftest import relative

PYTHON = os.environ.get("PAROQUANT_PYTHON")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "format_identity.py"

pytestmark = pytest.mark.skipif(not PYTHON, reason="PAROQUANT_PYTHON names no interpreter that has paroquant")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("paroquant")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([PYTHON, str(SCRIPT), str(out)], check=True, timeout=120, env=environment)
    assert json.loads((out / "manifest.json").read_text())["paroquant"] == "0.1.16"
    return out


@pytest.mark.parametrize("group_size", ["64", "128"])
def test_codes_scales_and_zero_points_give_their_dequantized_weight(group_size: str, written: Path) -> None:
    theirs = load_file(written / group_size / "theirs.safetensors")
    layers = dict(read_layers(written / group_size))
    assert len(layers) == 1
    for name, layer in layers.items():
        torch.testing.assert_close(layer.dequantize().T, theirs[f"{name}.rotated"], rtol=2**-23, atol=0)


@pytest.mark.parametrize("group_size", ["64", "128"])
def test_the_stored_rotation_does_to_inputs_what_theirs_does(group_size: str, written: Path) -> None:
    theirs = load_file(written / group_size / "theirs.safetensors")
    for name, layer in read_layers(written / group_size):
        theta = layer.theta.double()
        scaled = theirs[f"{name}.x"].double() * layer.channel_scales.double()
        ours = rotation.rotate(scaled, theta.cos(), theta.sin(), layer.pairs, layer.spec.group_size)
        # float32 rounding of eight plane rotations in a row.
        assert relative(ours, theirs[f"{name}.x_rotated"]) < 5e-7


@pytest.mark.parametrize("group_size", ["64", "128"])
def test_written_again_the_file_has_the_same_bytes(group_size: str, written: Path, tmp_path: Path) -> None:
    before = load_file(written / group_size / "model.safetensors")
    again = {}
    for name, layer in read_layers(written / group_size):
        again |= layer.to_tensors(name)
    save_file(again, tmp_path / "again.safetensors")
    after = load_file(tmp_path / "again.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
