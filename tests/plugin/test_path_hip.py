"""The HIP path inside vLLM's op, for real: a libamdhip64 that runs the launches on the CPU stands in for ROCm's."""

import ctypes
import json
import os
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import attest, reference
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip.launch import Launch
from paroquant_gfx1201.kernels.hip.loader import Loader
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.paths import BandedLinear, Weights, hip
from tests.plugin.conftest import random_projection, relative
from tests.plugin.hip_cases import assert_rounded_once, needs_clang, needs_emulation, only, random_codes
from tests.plugin.test_vllm_glue import INPUTS, QKV, ROUNDED, config, expected, qkv_layer
from tests.plugin.vllm_layers import _fresh, _one_rank, load, prepared, run, tokens  # noqa: F401

pytestmark = [pytest.mark.vllm, needs_emulation, needs_clang(19)]

KERNELS = (
    only(
        "producer.hip",
        '#include "producer.h"\nPRODUCERS(64, 8, int8, INT8)\nPRODUCERS(64, 8, e4m3, E4M3)\n'
        "BY_GROUP(64, 8, int8, INT8, TILED, _tiles)\n",
    ),
    only(
        "decode.hip",
        '#include "decode.h"\nDECODE(INT5, int5, INT8, int8, 64, 16)\nDECODE(FOLDED, folded, E4M3, e4m3, 64, 16)\n'
        "DECODE(MXFP4, mxfp4, E4M3, e4m3, 64, 16)\n",
    ),
    only(
        "prefill.hip",
        '#include "prefill.h"\nPREFILL(INT5, int5, INT8, int8, 64, token, true, ROW_MAJOR, )\n'
        "PREFILL(INT5, int5, INT8, int8, 64, token, true, TILED, _tiles)\n"
        "PREFILL_EPILOGUE(INT5, int5, INT8, int8, 64, token, true)\n"
        "PREFILL_EPILOGUE(INT5, int5, INT8, int8, 64, group, false)\n",
    ),
)
STREAM = 0x5150


class Drivers:
    """One loader for each source, as each stand-in knows the kernels of one."""

    def __init__(self, objects: Path) -> None:
        self.objects = objects
        self.loaders = {edit.file: Loader(str(simt.driver(edit.file, (edit,))), objects) for edit in KERNELS}
        self.launched: list[str] = []

    def run(self, launch: Launch, stream: int | None) -> list[torch.Tensor]:
        self.launched.append(launch.kernel)
        loader = self.loaders[launch.source]
        written = loader.run(launch, stream)
        assert ctypes.c_void_p.in_dll(loader._hip, "simtLastStream").value == stream == STREAM
        return written


@pytest.fixture
def drivers(objects: Path, monkeypatch: pytest.MonkeyPatch) -> Drivers:
    made = Drivers(objects)
    monkeypatch.setenv("RADIANCE_PQ_PATH", "hip_gfx1201")
    monkeypatch.setattr(hip, "architecture", lambda device: "gfx1201")
    monkeypatch.setattr(hip, "loader", lambda: made)
    monkeypatch.setattr(hip, "current_stream", lambda device: STREAM)
    hip.reason_against_launching.cache_clear()
    yield made
    hip.reason_against_launching.cache_clear()


def merged_layer():
    layer = qkv_layer(config("m.q_proj", "m.k_proj", "m.v_proj"))
    parts = [random_projection(5, INPUTS, width, seed) for seed, width in enumerate(QKV.values())]
    for shard, part in zip(QKV, parts, strict=True):
        load(layer, part, shard)
    return prepared(layer), parts


@pytest.mark.parametrize(
    ("count", "tiled", "kernels"),
    [
        (5, "1", ["group_int8_g64_r8", "decode_int5_int8_g64_m16"]),
        (66, "1", ["token_int8_g64_r8_tiles", "prefill_int5_int8_g64_token_tiles"]),
        (66, "0", ["token_int8_g64_r8", "prefill_int5_int8_g64_token"]),
    ],
)
def test_each_band_launches_its_kernels_on_the_current_stream(
    count: int, tiled: str, kernels: list[str], drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIANCE_PQ_ATILED", tiled)
    layer, parts = merged_layer()
    x = tokens(count)
    y = run(layer, x)
    assert drivers.launched == kernels
    bands = attest.process.layers["m.qkv_proj"].bands
    assert (bands["decode"].order, bands["prefill"].order) == ("rows", "tiles" if tiled == "1" else "rows")
    _, product = layer.paroquant_layer.linear.multiply(x)
    assert torch.equal(product.y, y)
    exact = []
    for part, rows in zip(parts, product.activations(), strict=True):
        weight = reference.prepare(part)
        exact.append(reference.same_codes(rows, weight.weight, weight.offsets))
    assert_rounded_once(y, torch.cat(exact, 1))


def test_the_epilogue_is_launched_where_the_mode_has_it(drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIANCE_PQ_ZPE", "1")
    layer, parts = merged_layer()
    x = tokens(66)
    y = run(layer, x)
    assert drivers.launched == ["token_int8_g64_r8_tiles", "prefill_int5_int8_g64_token_tiles_epilogue"]
    assert relative(y, expected(x, parts)) < ROUNDED
    assert attest.process.layers["m.qkv_proj"].bands["prefill"].zero_point == "epilogue"


def test_few_rows_of_the_prefill_band_keep_its_epilogue(drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    for knob, value in (("ZPE", "1"), ("PG", "1"), ("DECODE_MAX_M", "3")):
        monkeypatch.setenv(f"RADIANCE_PQ_{knob}", value)
    layer, parts = merged_layer()
    x = tokens(5)
    y = run(layer, x)
    assert drivers.launched == ["group_int8_g64_r8_tiles", "prefill_int5_int8_g64_group_tiles_epilogue"]
    assert relative(y, expected(x, parts)) < ROUNDED


@pytest.mark.parametrize("form", ["folded", "mxfp4"])
def test_mxfp4_is_folded_where_its_exponents_allow_it(
    form: str, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIANCE_PQ_I8", "0")
    made = [random_codes(form, INPUTS, outputs, 64, outputs) for outputs in (32, 64)]
    weights = Weights(made, torch.bfloat16, torch.device("cpu"))
    linear = BandedLinear(weights, Mode.from_environment(os.environ))
    assert linear.choices["decode"].path.form(weights) == form
    _, product = linear.multiply(tokens(5))
    assert drivers.launched == ["group_e4m3_g64_r8", f"decode_{form}_e4m3_g64_m16"]
    exact = []
    for part, rows in zip(made, product.activations(), strict=True):
        weight = reference.prepare(part)
        exact.append(reference.same_codes(rows, weight.weight, weight.offsets))
    assert_rounded_once(product.y, torch.cat(exact, 1))


@pytest.mark.usefixtures("drivers")
def test_a_layer_that_fills_no_tile_is_multiplied_as_wide_as_it_is() -> None:
    made = [random_codes("int5", INPUTS, outputs, 64, outputs) for outputs in (40, 24)]
    weights = Weights(made, torch.bfloat16, torch.device("cpu"))
    linear = BandedLinear(weights, Mode.from_environment(os.environ))
    path, product = linear.multiply(tokens(5))
    assert (path, product.y.shape, product.y.is_contiguous()) == ("hip_gfx1201", (5, 64), True)
    exact = []
    for part, rows in zip(made, product.activations(), strict=True):
        weight = reference.prepare(part)
        exact.append(reference.same_codes(rows, weight.weight, weight.offsets))
    assert_rounded_once(product.y, torch.cat(exact, 1))


@pytest.mark.usefixtures("drivers")
def test_check_mode_holds_what_was_launched_against_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIANCE_PQ_CHECKALL", "1")
    monkeypatch.setenv("RADIANCE_ATTEST_DIR", str(tmp_path))
    layer, _ = merged_layer()
    run(layer, tokens(5))
    (path,) = tmp_path.glob("attest-*.json")
    document = json.loads(path.read_text())
    worst = document["check"]["hip_gfx1201:int32:int8:group:loop:bfloat16"]
    assert 1e-3 < worst["relative_error"] < 2e-3
    bands = document["layers"][0]["bands"]
    common = {"path": "hip_gfx1201", "form": "int5", "zero_point": "loop", "declined": {}}
    assert bands == {"decode": {**common, "order": "rows"}, "prefill": {**common, "order": "tiles"}}
    assert attest.process.layers["m.qkv_proj"].path == "hip_gfx1201"
