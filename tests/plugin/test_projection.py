"""A projection on disk: round trip, documented shapes, and strict reading."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.projection import Projection
from tests.plugin.conftest import random_projection


@pytest.mark.parametrize("bits", [4, 5])
def test_tensors_load_with_plain_safetensors_as_documented(bits: int, tmp_path: Path) -> None:
    projection = random_projection(bits)
    save_file(projection.to_tensors("a.b"), tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    shapes = projection.spec.shapes(projection.inputs, projection.outputs)
    assert set(loaded) == {f"a.b.{suffix}" for suffix in shapes}
    for suffix, (shape, dtype) in shapes.items():
        tensor = loaded[f"a.b.{suffix}"]
        assert tuple(tensor.shape) == shape
        assert str(tensor.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("bits", [4, 5])
def test_reading_gives_back_what_was_written(bits: int) -> None:
    projection = random_projection(bits)
    again = Projection.from_tensors("p", projection.to_tensors("p"), projection.spec)
    for field in ("codes", "zeros", "scales", "theta", "pairs", "channel_scales"):
        assert torch.equal(getattr(again, field), getattr(projection, field)), field


def test_a_bias_is_kept() -> None:
    projection = random_projection(4)
    tensors = {**projection.to_tensors("p"), "p.bias": torch.ones(projection.outputs).half()}
    again = Projection.from_tensors("p", tensors, projection.spec)
    assert again.bias is not None
    assert "p.bias" in again.to_tensors("p")


@pytest.mark.parametrize("suffix", ["qweight", "qzeros_hi", "theta", "channel_scales"])
def test_a_missing_tensor_is_named(suffix: str) -> None:
    projection = random_projection(5)
    tensors = projection.to_tensors("p")
    del tensors[f"p.{suffix}"]
    with pytest.raises(PluginError, match=rf"p\.{suffix} is missing"):
        Projection.from_tensors("p", tensors, projection.spec)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("theta", lambda tensor: tensor.bfloat16()),
        ("scales", lambda tensor: tensor[:-1]),
        ("qzeros", lambda tensor: tensor.long()),
        ("qweight_hi", lambda tensor: tensor[:, :-1]),
        ("qweight", lambda tensor: tensor[:-1]),
        ("qweight", lambda tensor: tensor[0]),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(suffix: str, change) -> None:
    projection = random_projection(5)
    tensors = projection.to_tensors("p")
    tensors[f"p.{suffix}"] = change(tensors[f"p.{suffix}"])
    with pytest.raises(PluginError, match=rf"p\.{suffix}"):
        Projection.from_tensors("p", tensors, projection.spec)


def test_pairs_that_rotate_a_channel_twice_are_refused() -> None:
    projection = random_projection(4)
    tensors = projection.to_tensors("p")
    tensors["p.pairs"][2, 64] = tensors["p.pairs"][2, 65]
    with pytest.raises(PluginError, match=r"p\.pairs: rotation 2, group 1"):
        Projection.from_tensors("p", tensors, projection.spec)
