"""Qwen3.5's merged layers on one and two ranks: together the ranks hold every tensor of the unsharded projections.

What a rank multiplies is compared with float64 products of the whole projection's numbers, so the floor is float32's.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats import nvfp4
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.modes import Band
from paroquant_gfx1201.quantize_fp4 import requantize, to_nvfp4
from tests.plugin.conftest import relative
from tests.plugin.vllm_layers import (  # noqa: F401
    _fresh,
    _one_rank,
    build,
    load,
    load_tensors,
    prepared,
    rank,
    rotated_widths,
    run,
    tokens,
)

pytestmark = pytest.mark.vllm

HIDDEN, WIDE = 256, 512
SPECS = {
    "int4": FormatSpec(4, 128, 8),
    "int5": FormatSpec(5, 128, 8),
    "lloyd": FormatSpec(4, 128, 8, lloyd=True),
    "mxfp4": Mxfp4Spec(128, 8),
}
KINDS = [*SPECS, *nvfp4.CODES]
ROWS = 5
BAND = Band("e4m3", "group", "loop")
FLOAT32 = 3e-6
"""Float32 products, and single codes of activations that lie on a boundary of theirs."""


@pytest.fixture(autouse=True)
def _e4m3(_fresh, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("RADIANCE_PQ_I8", "0")
    monkeypatch.setenv("RADIANCE_NVFP4_MXFP4", "1")


def projection(kind: str, inputs: int, outputs: int, seed: int):
    """A projection under large random rotations, so that one rotated as another differs by as much as itself."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05 * (1 + seed)
    if kind in nvfp4.CODES:
        return to_nvfp4(weight, kind)
    theta = ((torch.rand(8, inputs // 2, generator=generator) - 0.5) * 6).half()
    channel_scales = torch.exp(torch.randn(1, inputs, generator=generator) * 0.3).half()
    pairs = rotation.greedy_pairs(inputs, 128, 8, seed)
    return quantize_rotated(weight, theta, channel_scales, pairs, SPECS[kind])


def unsharded(x: torch.Tensor, of) -> torch.Tensor:
    """float64 of what the kernels multiply: activation codes, dequantized codes, f16 zero-scales."""
    if isinstance(of, nvfp4.Nvfp4Weight):
        of = requantize(of, "mse", 128)
    whole = reference.prepare(of)
    activations = reference.quantize_activations(rotation.rotate_groups(x.float(), whole.rotation), BAND)
    values = activations.codes.double() * activations.scales.double()
    left = values.transpose(0, 1).flatten(1)
    if len(whole.offsets):
        left = torch.cat([left, values.sum(-1).T], 1)
    return left @ whole.weight.double()


def config_of(kind: str, parts: dict[str, object], directory: Path):
    """The quantization config of a checkpoint with these projections."""
    tensors = {key: tensor for name, part in parts.items() for key, tensor in part.to_tensors(name).items()}
    save_file(tensors, directory / "model.safetensors")
    if kind in nvfp4.CODES:
        from paroquant_gfx1201.vllm_glue.nvfp4 import Nvfp4Config

        config = Nvfp4Config.from_config(nvfp4.config_of(kind))
    else:
        from paroquant_gfx1201.vllm_glue.config import ParoMxfp4Config, ParoQuantConfig

        config = (ParoMxfp4Config if kind == "mxfp4" else ParoQuantConfig)(SPECS[kind])
    config.maybe_update_config(str(directory))
    return config


def in_proj_qkvz(config, widths: list[int]):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    return build(MergedColumnParallelLinear, HIDDEN, widths, config=config, prefix="m.in_proj_qkvz")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_four_partitions_of_two_projections(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GatedDeltaNet's queries, keys and values are one projection with one rotation, its gate z another."""
    widths, x = [128, 128, 256, 256], tokens(ROWS).float()
    qkv, z = projection(kind, HIDDEN, 512, 0), projection(kind, HIDDEN, 256, 1)
    config = config_of(kind, {"m.in_proj_qkv": qkv, "m.in_proj_z": z}, tmp_path)
    found = []
    for index in range(ranks):
        with rank(monkeypatch, index, ranks):
            layer = in_proj_qkvz(config, widths)
        load(layer, qkv, (0, 1, 2))
        load(layer, z, 3)
        found.append(run(prepared(layer), x).split([width // ranks for width in widths], 1))
        if kind in SPECS:
            assert rotated_widths(layer) == [512 // ranks, 256 // ranks]
    y = torch.cat([torch.cat(part, 1) for part in zip(*found, strict=True)], 1)
    assert relative(y[:, :512], unsharded(x, qkv)) < FLOAT32
    assert relative(y[:, 512:], unsharded(x, z)) < FLOAT32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_layer_sums_over_ranks_to_the_whole(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    whole, x = projection(kind, WIDE, 96, 2), tokens(ROWS, WIDE).float()
    config = config_of(kind, {"m.out_proj": whole}, tmp_path)
    total = torch.zeros(ROWS, 96, dtype=torch.float64)
    for index in range(ranks):
        with rank(monkeypatch, index, ranks):
            layer = build(RowParallelLinear, WIDE, 96, config=config, prefix="m.out_proj")
        load(layer, whole, None)
        total += run(prepared(layer), x.chunk(ranks, 1)[index]).double()
    assert relative(total, unsharded(x, whole)) < FLOAT32


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_fewer_heads_than_ranks_are_held_by_each(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    x, widths = tokens(ROWS).float(), {"q": 256, "k": 64, "v": 64}
    parts = {shard: projection(kind, HIDDEN, width, seed) for seed, (shard, width) in enumerate(widths.items())}
    config = config_of(kind, {f"m.{shard}_proj": part for shard, part in parts.items()}, tmp_path)
    queries = []
    for index in range(2):
        with rank(monkeypatch, index, 2):
            layer = build(QKVParallelLinear, HIDDEN, 64, 4, 1, config=config, prefix="m.qkv_proj")
        for shard, part in parts.items():
            load(layer, part, shard)
        q, k, v = run(prepared(layer), x).split([128, 64, 64], 1)
        queries.append(q)
        assert relative(k, unsharded(x, parts["k"])) < FLOAT32
        assert relative(v, unsharded(x, parts["v"])) < FLOAT32
    assert relative(torch.cat(queries, 1), unsharded(x, parts["q"])) < FLOAT32


@pytest.mark.parametrize("kind", ["int4", "lloyd", "mxfp4"])
def test_the_floor_tells_one_rotation_from_another(kind: str, tmp_path: Path) -> None:
    """What the comparison above would see of a partition that got its neighbour's rotation."""
    qkv, z = projection(kind, HIDDEN, 512, 0), projection(kind, HIDDEN, 256, 1)
    layer = in_proj_qkvz(config_of(kind, {"m.in_proj_qkv": qkv, "m.in_proj_z": z}, tmp_path), [128, 128, 256, 256])
    load(layer, qkv, (0, 1, 2))
    other = {f"p.{name}": getattr(qkv, name) for name in ("theta", "pairs", "channel_scales")}
    load_tensors(layer, {**z.to_tensors("p"), **other}, 3)
    y = run(prepared(layer), tokens(ROWS).float())
    assert relative(y[:, 512:], unsharded(tokens(ROWS), z)) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_ranks_would_split_inside_a_group_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    inputs = 160 if kind in nvfp4.CODES else 384
    config = config_of(kind, {"m.down_proj": projection(kind, inputs, 64, 0)}, tmp_path)
    says = (
        rf"m\.down_proj: K={inputs // 2} is not a multiple .* on each of 2 ranks: use a smaller --tensor-parallel-size"
    )
    with rank(monkeypatch, 0, 2), pytest.raises(PluginError, match=says):
        build(RowParallelLinear, inputs, 64, config=config, prefix="m.down_proj")


def test_outputs_that_ranks_would_split_inside_a_word_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("int5", {"m.in_proj_qkv": projection("int5", HIDDEN, 96, 0),
                                "m.in_proj_z": projection("int5", HIDDEN, 32, 1)}, tmp_path)  # fmt: skip
    with rank(monkeypatch, 0, 2), pytest.raises(PluginError, match=r"m\.in_proj_qkvz: N=16 .* on each of 2 ranks"):
        in_proj_qkvz(config, [32, 32, 32, 32])
