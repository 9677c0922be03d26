"""Every format in vLLM layers: loaded by their weight loaders, sharded, and equal to the codec's float64."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paroquant_gfx1201 import attest, reference
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats import nvfp4
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.quantize_fp4 import requantize, to_mxfp4, to_nvfp4
from tests.plugin.conftest import random_projection, relative
from tests.plugin.vllm_layers import _fresh, _one_rank, build, load, load_tensors, prepared, rank, run, tokens  # noqa: F401

pytestmark = pytest.mark.vllm

INPUTS = 256
SPECS = {spec.format: spec for spec in (FormatSpec(4, 64, 8), FormatSpec(4, 64, 8, lloyd=True), Mxfp4Spec(64, 8))}
FLAVOURS = ["compressed-tensors", "modelopt"]
EXACT_E4M3 = 3.5e-2
"""Output error of e4m3 activations, one scale a group, in front of an exact weight path."""


@pytest.fixture(autouse=True)
def _e4m3(_fresh, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("RADIANCE_PQ_I8", "0")


def weight(outputs: int, seed: int) -> torch.Tensor:
    return torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(seed)) * 0.05


def quantized(spec, outputs: int, seed: int):
    like = random_projection(4, INPUTS, 8, seed)
    return quantize_rotated(weight(outputs, seed), like.theta, like.channel_scales, like.pairs, spec)


def paro(spec, *names: str):
    from paroquant_gfx1201.vllm_glue.config import ParoQuantConfig

    made = ParoQuantConfig(spec)
    made.quantized = frozenset(names)
    return made


def merged(config, prefix: str = "m.gate_up_proj", widths: tuple[int, ...] = (128, 64)):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    return build(MergedColumnParallelLinear, INPUTS, list(widths), config=config, prefix=prefix)


def row(config, prefix: str = "m.down_proj", outputs: int = 96):
    from vllm.model_executor.layers.linear import RowParallelLinear

    return build(RowParallelLinear, INPUTS, outputs, config=config, prefix=prefix)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("count", [1, 70])
def test_a_merged_layer_multiplies_as_its_parts_do(kind: str, count: int) -> None:
    spec = SPECS[kind]
    layer = merged(paro(spec, "m.gate_proj", "m.up_proj"))
    parts = [quantized(spec, 128, 0), quantized(spec, 64, 1)]
    for shard, part in enumerate(parts):
        load(layer, part, shard)
    y = run(prepared(layer), tokens(count))
    exact = torch.cat([reference.exact(tokens(count), part) for part in parts], 1)
    assert relative(y, exact) < EXACT_E4M3
    (record,) = attest.process.layers.values()
    assert (record.bits, record.format, record.partitions) == (4, spec.format, [128, 64])


@pytest.mark.parametrize("kind", SPECS)
def test_ranks_hold_what_the_whole_layer_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, x = SPECS[kind], tokens(5)
    parts, down = [quantized(spec, 128, 0), quantized(spec, 64, 1)], quantized(spec, 96, 2)
    columns, total = [], torch.zeros(5, 96, dtype=torch.float64)
    for index in range(2):
        with rank(monkeypatch, index, 2):
            layer = merged(paro(spec, "m.gate_proj", "m.up_proj"))
            second = row(paro(spec, "m.down_proj"))
        for shard, part in enumerate(parts):
            load(layer, part, shard)
        load(second, down, None)
        columns.append(run(prepared(layer), x).split([64, 32], 1))
        total += run(prepared(second), x[:, index * 128 : index * 128 + 128].float()).double()
    for part, found in zip(parts, zip(*columns, strict=True), strict=True):
        assert relative(torch.cat(found, 1), reference.exact(x, part)) < EXACT_E4M3
    assert relative(total, reference.exact(x, down)) < EXACT_E4M3


def test_partitions_of_one_rotation_and_two_codebooks_are_kept_apart() -> None:
    spec = SPECS["int4-lloyd"]
    like = random_projection(4, INPUTS, 8, 0)
    loud = weight(64, 5) ** 3
    parts = [quantize_rotated(w, like.theta, like.channel_scales, like.pairs, spec) for w in (weight(128, 4), loud)]
    assert not torch.equal(parts[0].levels, parts[1].levels)
    layer = merged(paro(spec, "m.gate_proj", "m.up_proj"))
    for shard, part in enumerate(parts):
        load(layer, part, shard)
    y = run(prepared(layer), tokens(5))
    for part, found in zip(parts, y.split([128, 64], 1), strict=True):
        assert relative(found, reference.exact(tokens(5), part)) < EXACT_E4M3


@pytest.mark.parametrize("kind", ["int4-lloyd", "mxfp4"])
def test_formats_of_e4m3_values_refuse_int8_activations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIANCE_PQ_I8", "1")
    with pytest.raises(PluginError, match="set RADIANCE_PQ_I8=0"):
        paro(SPECS[kind])


@pytest.mark.parametrize("method", ["paroquant", "paro", "paroquant_mxfp4", "paroquant_nvfp4"])
def test_each_method_is_registered_under_its_name(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    import paroquant_gfx1201

    monkeypatch.setenv("RADIANCE_NVFP4_MXFP4", "1")
    paroquant_gfx1201.register()
    assert get_quantization_config(method).get_name() == method


def test_a_wrong_tensor_is_named_before_any_weight_is_loaded(tmp_path: Path) -> None:
    tensors = quantized(SPECS["awq"], 64, 0).to_tensors("a.o_proj")
    tensors["a.o_proj.theta"] = tensors["a.o_proj.theta"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PluginError, match=r"a\.o_proj\.theta is bfloat16 .* expected float16"):
        paro(SPECS["awq"]).maybe_update_config(str(tmp_path))


def requantizing(flavour: str, tensors: dict[str, torch.Tensor], directory: Path):
    """The config of a checkpoint with these tensors."""
    from paroquant_gfx1201.vllm_glue.nvfp4 import Nvfp4Config

    save_file(tensors, directory / "model.safetensors")
    made = Nvfp4Config.from_config(nvfp4.config_of(flavour))
    made.maybe_update_config(str(directory))
    return made


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("rule", ["mse", "ocp"])
def test_each_partition_is_requantized_with_its_own_global_scale(
    flavour: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIANCE_NVFP4_EXP", rule)
    parts = [to_nvfp4(weight(128, 0), flavour), to_nvfp4(weight(64, 1) * 7, flavour)]
    stored = [part.to_tensors("p") for part in parts]
    name = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}[flavour]
    for tensors in stored:
        tensors[f"p.{name}"] = torch.ones(1)
    whole = {
        key.replace("p.", f"m.{projection}."): tensor
        for projection, tensors in zip(("gate_proj", "up_proj"), stored, strict=True)
        for key, tensor in tensors.items()
    }
    layer = merged(requantizing(flavour, whole, tmp_path))
    for shard, tensors in enumerate(stored):
        load_tensors(layer, tensors, shard)
    y = run(prepared(layer), tokens(5))
    for part, found in zip(parts, y.split([128, 64], 1), strict=True):
        assert relative(found, reference.exact(tokens(5), requantize(part, rule, 128))) < EXACT_E4M3
    assert attest.process.requantized == {"nvfp4": {"expected": 2, "done": 2}}
    (record,) = attest.process.layers.values()
    assert (record.format, record.source, record.krot) == ("mxfp4", "nvfp4", 0)


def test_requantized_ranks_hold_what_the_whole_layer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = to_nvfp4(weight(96, 0), "modelopt")
    made = requantizing("modelopt", part.to_tensors("m.down_proj"), tmp_path)
    total = torch.zeros(5, 96, dtype=torch.float64)
    for index in range(2):
        with rank(monkeypatch, index, 2):
            layer = row(made)
        load(layer, part, None)
        total += run(prepared(layer), tokens(5)[:, index * 128 : index * 128 + 128].float()).double()
    assert relative(total, reference.exact(tokens(5), requantize(part, "mse", 128))) < EXACT_E4M3


@pytest.mark.parametrize("per_output", [True, False])
def test_fp8_layers_become_mxfp4_too(per_output: bool, tmp_path: Path) -> None:
    values = (weight(96, 0) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(96, 1) + 0.1 if per_output else torch.tensor([0.3])
    tensors = {"p.weight": values, "p.weight_scale": scales}
    others = to_nvfp4(weight(8, 1), "modelopt").to_tensors("m.o_proj")
    here = {key.replace("p.", "m.down_proj."): tensor for key, tensor in tensors.items()}
    layer = row(requantizing("modelopt", {**here, **others}, tmp_path))
    load_tensors(layer, tensors, None)
    y = run(prepared(layer), tokens(5))
    expected = requantize(nvfp4.Fp8Weight.from_tensors("p", tensors), "mse", 128)
    assert relative(y, reference.exact(tokens(5), expected)) < EXACT_E4M3
    assert attest.process.requantized == {"fp8": {"expected": 1, "done": 1}}


def test_a_merged_bf16_in_proj_ba_is_requantized_and_other_bf16_layers_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    made = requantizing("modelopt", to_nvfp4(weight(8, 1), "modelopt").to_tensors("m.o_proj"), tmp_path)
    layer = merged(made, "m.in_proj_ba", (32, 32))
    whole = [weight(32, 0), weight(32, 1)]
    for shard, part in enumerate(whole):
        load_tensors(layer, {"p.weight": part}, shard)
    y = run(prepared(layer), tokens(5))
    codes, scales = to_mxfp4(torch.cat(whole).to(layer.params_dtype).float(), "mse")
    from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection

    expected = Mxfp4Projection(Mxfp4Spec(128, 1, "mse"), codes, scales)
    assert relative(y, reference.exact(tokens(5), expected)) < EXACT_E4M3
    assert attest.process.requantized == {"bf16": {"expected": 2, "done": 2}}
    assert isinstance(row(made, "m.gate").quant_method, UnquantizedLinearMethod)
    assert attest.process.unquantized == {"m.gate": "linear"}
    monkeypatch.setenv("RADIANCE_NVFP4_BF16_LAYERS", "none")
    assert isinstance(merged(made, "m.in_proj_ba", (32, 32)).quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_nvfp4_lm_head_becomes_a_float_weight(flavour: str, tmp_path: Path) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    part = to_nvfp4(weight(100, 0), flavour)
    made = requantizing(flavour, part.to_tensors("lm_head"), tmp_path)
    head = ParallelLMHead(100, INPUTS, quant_config=made, prefix="lm_head")
    load(head, part, None)
    logits = run(prepared(head), tokens(3).to(head.weight.dtype))
    assert relative(logits[:, :100], tokens(3).double() @ part.dequantize().double().T) < 6e-3
    assert not logits[:, 100:].any()
    assert attest.process.requantized == {"lm_head": {"expected": 1, "done": 1}}


def test_kinds_that_do_not_merge_and_knobs_that_are_not_served_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = to_nvfp4(weight(64, 0), "modelopt")
    made = requantizing("modelopt", part.to_tensors("m.gate_proj"), tmp_path)
    with pytest.raises(PluginError, match=r"m\.gate_up_proj merges projections of several kinds: bf16, nvfp4"):
        merged(made)
    monkeypatch.setenv("RADIANCE_NVFP4_LMHEAD", "keep")
    with pytest.raises(PluginError, match="RADIANCE_NVFP4_LMHEAD=keep is not served"):
        requantizing("modelopt", part.to_tensors("m.gate_proj"), tmp_path)


def test_published_nvfp4_configs_are_taken_over_and_others_left_alone() -> None:
    from paroquant_gfx1201.vllm_glue.nvfp4 import Nvfp4Config

    for flavour in FLAVOURS:
        assert Nvfp4Config.override_quantization_method(nvfp4.config_of(flavour), None) == "paroquant_nvfp4"
    assert Nvfp4Config.override_quantization_method({"quant_method": "fp8"}, None) is None


def test_check_mode_attests_the_worst_error_of_each_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paroquant_gfx1201.check import Checker
    from paroquant_gfx1201.vllm_glue import op

    monkeypatch.setenv("RADIANCE_PQ_CHECKALL", "1")
    monkeypatch.setenv("RADIANCE_ATTEST_DIR", str(tmp_path))
    monkeypatch.setattr(op, "checker", Checker())
    op.process_mode.cache_clear()
    spec = SPECS["mxfp4"]
    layer = row(paro(spec, "m.down_proj"))
    load(layer, quantized(spec, 96, 2), None)
    prepared(layer)
    for count in (3, 100):
        run(layer, tokens(count))
    run(layer, torch.zeros(2, INPUTS).bfloat16())
    found = json.loads((tmp_path / f"attest-{os.getpid()}.json").read_text())["check"]
    assert set(found) == {
        "cpu_reference:f32:e4m3:group:loop:bfloat16",
        "cpu_reference:f32:e4m3:token:loop:bfloat16",
    }
    for path in found.values():
        assert path["layer"] == "m.down_proj"
        assert 1e-4 < path["relative_error"] < 2.5e-3
