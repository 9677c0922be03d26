"""Which path a layer takes: by device, format, mode and shape, for each band; a path that was asked for, or none."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.kernels.hip import layout
from paroquant_gfx1201.kernels.hip.loader import Loader
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.paths import PATHS, BandedLinear, Weights, choose, hip
from tests.plugin.hip_cases import random_codes
from tests.plugin.test_hip_layout import walk

FORMS = ("int4", "int5", "int4-lloyd", "mxfp4", "folded")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def weights(
    name: str = "int5",
    device: torch.device = GPU,
    outputs: tuple[int, ...] = (64,),
    group_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:
    return Weights([random_codes(name, 128, count, group_size, count) for count in outputs], dtype, device)


def mode(**knobs: str) -> Mode:
    return Mode.from_environment({f"RADIANCE_PQ_{name}": value for name, value in knobs.items()})


def chosen(given: Weights, **knobs: str) -> tuple[str, str]:
    choices = choose(given, mode(**knobs))
    return choices["decode"].path.name, choices["prefill"].path.name


@pytest.fixture
def r9700(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU is one, and this installation has its code."""
    monkeypatch.setattr(hip, "architecture", lambda device: "gfx1201" if device.type == "cuda" else device.type)
    monkeypatch.setattr(hip, "reason_against_launching", lambda: "")


def test_a_cpu_takes_its_compiled_path_for_integers_and_the_reference_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "reason_against", lambda: "")
    assert chosen(weights(device=CPU), I8="1") == ("cpu_int8", "cpu_int8")
    assert chosen(weights(device=CPU), I8="0") == ("cpu_reference", "cpu_reference")
    assert chosen(weights("mxfp4", CPU), I8="0") == ("cpu_reference", "cpu_reference")
    assert chosen(weights(device=CPU, outputs=(64, 40)), I8="1") == ("cpu_reference", "cpu_reference")


def test_a_cpu_without_a_compiler_says_why_it_is_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "reason_against", lambda: "no C++ compiler is here")
    choice = choose(weights(device=CPU), mode(I8="1"))["decode"]
    assert choice.path.name == "cpu_reference"
    assert choice.declined == {"cpu_int8": "no C++ compiler is here"}


@pytest.mark.usefixtures("r9700")
@pytest.mark.parametrize("name", ["int4", "int5"])
def test_an_r9700_takes_the_hip_kernels(name: str) -> None:
    assert chosen(weights(name), I8="1", PG="1") == ("hip_gfx1201", "hip_gfx1201")
    assert chosen(weights(name), I8="0") == ("hip_gfx1201", "hip_gfx1201")
    assert chosen(weights(name, outputs=(64, 40)), I8="1", ZPE="1") == ("hip_gfx1201", "hip_gfx1201")


@pytest.mark.usefixtures("r9700")
@pytest.mark.parametrize("zero_point", ["0", "1"])
@pytest.mark.parametrize("name", ["mxfp4", "int4-lloyd"])
def test_an_r9700_takes_the_formats_of_e4m3_values_too(name: str, zero_point: str) -> None:
    assert chosen(weights(name), I8="0", ZPE=zero_point) == ("hip_gfx1201", "hip_gfx1201")


@pytest.mark.usefixtures("r9700")
def test_a_shape_without_a_kernel_runs_the_portable_one_and_says_why() -> None:
    choice = choose(weights(outputs=(32, 32, 32, 32)), mode(I8="1"))["prefill"]
    assert choice.path.name == "triton"
    assert "at most three rotations, not 4" in choice.declined["hip_gfx1201"]


@pytest.mark.parametrize(("name", "int8"), [("int4", "1"), ("int5", "1"), *((name, "0") for name in FORMS)])
def test_another_gpu_takes_the_portable_kernels(name: str, int8: str) -> None:
    assert chosen(weights(name), I8=int8) == ("triton", "triton")
    assert PATHS["triton"].form(weights(name, outputs=(64, 40))) == name


def test_what_no_path_takes_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(
        PluginError, match=r"decode band of mxfp4 by e4m3: hip_gfx1201: .*; triton: .* 64 or 128, not 32"
    ):
        choose(weights("mxfp4", group_size=32), mode(I8="0"))


@pytest.mark.parametrize(
    ("path", "given", "reason"),
    [
        ("hip_gfx1201", weights(device=CPU), "it runs on gfx1201, not on cpu"),
        ("hip_gfx1201", weights(), "it runs on gfx1201, not on cuda"),
        ("triton", weights(device=CPU), "it runs on a GPU, not on cpu"),
        ("cpu_int8", weights("mxfp4", CPU), "integer codes, not mxfp4"),
        ("cpu_reference", weights(), "it runs on a CPU, not on cuda:0"),
    ],
)
def test_a_path_asked_for_is_taken_or_the_layer_is_refused(path: str, given: Weights, reason: str) -> None:
    element = "0" if given.kind == "mxfp4" else "1"
    given_reason = "int8 rows, not e4m3" if (path, given.kind) == ("cpu_int8", "mxfp4") else reason
    with pytest.raises(PluginError, match=f"RADIANCE_PQ_PATH={path} cannot be taken: .*{given_reason}"):
        choose(given, mode(PATH=path, I8=element))


@pytest.mark.usefixtures("r9700")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (weights(dtype=torch.float16), "bfloat16 rows, not float16"),
        (weights(outputs=(32, 32, 32, 32)), "at most three rotations, not 4"),
    ],
)
def test_what_the_hip_kernels_do_not_take_is_refused_where_they_were_asked_for(given: Weights, reason: str) -> None:
    with pytest.raises(PluginError, match=f"RADIANCE_PQ_PATH=hip_gfx1201 cannot be taken: .*{reason}"):
        choose(given, mode(PATH="hip_gfx1201", I8="1"))


@pytest.mark.parametrize("rocm_there", [True, False])
def test_without_rocm_or_its_code_the_hip_path_says_so(
    rocm_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hip, "architecture", lambda device: "gfx1201")
    loader = SimpleNamespace(objects=tmp_path) if rocm_there else None
    monkeypatch.setattr(hip, "loader", lambda: loader or Loader("libabsent.so", tmp_path))
    hip.reason_against_launching.cache_clear()
    choice = choose(weights(), mode(I8="1"))["decode"]
    hip.reason_against_launching.cache_clear()
    assert choice.path.name == "triton"
    expected = "carries no gfx1201 code: decode.co" if rocm_there else "cannot load libabsent.so"
    assert expected in choice.declined["hip_gfx1201"]


@pytest.mark.parametrize("group_size", [64, 128])
def test_a_weight_without_rotations_is_multiplied_by_the_rows_as_they_are(group_size: int) -> None:
    made = random_codes("mxfp4", 256, 32, group_size, 0)
    plain = Mxfp4Projection(made.spec, made.codes, made.exponents)
    x = torch.randn(256 // group_size, group_size).bfloat16()
    assert torch.equal(walk(layout.build(hip.rotations_of(plain)), x, 1), x.double())


def test_bands_meet_at_the_decode_limit() -> None:
    linear = BandedLinear(weights(device=CPU), mode(I8="1", PATH="cpu_reference", DECODE_MAX_M="3"))
    assert [linear.band(count)[1].granularity for count in (1, 3, 4, 100)] == ["group", "group", "token", "token"]
    assert linear.path == "cpu_reference"
    assert set(PATHS) == {"cpu_reference", "cpu_int8", "triton", "hip_gfx1201"}


def test_the_knob_names_the_paths() -> None:
    with pytest.raises(PluginError, match="RADIANCE_PQ_PATH='hip' is not understood: use auto or cpu_reference or"):
        mode(PATH="hip")
