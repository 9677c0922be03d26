"""1,000 damaged checkpoints: each is refused in one line that names the culprit, or means what its bytes say."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats import nvfp4
from paroquant_gfx1201.formats.catalog import read_layers
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.quantize_fp4 import to_nvfp4
from tests.plugin.conftest import random_projection

MUTATIONS = 1000
LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL", "F4", "", None, 7)
JUNK = (None, -1, 0, 3.5, "4", True, [], {}, 10**30, "\ud83d", [[1]], "NaN")
BITS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}

Checkpoint = tuple[dict, dict[str, torch.Tensor]]
"""quantization_config and tensors."""


def paro(spec, config: dict) -> Checkpoint:
    tensors = {"model.norm.weight": torch.ones(8).bfloat16()}
    for seed, name in enumerate(LAYERS):
        like = random_projection(4, 128, 8, seed)
        weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))
        bias = torch.ones(32).half() if seed else None
        made = quantize_rotated(weight, like.theta, like.channel_scales, like.pairs, spec, bias)
        tensors |= made.to_tensors(name)
    return config, tensors


def published(flavour: nvfp4.Flavour) -> Checkpoint:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    tensors = to_nvfp4(weight, flavour).to_tensors(LAYERS[0])
    tensors[f"{LAYERS[1]}.weight"] = (weight * 50).to(torch.float8_e4m3fn)
    tensors[f"{LAYERS[1]}.weight_scale"] = torch.rand(32, 1) + 0.1
    return nvfp4.config_of(flavour), tensors


@pytest.fixture(scope="module")
def originals() -> dict[str, Checkpoint]:
    int4 = FormatSpec(4, 64, 8)
    others = {
        "int5": FormatSpec(5, 64, 8),
        "int4-lloyd": FormatSpec(4, 64, 8, lloyd=True),
        "mxfp4": Mxfp4Spec(64, 8),
    }
    return {
        "int4": paro(int4, int4.to_config()),
        "gptqmodel": paro(int4, int4.to_gptqmodel_config()),
        **{name: paro(spec, spec.to_config()) for name, spec in others.items()},
        **{flavour: published(flavour) for flavour in ("compressed-tensors", "modelopt")},
    }


def split(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """Damage that a disk or a download does."""
    kind = dice.choice(("truncate", "extend", "flip in header", "flip in data", "flip", "length", "empty"))
    head = 8 + int.from_bytes(data[:8], "little")
    if kind == "truncate":
        return data[: dice.randrange(len(data))]
    if kind == "extend":
        return data + dice.randbytes(dice.randrange(1, 64))
    if kind == "length":
        return dice.choice((0, 1, head - 9, head, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + data[8:]
    if kind == "empty":
        return b""
    low, high = {"flip in header": (8, head), "flip in data": (head, len(data)), "flip": (0, len(data))}[kind]
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 8))):
        changed[dice.randrange(low, high)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def mutate_header(data: bytes, dice: random.Random) -> bytes:
    """A header that says something else about the same bytes."""
    header, body = split(data)
    header.pop("__metadata__", None)
    name = dice.choice(sorted(header))
    entry = header[name]
    kind = dice.choice(("dtype", "reinterpret", "shape", "reshape", "offsets", "swap", "rename", "junk", "whole"))
    if kind == "dtype":
        entry["dtype"] = dice.choice(DTYPES)
    elif kind == "reinterpret":  # another type of as many bytes: the file stays valid
        same = [dtype for dtype, size in BITS.items() if size == BITS.get(entry["dtype"])] or ["I8", "BOOL", "F8_E5M2"]
        entry["dtype"] = dice.choice(same)
    elif kind == "shape":
        entry["shape"] = dice.choice(([], [0], [-1], [1.5], [10**30], [*entry["shape"], 1], entry["shape"][::-1], "x"))
    elif kind == "reshape":
        count = math.prod(entry["shape"])
        entry["shape"] = dice.choice(([count], [1, count], [count, 1], [2, count // 2], [count // 2, 2], [1, 1, count]))
    elif kind == "offsets":
        shift = dice.choice((-8, -1, 1, 8, 10**9))
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    elif kind == "swap":
        other = dice.choice(sorted(header))
        entry["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], entry["data_offsets"]
    elif kind == "rename":
        header[dice.choice((name + "x", name.rpartition(".")[0] + ".weight", ""))] = header.pop(name)
    elif kind == "junk":
        header[name] = dice.choice(JUNK)
    else:
        return join(dice.choice((*JUNK, [header])), body)
    return join(header, body)


def mutate_tensors(tensors: dict[str, torch.Tensor], dice: random.Random) -> bytes:
    """A well-formed file with a wrong tensor in it."""
    name = dice.choice(sorted(tensors))
    tensor = tensors[name]
    kind = dice.choice(("drop", "fill", "cast", "narrow", "pad", "permute", "scramble"))
    changed = dict(tensors)
    if kind == "drop":
        del changed[name]
    elif kind == "fill":
        raw = torch.full((tensor.nbytes,), dice.choice((0, 1, 0x7E, 0x7F, 0x80, 0xFF)), dtype=torch.uint8)
        changed[name] = raw.view(tensor.dtype).view(tensor.shape)
    elif kind == "cast":
        to = dice.choice((torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))
        changed[name] = tensor.float().to(to)
    elif kind == "narrow" and tensor.ndim:
        along = dice.randrange(tensor.ndim)
        changed[name] = tensor.narrow(along, 0, dice.choice((1, tensor.shape[along] // 2)))
    elif kind == "pad":
        changed[name] = torch.cat([tensor.reshape(-1, *tensor.shape[1:])] * 2)
    elif kind == "permute" and tensor.ndim == 2:
        changed[name] = tensor.T
    else:
        raw = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for _ in range(8):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        changed[name] = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return save({key: value.contiguous() for key, value in changed.items()})


def mutate_config(config: dict, dice: random.Random) -> object:
    """A quantization_config with one thing wrong."""
    key = dice.choice(sorted(config))
    if dice.random() < 0.2:
        return {other: value for other, value in config.items() if other != key}
    if dice.random() < 0.1:
        return dice.choice(JUNK)
    value = dice.choice((*JUNK, 1, 3, 5, 32, 128, "awq", "mxfp4", "int5-bitplane"))
    return {**config, key: value}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_means_what_its_bytes_say(directory: Path) -> None:
    """Every layer, written again, gives the very bytes that safetensors itself reads from the file."""
    layers = dict(read_layers(directory))
    file = load_file(directory / "model.safetensors")
    for name, layer in layers.items():
        assert name in LAYERS
        if isinstance(layer, nvfp4.Fp8Weight):
            assert raw_bytes(layer.values) == raw_bytes(file[f"{name}.weight"])
            continue
        for key, tensor in layer.to_tensors(name).items():
            assert raw_bytes(tensor) == raw_bytes(file[key]), key
            assert tensor.dtype == file[key].dtype


def outcome(directory: Path) -> str:
    """``refused`` or ``loaded``; any other exception than a one-line PluginError fails the test."""
    try:
        assert_means_what_its_bytes_say(directory)
    except PluginError as refusal:
        message = str(refusal)
        assert len(message.splitlines()) == 1
        names_it = ("model.safetensors", "quantization_config", "layers.", "mlp.", "norm", str(directory))
        assert any(part in message for part in names_it), message
        return "refused"
    return "loaded"


def test_a_thousand_damaged_checkpoints_are_refused_or_mean_what_they_say(
    originals: dict[str, Checkpoint], tmp_path: Path
) -> None:
    counts: dict[tuple[str, str], int] = {}
    for seed in range(MUTATIONS):
        dice = random.Random(seed)
        config, tensors = originals[sorted(originals)[seed % len(originals)]]
        kind = dice.choice(("bytes", "header", "tensors", "config"))
        data, declared = save(tensors), config
        if kind == "bytes":
            data = mutate_bytes(data, dice)
        elif kind == "header":
            data = mutate_header(data, dice)
        elif kind == "tensors":
            data = mutate_tensors(tensors, dice)
        else:
            declared = mutate_config(config, dice)
        (tmp_path / "model.safetensors").write_bytes(data)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
        try:
            result = outcome(tmp_path)
        except Exception as error:  # of any kind: none may escape
            raise AssertionError(f"seed {seed}, {kind}: {type(error).__name__}: {error}") from error
        counts[kind, result] = counts.get((kind, result), 0) + 1
    # Each kind of damage is caught most of the time; what loads is data that means something else now.
    for kind in ("bytes", "header", "tensors", "config"):
        assert counts[kind, "refused"] > counts.get((kind, "loaded"), 0) / 2, counts
    assert sum(counts.values()) == MUTATIONS


@pytest.mark.parametrize("name", ["int4", "gptqmodel", "int5", "int4-lloyd", "mxfp4", "compressed-tensors", "modelopt"])
def test_the_undamaged_checkpoint_loads(name: str, originals: dict[str, Checkpoint], tmp_path: Path) -> None:
    config, tensors = originals[name]
    (tmp_path / "model.safetensors").write_bytes(save(tensors))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert outcome(tmp_path) == "loaded"
    assert len(dict(read_layers(tmp_path))) == 2
