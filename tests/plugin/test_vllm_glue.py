"""vLLM's side: registration, config rules, loading of merged and sharded layers, the op."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paroquant_gfx1201 import attest, reference, rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.paths import Weights
from tests.plugin.conftest import random_projection, relative
from tests.plugin.vllm_layers import (  # noqa: F401
    _fresh,
    _one_rank,
    build,
    load,
    prepared,
    rank,
    rotated_widths,
    run,
    tokens,
)

pytestmark = pytest.mark.vllm

SPEC = FormatSpec(5, 64, 8)
INPUTS = 256
QKV = {"q": 128, "k": 64, "v": 64}
"""Two heads of 64, one of keys and values: vLLM's qkv_proj has partitions [128, 64, 64]."""

ROUNDED = 4e-3
"""bf16 outputs of few tokens, where a rotated value on a rounding boundary may go either way."""


def config(*names: str):
    from paroquant_gfx1201.vllm_glue.config import ParoQuantConfig

    spec = ParoQuantConfig(SPEC)
    spec.quantized = frozenset(names)
    return spec


def qkv_layer(made_config):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return build(QKVParallelLinear, INPUTS, 64, 2, 1, config=made_config, prefix="m.qkv_proj")


def expected(x: torch.Tensor, projections: list[Projection]) -> torch.Tensor:
    from paroquant_gfx1201.vllm_glue import op

    band = op.process_mode().band(len(x))
    return torch.cat([reference.linear(x, reference.prepare(projection), band) for projection in projections], 1)


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_a_merged_layer_rotates_each_partition_its_own_way(count: int) -> None:
    layer = qkv_layer(config("m.q_proj", "m.k_proj", "m.v_proj"))
    parts = [random_projection(5, INPUTS, width, seed) for seed, width in enumerate(QKV.values())]
    for shard, part in zip(QKV, parts, strict=True):
        load(layer, part, shard)
    y = run(prepared(layer), tokens(count))
    assert y.dtype == torch.bfloat16
    assert rotated_widths(layer) == [128, 64, 64]
    assert relative(y, expected(tokens(count), parts)) < ROUNDED


def fused_projection() -> Projection:
    return random_projection(5, INPUTS, sum(QKV.values()), 7)


def columns(projection: Projection, start: int, end: int) -> Projection:
    return Projection(
        projection.spec,
        projection.codes[:, start:end],
        projection.zeros[:, start:end],
        projection.scales[:, start:end],
        projection.theta,
        projection.pairs,
        projection.channel_scales,
    )


def test_equal_adjacent_rotations_run_once() -> None:
    layer = qkv_layer(config("m.q_proj", "m.k_proj", "m.v_proj"))
    whole = fused_projection()
    other = random_projection(5, INPUTS, 64, 9)
    load(layer, columns(whole, 0, 128), "q")
    load(layer, columns(whole, 128, 192), "k")
    load(layer, other, "v")
    y = run(prepared(layer), tokens(5))
    assert rotated_widths(layer) == [192, 64]
    parts = [columns(whole, 0, 192), other]
    assert relative(y, expected(tokens(5), parts)) < ROUNDED


def test_a_tuple_shard_fills_several_partitions_and_none_fills_all() -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    whole, last = fused_projection(), random_projection(5, INPUTS, 64, 9)
    names = config("m.in_proj_qkv", "m.in_proj_z")
    layer = build(MergedColumnParallelLinear, INPUTS, [128, 64, 64, 64], config=names, prefix="m.in_proj_qkvz")
    load(layer, whole, (0, 1, 2))
    load(layer, last, 3)
    y = run(prepared(layer), tokens(5))
    assert rotated_widths(layer) == [256, 64]
    assert relative(y, expected(tokens(5), [whole, last])) < ROUNDED

    layer = build(
        MergedColumnParallelLinear, INPUTS, [128, 128], config=config("m.gate_up_proj"), prefix="m.gate_up_proj"
    )
    load(layer, whole, None)
    y = run(prepared(layer), tokens(5))
    assert rotated_widths(layer) == [256]
    assert relative(y, expected(tokens(5), [whole])) < ROUNDED


def test_two_ranks_split_outputs_of_a_column_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    parts = [random_projection(5, INPUTS, 128, seed) for seed in (0, 1)]
    for index in range(2):
        with rank(monkeypatch, index, 2):
            names = config("m.gate_proj", "m.up_proj")
            layer = build(MergedColumnParallelLinear, INPUTS, [128, 128], config=names, prefix="m.gate_up_proj")
        for shard, part in enumerate(parts):
            load(layer, part, shard)
        mine = [columns(part, index * 64, index * 64 + 64) for part in parts]
        y = run(prepared(layer), tokens(5))
        assert relative(y, expected(tokens(5), mine)) < ROUNDED


def test_two_ranks_split_whole_groups_of_a_row_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    projection = random_projection(5, INPUTS, 96, 3)
    total = torch.zeros(5, 96)
    for index in range(2):
        with rank(monkeypatch, index, 2):
            layer = build(RowParallelLinear, INPUTS, 96, config=config("m.down_proj"), prefix="m.down_proj")
        load(layer, projection, None)
        half = tokens(5)[:, index * 128 : index * 128 + 128].float()
        total += run(prepared(layer), half)
    assert relative(total, expected(tokens(5), [projection])) < 1e-5


def test_a_rank_that_would_split_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    with rank(monkeypatch, 0, 2), pytest.raises(PluginError, match=r"m\.o_proj: K=96 .* on each of 2 ranks"):
        build(RowParallelLinear, 192, 96, config=config("m.o_proj"), prefix="m.o_proj")


def test_layers_without_a_qweight_stay_unquantized_and_are_named() -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    names = config("m.down_proj")
    layer = build(ReplicatedLinear, 64, 64, config=names, prefix="m.in_proj_a")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    ParallelLMHead(256, 64, quant_config=names, prefix="lm_head")
    assert attest.process.unquantized == {"m.in_proj_a": "linear", "lm_head": "lm_head"}


def test_half_quantized_merged_layers_are_refused() -> None:
    with pytest.raises(PluginError, match=r"m\.qkv_proj merges m\.q_proj.* with m\.k_proj"):
        qkv_layer(config("m.q_proj", "m.v_proj"))


def test_experts_are_refused() -> None:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    names = config("m.down_proj")
    with pytest.raises(PluginError, match=r"m\.experts.*: mixture-of-experts layers are not supported"):
        FusedMoEFactory(4, 2, INPUTS, 128, quant_config=names, prefix="m.experts")


def test_a_checkpoint_of_experts_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    save_file(random_projection(5).to_tensors("m.mlp.experts.0.up_proj"), tmp_path / "a.safetensors")
    with pytest.raises(PluginError, match=r"m\.mlp\.experts\.0\.up_proj: mixture-of-experts layers are not supported"):
        config().maybe_update_config(str(tmp_path))


def test_each_loaded_layer_is_attested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIANCE_ATTEST_DIR", str(tmp_path))
    layer = qkv_layer(config("m.q_proj", "m.k_proj", "m.v_proj"))
    for seed, (shard, width) in enumerate(QKV.items()):
        load(layer, random_projection(5, INPUTS, width, seed), shard)
    prepared(layer)
    document = json.loads((tmp_path / f"attest-{os.getpid()}.json").read_text())
    assert document["layers"] == [
        {
            "name": "m.qkv_proj",
            "path": "cpu_int8",
            "bits": 5,
            "format": "int5-bitplane",
            "group_size": 64,
            "krot": 8,
            "partitions": [128, 64, 64],
            "in_features": INPUTS,
            "out_features": 256,
            "source": None,
            "bands": {
                band: {"path": "cpu_int8", "form": "int5", "zero_point": "loop", "order": "rows", "declined": {}}
                for band in ("decode", "prefill")
            },
        }
    ]
    assert document["counts"]["ours"] == 1


def test_quantized_names_come_from_the_checkpoint_and_survive_pickling(tmp_path: Path) -> None:
    save_file(random_projection(5).to_tensors("model.layers.0.o_proj"), tmp_path / "a.safetensors")
    read = config()
    read.maybe_update_config(str(tmp_path))
    again = pickle.loads(pickle.dumps(read))
    assert again.quantized == {"model.layers.0.o_proj"}
    assert again.spec == SPEC


def test_a_checkpoint_without_qweight_is_refused(tmp_path: Path) -> None:
    save_file({"x.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(PluginError, match="has no qweight"):
        config().maybe_update_config(str(tmp_path))


def test_int5_without_fragment_order_is_refused_at_config_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIANCE_PQ_WPERM", "0")
    with pytest.raises(PluginError, match="RADIANCE_PQ_WPERM=1"):
        config()


def test_the_op_is_opaque_to_torch_compile_and_takes_any_number_of_rows() -> None:
    layer = qkv_layer(config("m.q_proj", "m.k_proj", "m.v_proj"))
    for seed, (shard, width) in enumerate(QKV.items()):
        load(layer, random_projection(5, INPUTS, width, seed), shard)
    prepared(layer)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: run(layer, x) * 2, backend=backend, fullgraph=True)
    for count in (7, 64, 65):
        x = tokens(count)
        torch._dynamo.mark_dynamic(x, 0)  # as vLLM marks the token dimension, and no other
        torch.testing.assert_close(compiled(x), run(layer, x) * 2)
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function" and "paroquant" in str(node.target)]
    assert len(graphs) == 1
    assert len(calls) == 1


def test_the_fake_op_has_the_real_shape_and_dtype() -> None:
    from paroquant_gfx1201.vllm_glue import op

    op.register()
    op.register()
    projection = random_projection(5, INPUTS, 64)
    layer = op.add("m.proj", Weights([projection], torch.bfloat16, torch.device("cpu")))
    for x in (tokens(6).view(2, 3, INPUTS), tokens(0)):
        y = torch.ops.vllm.paroquant_gfx1201_linear(x, layer.handle, 64)
        fake = op._fake(x, layer.handle, 64)
        assert y.shape == fake.shape == (*x.shape[:-1], 64)
        assert y.dtype == fake.dtype


@pytest.mark.parametrize("element", ["0", "1"])
def test_both_elements_agree_with_the_reference(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paroquant_gfx1201.vllm_glue import op

    monkeypatch.setenv("RADIANCE_PQ_I8", element)
    op.process_mode.cache_clear()
    assert op.process_mode() == Mode.from_environment(os.environ)
    theta = torch.zeros(8, INPUTS // 2).half()
    one = torch.ones(1, INPUTS).half()
    pairs = rotation.greedy_pairs(INPUTS, 64, 8, 0)
    projection = quantize_rotated(torch.randn(64, INPUTS) * 0.1, theta, one, pairs, SPEC)
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer = build(ReplicatedLinear, INPUTS, 64, config=config("m.proj"), prefix="m.proj")
    load(layer, projection, None)
    y = run(prepared(layer), tokens(80))
    assert relative(y, expected(tokens(80), [projection])) < ROUNDED


REGISTER_TWICE = """
import paroquant_gfx1201
paroquant_gfx1201.register()
paroquant_gfx1201.register()
from vllm.model_executor.layers.quantization import get_quantization_config
print(get_quantization_config("paroquant").__name__)
"""


def call_register(environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", REGISTER_TWICE],
        env={**{k: v for k, v in os.environ.items() if "RADIANCE" not in k}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_register_is_idempotent_and_attests(tmp_path: Path) -> None:
    result = call_register({"RADIANCE_ATTEST_DIR": str(tmp_path), "RADIANCE_BOOT_NONCE": "n1"})
    assert result.stdout.splitlines()[-1] == "ParoQuantConfig"
    assert "[paroquant_gfx1201] registered (" in result.stderr
    (path,) = tmp_path.glob("attest-*.json")
    document = json.loads(path.read_text())
    assert document["nonce"] == "n1"
    assert document["mode"]["element"] == "e4m3"
    assert document["vllm_version"]


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RADIANCE_PQ_PG": "1"}, "RADIANCE_PQ_PG=1 needs RADIANCE_PQ_I8=1"),
        ({"RADIANCE_PQ_I8": ""}, "RADIANCE_PQ_I8 is set but empty"),
    ],
)
def test_register_refuses_knobs_without_a_meaning(environment: dict, named: str) -> None:
    result = call_register(environment)
    assert result.returncode != 0
    assert named in result.stderr


def test_switched_off_it_attests_and_registers_nothing(tmp_path: Path) -> None:
    result = call_register({"RADIANCE_PAROQUANT": "0", "RADIANCE_ATTEST_DIR": str(tmp_path)})
    assert "Invalid quantization method" in result.stderr
    assert "not registered (RADIANCE_PAROQUANT=0)" in result.stderr
    assert list(tmp_path.glob("attest-*.json"))
