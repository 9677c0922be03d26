"""CHECK mode finds a wrong product, ignores inputs that prove nothing, and keeps the worst."""

import pytest
import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.check import NOT_FINITE, Checker
from paroquant_gfx1201.fit import quantize_rotated
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.modes import Band
from tests.plugin.conftest import random_projection

SPECS = [FormatSpec(4, 64, 8), FormatSpec(5, 64, 8), FormatSpec(4, 64, 8, lloyd=True), Mxfp4Spec(64, 8)]
BAND = Band("e4m3", "group", "loop")


def layer(spec):
    like = random_projection(4)
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(8)) * 0.05
    return quantize_rotated(weight, like.theta, like.channel_scales, like.pairs, spec)


def quantized(prepared, tokens: int, band: Band = BAND):
    x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(5))
    return reference.quantize_activations(rotation.rotate_groups(x, prepared.rotation), band)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.format)
@pytest.mark.parametrize("band", [BAND, Band("e4m3", "token", "loop"), Band("e4m3", "token", "epilogue")], ids=str)
def test_float64_of_the_same_codes_is_what_the_codec_means(spec, band: Band) -> None:
    made = layer(spec)
    prepared = reference.prepare(made)
    activations = quantized(prepared, 40, band)
    values = (activations.codes.double() * activations.scales.double()).transpose(0, 1).flatten(1)
    expected = values @ made.dequantize(torch.float64)
    got = reference.same_codes(activations, prepared.weight, prepared.offsets, chunk_bytes=192 * 8 * 10)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.format)
def test_a_right_product_is_at_the_floor_and_a_wrong_one_is_not(spec) -> None:
    prepared = reference.prepare(layer(spec))
    activations = quantized(prepared, 300)
    y = reference.multiply(activations, prepared.weight, BAND).bfloat16()
    checker = Checker()
    assert checker.compare("path", "a", y, activations, prepared.weight, prepared.offsets)
    good = checker.document()["path"]
    assert 1e-4 < good["relative_error"] < 2.5e-3
    assert good["compared_rows"] == 256
    assert not checker.compare("path", "a", y, activations, prepared.weight, prepared.offsets)
    y[7, 3] += 1
    assert checker.compare("path", "b", y, activations, prepared.weight, prepared.offsets)
    bad = checker.document()["path"]
    assert bad["relative_error"] > 5e-3
    assert (bad["layer"], bad["layers"], bad["compared_calls"]) == ("b", 2, 3)


def test_not_a_number_is_the_worst_and_stays() -> None:
    prepared = reference.prepare(layer(SPECS[0]))
    activations = quantized(prepared, 4)
    y = reference.multiply(activations, prepared.weight, BAND)
    checker = Checker()
    for broken in (True, False):
        out = y.clone()
        if broken:
            out[0, 0] = torch.nan
        checker.compare("path", "a", out, activations, prepared.weight, prepared.offsets)
    assert checker.document()["path"]["relative_error"] == NOT_FINITE


def test_rows_of_zeros_prove_nothing_and_are_left_out() -> None:
    prepared = reference.prepare(layer(SPECS[0]))
    nothing = reference.quantize_activations(torch.zeros(3, 5, 64), BAND)
    checker = Checker()
    assert not checker.compare("path", "a", torch.ones(5, 96), nothing, prepared.weight, prepared.offsets)
    assert checker.document() == {}
