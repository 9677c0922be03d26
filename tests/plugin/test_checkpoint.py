"""Model directories: headers, shards, config.json."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.checkpoint import (
    Writer,
    check_headers,
    quantized_names,
    read_header,
    read_headers,
    read_tensors,
)
from paroquant_gfx1201.formats.spec import FormatSpec
from tests.plugin.conftest import random_projection


def write(source: Path, out: Path, max_shard_bytes: int) -> dict:
    out.mkdir()
    writer = Writer(out, max_shard_bytes)
    expected = {}
    for index in range(3):
        tensors = random_projection(5, seed=index).to_tensors(f"layers.{index}.mlp.up_proj")
        writer.add(tensors)
        expected.update(tensors)
    writer.close(source, FormatSpec(5, 64, 8).to_config())
    return expected


def test_one_shard_is_a_single_file(tiny_model: Path, tmp_path: Path) -> None:
    expected = write(tiny_model, tmp_path / "out", 10**9)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(expected)
    assert not list((tmp_path / "out").glob("*.index.json"))


def test_several_shards_have_an_index_that_names_every_tensor(tiny_model: Path, tmp_path: Path) -> None:
    expected = write(tiny_model, tmp_path / "out", 20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    headers = read_headers(tmp_path / "out")
    assert set(headers) == set(expected)
    assert dict(read_tensors(headers)).keys() == expected.keys()


def test_config_carries_the_quantization_and_the_tokenizer_comes_along(tiny_model: Path, tmp_path: Path) -> None:
    write(tiny_model, tmp_path / "out", 10**9)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == FormatSpec(5, 64, 8).to_config()
    assert config["hidden_size"] == 128
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_quantized_layers_are_those_with_a_qweight(tiny_model: Path, tmp_path: Path) -> None:
    write(tiny_model, tmp_path / "out", 10**9)
    names = quantized_names(read_headers(tmp_path / "out"), FormatSpec(5, 64, 8))
    assert names == {f"layers.{index}.mlp.up_proj" for index in range(3)}
    assert not quantized_names(read_headers(tiny_model), FormatSpec(5, 64, 8))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"{nope"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PluginError, match=r"model\.safetensors is not a readable"):
        read_header(tmp_path / "model.safetensors")


def test_bytes_that_no_tensor_owns_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(save({"a": torch.zeros(4)}) + b"1234")
    with pytest.raises(PluginError, match=r"tensors of 16 bytes in 20 bytes of data"):
        read_header(file)


def test_a_tensor_in_two_shards_and_a_shard_that_is_gone_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(PluginError, match=r"a is both in .*one\.safetensors and in .*two\.safetensors"):
        read_headers(tmp_path)
    index = {"weight_map": {"a": "one.safetensors", "b": "three.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PluginError, match=r"three\.safetensors"):
        read_headers(tmp_path)
    index["weight_map"].pop("b")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_headers(tmp_path)) == {"a"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("p.theta"), r"p\.theta is missing"),
        (lambda tensors: tensors.pop("p.qweight"), r"p\.qweight is missing .* which has p\."),
        (lambda tensors: tensors.update({"p.scales": tensors["p.scales"].float()}), r"p\.scales is float32"),
        (lambda tensors: tensors.update({"p.pairs": tensors["p.pairs"][:4]}), r"p\.pairs is int16 \[4, 192\]"),
    ],
)
def test_headers_alone_tell_a_wrong_tensor(change, says: str, tmp_path: Path) -> None:
    tensors = random_projection(5).to_tensors("p")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(PluginError, match=says):
        check_headers(read_headers(tmp_path), FormatSpec(5, 64, 8))


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"holds no \.safetensors file"):
        read_headers(tmp_path)
