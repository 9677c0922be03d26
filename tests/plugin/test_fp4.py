"""FP4 elements and block scales, against their definition and against compressed-tensors' own code."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import fp4
from paroquant_gfx1201.quantize_fp4 import exponents, requantize, to_mxfp4, to_nvfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
FLOATS = st.floats(-8, 8, width=32)
BLOCKS = arrays(np.float32, (4, 32), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False))


def error_at(block: np.ndarray, exponent: int) -> float:
    """Squared error of a block at an exponent, by trying every element."""
    step = 2.0**exponent
    size = np.minimum(np.abs(block.astype(np.float64)) / step, 6.0)
    rounded = MAGNITUDES[np.abs(size[:, None] - MAGNITUDES).argmin(1)] * step
    return float(((np.abs(block.astype(np.float64)) - rounded) ** 2).sum())


@given(arrays(np.float32, 64, elements=FLOATS))
def test_an_element_is_the_nearest_and_a_tie_goes_to_the_even_code(values: np.ndarray) -> None:
    codes = fp4.encode_e2m1(torch.from_numpy(values)).numpy()
    for value, code in zip(values, codes, strict=True):
        distance = np.abs(min(abs(float(value)), 6.0) - MAGNITUDES)
        nearest = np.flatnonzero(distance == distance.min())
        expected = nearest[0] if len(nearest) == 1 else next(n for n in nearest if n % 2 == 0)
        assert code & 7 == expected
        assert code >> 3 == np.signbit(value)


def test_every_code_survives_decoding_and_packing() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16) % 16
    assert torch.equal(fp4.encode_e2m1(fp4.decode_e2m1(codes)), codes)
    assert torch.equal(fp4.unpack_pairs(fp4.pack_pairs(codes)), codes)
    assert fp4.pack_pairs(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21


def test_nibbles_and_values_are_those_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = fp4.decode_e2m1(codes)
    assert torch.equal(helpers.pack_fp4_to_uint8(values), fp4.pack_pairs(codes))
    assert torch.equal(helpers.unpack_fp4_from_uint8(fp4.pack_pairs(codes), 8, 64, torch.float32), values)


def test_block_scales_are_powers_of_two_and_255_is_nan() -> None:
    scales = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    decoded = fp4.decode_e8m0(scales)
    expected = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert decoded[:-1].tolist() == expected
    assert decoded[-1].isnan()
    assert torch.equal(fp4.encode_e8m0(torch.tensor([-127, -126, -1, 0, 1, 127])), scales[:-1])
    assert fp4.encode_e8m0(torch.tensor([-500, 500])).tolist() == [0, 254]


@given(BLOCKS)
def test_the_ocp_rule_is_the_floor_of_the_logarithm(values: np.ndarray) -> None:
    found = exponents(torch.from_numpy(values), "ocp").tolist()
    for block, exponent in zip(values, found, strict=True):
        peak = float(np.abs(block).max())
        assert exponent == (-127 if peak == 0 else max(-127, int(np.floor(np.log2(peak))) - 2))


@given(BLOCKS)
def test_the_ceil_rule_is_the_smallest_that_clips_nothing(values: np.ndarray) -> None:
    for block, exponent in zip(values, exponents(torch.from_numpy(values), "ceil").tolist(), strict=True):
        peak = float(np.abs(block).max())
        if peak:
            assert 6 * 2.0**exponent >= peak
            assert exponent == -127 or peak > 6 * 2.0 ** (exponent - 1)


@given(BLOCKS)
def test_the_mse_rule_takes_the_better_of_two_exponents(values: np.ndarray) -> None:
    blocks = torch.from_numpy(values)
    pairs = zip(values, exponents(blocks, "ceil").tolist(), exponents(blocks, "mse").tolist(), strict=True)
    for block, ceiling, found in pairs:
        if np.abs(block).max():
            errors = {exponent: error_at(block, exponent) for exponent in {ceiling, max(-127, ceiling - 1)}}
            assert errors[found] <= min(errors.values()) * (1 + 1e-9)


def test_the_smallest_normal_number_has_the_smallest_scale_under_every_rule() -> None:
    blocks = torch.full((1, 32), 2.0**-126)
    assert [exponents(blocks, rule).item() for rule in ("ocp", "ceil", "mse")] == [-127, -127, -127]


def test_an_exact_power_boundary_is_decided_without_rounding() -> None:
    peaks = torch.tensor([6.0, 6.0000005, 3.0, 12.0, 2.0**-130])
    blocks = torch.zeros(5, 32)
    blocks[:, 3] = peaks
    assert exponents(blocks, "ceil").tolist() == [0, 1, -1, 1, -127]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(PluginError, match="rule 'best' is not known"):
        exponents(torch.zeros(1, 32), "best")


@pytest.mark.parametrize("rule", ["ocp", "ceil", "mse"])
def test_requantizing_loses_what_the_format_allows_and_mse_loses_least(rule: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * 0.05
    source = to_nvfp4(weight, "modelopt")
    values = source.dequantize()
    error = (requantize(source, rule, 128).dequantize().T - values).norm() / values.norm()
    assert 0.05 < error < 0.2
    best = (requantize(source, "mse", 128).dequantize().T - values).norm() / values.norm()
    assert best <= error


def test_values_that_mxfp4_holds_come_back_unchanged() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8, generator=generator)
    codes[:, ::32] = 7  # each block reaches 6, so that one exponent is the only right one
    scales = torch.randint(100, 150, (8, 2), dtype=torch.uint8, generator=generator)
    values = fp4.decode_e2m1(codes).unflatten(1, (-1, 32)) * fp4.decode_e8m0(scales).unsqueeze(-1)
    again, exponent = to_mxfp4(values.flatten(1), "mse")
    assert torch.equal(exponent, scales)
    assert torch.equal(fp4.decode_e2m1(again), fp4.decode_e2m1(codes))


def test_a_block_of_zeros_has_the_smallest_scale() -> None:
    codes, scales = to_mxfp4(torch.zeros(2, 64), "ocp")
    assert not codes.any()
    assert not scales.any()
