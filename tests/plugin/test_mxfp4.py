"""MXFP4-PARO: round trip, documented layout, strict reading, and the linear over it."""

import pytest
import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import effective_weight, quantize_rotated
from paroquant_gfx1201.formats.catalog import read_spec
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.modes import Band
from paroquant_gfx1201.quantize_fp4 import requantize, to_nvfp4
from tests.plugin.conftest import random_projection, relative

SPEC = Mxfp4Spec(64, 8)
E4M3_BANDS = [Band("e4m3", granularity, "loop") for granularity in ("token", "group")]


def weight(inputs: int = 192, outputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3)) * 0.05


def projection(inputs: int = 192) -> Mxfp4Projection:
    like = random_projection(4, inputs)
    return quantize_rotated(weight(inputs), like.theta, like.channel_scales, like.pairs, SPEC)


def inputs(tokens: int = 128, width: int = 192) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(5)).bfloat16()


def test_reading_gives_back_what_was_written_in_the_documented_layout() -> None:
    tensors = projection().to_tensors("p")
    assert {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()} == {
        f"p.{name}": (shape, f"torch.{dtype}") for name, (shape, dtype) in SPEC.shapes(192, 96).items()
    }
    again = Mxfp4Projection.from_tensors("p", tensors, SPEC)
    assert torch.equal(again.dequantize(), projection().dequantize())
    low = tensors["p.weight"][3, 5].item() & 15
    magnitude = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[low & 7] * 2.0 ** (tensors["p.weight_scale"][3, 0].item() - 127)
    assert again.dequantize()[10, 3].item() == (-magnitude if low & 8 else magnitude)


def test_the_stored_weight_stays_near_the_original() -> None:
    assert 0.05 < relative(effective_weight(projection()), weight()) < 0.16


@pytest.mark.parametrize(
    ("suffix", "change", "says"),
    [
        ("weight", lambda t: t.to(torch.int8), "int8"),
        ("weight", lambda t: t[:, :-1], "expected uint8"),
        ("weight_scale", lambda t: t[:, :-1], "K=160 is not a multiple"),
        ("weight_scale", lambda t: t[0], "1 dimensions"),
        ("weight_scale", lambda t: torch.full_like(t, 255), "NaN scale"),
        ("theta", lambda t: t.bfloat16(), "bfloat16"),
        ("theta", lambda t: t * torch.inf, "holds"),
        ("channel_scales", lambda t: t * torch.nan, "nan"),
        ("pairs", lambda t: t * 0, "not a permutation"),
        ("pairs", None, "is missing"),
    ],
)
def test_a_wrong_tensor_is_named(suffix: str, change, says: str) -> None:
    tensors = projection().to_tensors("p")
    if change is None:
        del tensors[f"p.{suffix}"]
    else:
        tensors[f"p.{suffix}"] = change(tensors[f"p.{suffix}"])
    with pytest.raises(PluginError, match=rf"p\.{suffix}.*{says}"):
        Mxfp4Projection.from_tensors("p", tensors, SPEC)


def test_the_config_survives_the_round_trip_and_wrong_keys_are_named() -> None:
    config = Mxfp4Spec(128, 8, "ceil").to_config()
    assert read_spec(config) == Mxfp4Spec(128, 8, "ceil")
    for key, value in (("bits", 5), ("format", "nvfp4"), ("mxfp4_block", 16), ("krot", 3), ("scale_rule", "best")):
        with pytest.raises(PluginError, match=key):
            read_spec({**config, key: value})


@pytest.mark.parametrize("band", E4M3_BANDS, ids=str)
@pytest.mark.parametrize("rotated", [True, False])
def test_the_linear_is_at_the_bf16_floor_of_the_same_codes(band: Band, rotated: bool) -> None:
    made = projection() if rotated else requantize(to_nvfp4(weight(), "modelopt"), "mse", 64)
    prepared = reference.prepare(made)
    codes = reference.quantize_activations(rotation.rotate_groups(inputs().float(), prepared.rotation), band)
    values = (codes.codes.double() * codes.scales.double()).transpose(0, 1).flatten(1)
    expected = values @ made.dequantize(torch.float64)
    y = reference.linear(inputs(), prepared, band)
    assert relative(y.bfloat16(), expected) < 1.7e-3
    assert relative(y, expected) < 1e-6
    assert relative(y, reference.exact(inputs(), made)) < 3.5e-2


def test_a_weight_that_is_not_rotated_multiplies_the_inputs_as_they_are() -> None:
    made = requantize(to_nvfp4(weight(), "modelopt"), "ocp", 64)
    matrices = reference.prepare(made).rotation
    assert torch.equal(rotation.rotate_groups(inputs().float(), matrices).transpose(0, 1).flatten(1), inputs().float())
    with pytest.raises(PluginError, match="p has no rotation to write"):
        made.to_tensors("p")
