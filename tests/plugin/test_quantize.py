"""Round-to-nearest: the formula, its error bound, and the differentiable twin."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paroquant_gfx1201.quantize import fake_quantize, quantize

WEIGHTS = arrays(
    np.float32,
    (3, 128),
    elements=st.floats(-8, 8, width=32, allow_subnormal=False),
)


def dequantize(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = codes.double().view(-1, 64, codes.shape[1])
    return ((groups - zeros.double()[:, None]) * scales.double()[:, None]).flatten(0, 1).T


@given(WEIGHTS, st.sampled_from([15, 31]))
def test_codes_follow_the_written_formula(values: np.ndarray, levels: int) -> None:
    codes, zeros, scales = quantize(torch.from_numpy(values), levels, 64)
    for n in range(3):
        for group in range(2):
            w = values[n, group * 64 : group * 64 + 64]
            step = (w.max() - w.min()) / np.float32(levels)
            scale = np.float32(np.float16(np.clip(step, 1e-5, 65504.0)))
            zero = np.clip(-np.round(w.min() / scale), 0, levels)
            expected = np.clip(np.round(w / scale) + zero, 0, levels)
            assert scales[group, n].item() == scale
            assert zeros[group, n].item() == zero
            np.testing.assert_array_equal(codes[group * 64 : group * 64 + 64, n], expected)


@given(WEIGHTS, st.sampled_from([15, 31]))
def test_a_group_that_spans_zero_errs_by_at_most_one_step(values: np.ndarray, levels: int) -> None:
    # Half a step of rounding, and up to half a step where the rounded zero point clips an end.
    values[:, ::64], values[:, 1::64] = 1.0, -1.0
    weight = torch.from_numpy(values)
    codes, zeros, scales = quantize(weight, levels, 64)
    step = scales.double().T.repeat_interleave(64, 1)
    error = (dequantize(codes, zeros, scales) - weight.double()).abs()
    # f16 rounding of the scale moves the far end by at most levels * 2**-11 of a step.
    assert (error <= step * (1 + levels * 2**-11)).all()


@pytest.mark.parametrize(("levels", "bound"), [(15, 0.10), (31, 0.05)])
def test_gaussian_weights_lose_what_their_bits_allow(levels: int, bound: float) -> None:
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)) * 0.03
    codes, zeros, scales = quantize(weight, levels, 64)
    error = (dequantize(codes, zeros, scales) - weight).norm() / weight.norm()
    assert bound / 2 < error < bound


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_a_constant_group_stays_finite(value: float) -> None:
    codes, zeros, scales = quantize(torch.full((2, 64), value), 15, 64)
    assert torch.isfinite(dequantize(codes, zeros, scales)).all()
    assert (scales > 0).all()


@given(WEIGHTS, st.sampled_from([15, 31]))
def test_fake_quantize_is_quantize_then_dequantize(values: np.ndarray, levels: int) -> None:
    weight = torch.from_numpy(values)
    stored = dequantize(*quantize(weight, levels, 64)).float()
    fake = fake_quantize(weight.view(3, 2, 64), levels).flatten(1)
    torch.testing.assert_close(fake, stored, rtol=2e-6, atol=2e-6)


def test_gradients_pass_through_the_rounding() -> None:
    weight = torch.randn(4, 2, 64, requires_grad=True)
    fake_quantize(weight, 15).sum().backward()
    assert weight.grad is not None
    assert (weight.grad.flatten(0, 1) == 1).float().mean() > 0.9
