"""The linear against float64 of the dequantized weights, per activation mode."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.modes import Band
from tests.plugin.conftest import random_projection, relative

BF16_FLOOR = 1.7e-3
"""Relative error of rounding a Gaussian output to bf16 once; the kernels' own gate."""

ACTIVATION_ERROR = {
    ("int8", "group"): 8e-3,
    ("int8", "token"): 1.2e-2,
    ("e4m3", "group"): 3.5e-2,
    ("e4m3", "token"): 3.5e-2,
}
"""Bounds on the relative output error that quantizing Gaussian activations adds (measured: 7.2e-3,
9.5e-3, 3.0e-2, 3.1e-2). Dot products do not average relative e4m3 noise down."""

BANDS = [
    Band(element, granularity, zero_point)
    for (element, granularity), zero_point in itertools.product(ACTIVATION_ERROR, ("loop", "epilogue"))
]


def inputs(tokens: int = 128, width: int = 576) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(5)).bfloat16()


def same_codes_in_float64(x: torch.Tensor, projection, band: Band) -> torch.Tensor:
    """Dequantized activations times dequantized weights, no midpoint, no correction, in float64."""
    matrices = reference.prepare(projection).rotation
    quantized = reference.quantize_activations(rotation.rotate_groups(x.float(), matrices), band)
    values = (quantized.codes.double() * quantized.scales.double()).transpose(0, 1).flatten(1)
    return values @ projection.dequantize(torch.float64)


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_weight_path_is_at_the_bf16_floor(bits: int, band: Band) -> None:
    projection = random_projection(bits, inputs=576)
    y = reference.linear(inputs(), reference.prepare(projection), band).bfloat16()
    assert relative(y, same_codes_in_float64(inputs(), projection, band)) <= BF16_FLOOR


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_activation_error_of_each_mode_is_bounded(bits: int, band: Band) -> None:
    projection = random_projection(bits, inputs=576)
    y = reference.linear(inputs(), reference.prepare(projection), band)
    error = relative(y, reference.exact(inputs(), projection))
    bound = ACTIVATION_ERROR[band.element, band.granularity]
    assert bound / 2 < error < bound


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("band", [band for band in BANDS if band.element == "int8"], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, reference.TILE_ROWS + 1])
def test_int32_dots_give_what_the_f32_product_gives(bits: int, band: Band, tokens: int) -> None:
    prepared = reference.prepare(random_projection(bits))
    rotated = rotation.rotate_groups(inputs(tokens, 192).float(), prepared.rotation)
    activations = reference.quantize_activations(rotated, band)
    by_integer = reference.multiply_int8(activations, prepared.codes, prepared.scales, prepared.weight[192:], band)
    assert relative(by_integer, reference.multiply(activations, prepared.weight, band)) < 1e-6


def test_several_rotations_quantize_as_each_alone() -> None:
    first, second = (reference.prepare(random_projection(4, seed=seed)) for seed in (0, 1))
    x = inputs(70, 192).float()
    matrices = torch.stack([first.rotation, second.rotation])
    for band in BANDS:
        both = reference.quantize_activations(rotation.rotate_groups(x, matrices), band)
        for index, prepared in enumerate((first, second)):
            alone = reference.quantize_activations(rotation.rotate_groups(x, prepared.rotation), band)
            together = both.of(index)
            assert torch.equal(together.codes, alone.codes)
            assert torch.equal(together.scales, alone.scales)
            assert torch.equal(together.row_sums, alone.row_sums)


def test_int8_per_group_is_the_finest_mode() -> None:
    projection = random_projection(5, inputs=576)
    exact = reference.exact(inputs(), projection)
    prepared = reference.prepare(projection)
    error = {
        kind: relative(reference.linear(inputs(), prepared, Band(*kind, "loop")), exact) for kind in ACTIVATION_ERROR
    }
    assert min(error, key=error.get) == ("int8", "group")
    assert error["int8", "group"] < error["int8", "token"]


def test_the_two_zero_point_forms_differ_by_f16_row_sums_only() -> None:
    projection = random_projection(5, inputs=576)
    prepared = reference.prepare(projection)
    loop = reference.linear(inputs(), prepared, Band("int8", "group", "loop"))
    epilogue = reference.linear(inputs(), prepared, Band("int8", "group", "epilogue"))
    assert 0 < relative(epilogue, loop) < 2**-11


def test_the_correction_is_the_written_sum() -> None:
    """y = sum_g asg * (sc * dot(a, c - mid) - f16(sc * (zp - mid)) * rowsum), element by element."""
    projection = random_projection(4, inputs=128, outputs=32)
    prepared = reference.prepare(projection)
    x = inputs(3, 128)
    for zero_point in ("loop", "epilogue"):
        band = Band("int8", "group", zero_point)
        quantized = reference.quantize_activations(rotation.rotate_groups(x.float(), prepared.rotation), band)
        expected = np.zeros((3, 32))
        for m, n, g in itertools.product(range(3), range(32), range(2)):
            a = quantized.codes[g, m].double().numpy()
            asg = quantized.scales[g, m, 0].double().item()
            c = projection.codes[g * 64 : g * 64 + 64, n].double().numpy() - 8
            sc = projection.scales[g, n].double().item()
            zero_scale = float(np.float16(sc * (projection.zeros[g, n].item() - 8)))
            row_sum = asg * a.sum()
            if zero_point == "epilogue":
                row_sum = float(np.float16(np.float32(row_sum)))
            expected[m, n] += asg * sc * (a @ c) - zero_scale * row_sum
        y = reference.linear(x, prepared, band)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-6)


ROWS = arrays(np.float32, (2, 3, 64), elements=st.floats(-100, 100, width=32))


@given(ROWS)
def test_int8_codes_are_the_nearest_integers(values: np.ndarray) -> None:
    x = torch.from_numpy(values.copy())
    quantized = reference.quantize_activations(x.clone(), Band("int8", "group", "loop"))
    peak = np.abs(values).max(-1, keepdims=True)
    scale = peak / np.float32(127)
    safe = np.where(scale > 0, scale, np.float32(1))
    np.testing.assert_array_equal(quantized.scales.numpy(), scale)
    np.testing.assert_array_equal(quantized.codes.numpy(), np.clip(np.rint(values / safe), -127, 127))
    np.testing.assert_array_equal(quantized.row_sums.numpy(), quantized.codes.sum(2).numpy())


@given(ROWS)
def test_e4m3_codes_are_the_nearest_of_all_254_finite_values(values: np.ndarray) -> None:
    quantized = reference.quantize_activations(torch.from_numpy(values.copy()), Band("e4m3", "group", "loop"))
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[torch.isfinite(grid)]
    safe = torch.where(quantized.scales > 0, quantized.scales, 1.0)
    steps = (torch.from_numpy(values) / safe).clamp(-448, 448)
    nearest = (steps.unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((steps - quantized.codes).abs(), nearest)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_zero_inputs_give_zero_outputs(band: Band) -> None:
    projection = random_projection(5)
    y = reference.linear(torch.zeros(3, 192), reference.prepare(projection), band)
    assert torch.equal(y, torch.zeros(3, 96))


def test_per_token_scales_see_the_bf16_copy_of_the_row() -> None:
    x = torch.full((1, 1, 64), 1.001)
    per_token = reference.quantize_activations(x.clone(), Band("int8", "token", "loop"))
    assert per_token.scales.item() == pytest.approx(1.0 / 127)
