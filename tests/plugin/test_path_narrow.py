"""bf16 layers of few outputs inside vLLM: the skinny GEMM through a stand-in for libamdhip64, or vLLM's own."""

import json
import os
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip.launch import Launch
from paroquant_gfx1201.kernels.hip.loader import Loader
from paroquant_gfx1201.paths import hip
from tests.plugin.hip_cases import assert_rounded_once, needs_clang, needs_emulation
from tests.plugin.test_vllm_glue import config
from tests.plugin.vllm_layers import _fresh, _one_rank, build, loading, prepared, run, tokens  # noqa: F401

pytestmark = [pytest.mark.vllm, needs_emulation, needs_clang(19)]

INPUTS, PARTS = 256, (24, 24)


@pytest.fixture
def launched(objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched on what says that it is a gfx1201."""
    loader, names = Loader(str(simt.driver("skinny.hip")), objects), []

    def launch(given: Launch, device: torch.device) -> list[torch.Tensor]:
        names.append(given.kernel)
        return loader.run(given)

    monkeypatch.setenv("RADIANCE_PQ_PATH", "hip_gfx1201")
    monkeypatch.setenv("RADIANCE_ATTEST_DIR", str(tmp_path))
    monkeypatch.setattr(hip, "architecture", lambda device: "gfx1201")
    monkeypatch.setattr(hip, "loader", lambda: loader)
    monkeypatch.setattr(hip, "run", launch)
    hip.reason_against_launching.cache_clear()
    yield names
    hip.reason_against_launching.cache_clear()


def gates(parts: tuple[int, ...] = PARTS, bias: bool = False):
    """A merged in_proj_ba as vLLM's loader fills it, and its weight [N, K]."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    with loading():
        layer = MergedColumnParallelLinear(
            INPUTS, list(parts), bias=bias, quant_config=config("m.o_proj"), prefix="m.in_proj_ba"
        )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(width, INPUTS, generator=generator).bfloat16() for width in parts]
    for shard, part in enumerate(whole):
        layer.weight.weight_loader(layer.weight, part, shard)
    return prepared(layer), torch.cat(whole)


def attested() -> dict[str, object]:
    path = Path(os.environ["RADIANCE_ATTEST_DIR"]) / f"attest-{os.getpid()}.json"
    (entry,) = json.loads(path.read_text())["unquantized"]
    return entry


@pytest.mark.parametrize(("count", "kernels"), [(5, ["skinny_bf16_m16"]), (64, ["skinny_bf16_m64"]), (65, [])])
def test_up_to_64_rows_are_the_skinny_kernels_and_more_are_torchs(
    count: int, kernels: list[str], launched: list[str]
) -> None:
    layer, weight = gates()
    x = tokens(count, INPUTS)
    y = run(layer, x.view(1, count, INPUTS))
    assert launched == kernels
    assert y.shape == (1, count, sum(PARTS))
    assert_rounded_once(y[0], x.double() @ weight.double().T)
    assert attested() == {
        "name": "m.in_proj_ba",
        "kind": "linear",
        "path": "hip_gfx1201",
        "most_rows": 64,
        "declined": {},
    }


def test_a_bias_is_added_and_no_rows_are_no_launch(launched: list[str]) -> None:
    layer, _ = gates()
    bias = torch.arange(sum(PARTS)).bfloat16()
    x = tokens(3, INPUTS)
    assert torch.equal(layer.quant_method.apply(layer, x, bias), run(layer, x) + bias)
    assert run(layer, x[:0]).shape == (0, sum(PARTS))
    assert launched == ["skinny_bf16_m16"] * 2


@pytest.mark.usefixtures("launched")
def test_a_compiled_graph_sees_one_operator_of_any_number_of_rows() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, _ = gates()
    x, weight = tokens(5, INPUTS).view(1, 5, INPUTS), layer.weight.data
    mode = FakeTensorMode()
    with mode:
        y = torch.ops.vllm.paroquant_gfx1201_narrow(mode.from_tensor(x), mode.from_tensor(weight))
    assert (y.shape, y.dtype) == ((1, 5, sum(PARTS)), torch.bfloat16)


@pytest.mark.parametrize(
    ("parts", "knobs", "reason"),
    [
        ((24, 20), {}, "multiples of 8, not N=44"),
        ((1280, 8), {}, "up to 1280 outputs in multiples of 8, not N=1288"),
        (PARTS, {"RADIANCE_SKINNY_GEMM": "0"}, "RADIANCE_SKINNY_GEMM=0"),
    ],
)
def test_what_does_not_fit_or_is_switched_off_stays_vllms_and_says_why(
    parts: tuple[int, ...], knobs: dict[str, str], reason: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    layer, weight = gates(parts)
    x = tokens(5, INPUTS)
    assert_rounded_once(run(layer, x), x.double() @ weight.double().T)
    entry = attested()
    assert (entry["path"], entry["most_rows"], launched) == ("vllm", None, [])
    assert reason in entry["declined"]["hip_gfx1201"]


@pytest.mark.usefixtures("launched")
def test_another_path_asked_for_is_not_replaced_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIANCE_PQ_PATH", "cpu_reference")
    layer, weight = gates()
    assert not layer.quant_method.taken
    assert_rounded_once(run(layer, tokens(5, INPUTS)), tokens(5, INPUTS).double() @ weight.double().T)
