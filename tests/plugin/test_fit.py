"""The fit lowers the calibrated output error and stores what it says it stores."""

import pytest
import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.fit import (
    effective_weight,
    fit_projection,
    quantize_rotated,
    relative_output_error,
)
from paroquant_gfx1201.formats.spec import FormatSpec
from tests.plugin.conftest import random_projection, relative

SPEC = FormatSpec(4, 64, 8)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight with outlier channels and correlated inputs with a few loud ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator) * 0.05
    weight[:, ::16] *= 6
    x = torch.randn(1024, 32, generator=generator) @ torch.randn(32, 128, generator=generator)
    x[:, 5::32] *= 10
    return weight, x.T @ x, rotation.greedy_pairs(128, 64, 8, 0)


def test_the_fit_beats_the_same_grid_without_rotation() -> None:
    weight, gram, pairs = problem()
    fitted = fit_projection(weight, gram, pairs, SPEC, steps=25, seed=0)
    assert fitted.error < 0.75 * fitted.plain_error
    assert fitted.projection.theta.abs().max() > 0.05


def test_no_steps_store_identity_and_its_error_is_the_plain_one() -> None:
    weight, gram, pairs = problem()
    fitted = fit_projection(weight, gram, pairs, SPEC, steps=0, seed=0)
    assert not fitted.projection.theta.any()
    assert (fitted.projection.channel_scales == 1).all()
    assert fitted.error == pytest.approx(fitted.plain_error, rel=1e-3)


def test_the_fit_is_a_function_of_its_arguments() -> None:
    weight, gram, pairs = problem()
    first, second = (fit_projection(weight, gram, pairs, SPEC, 5, 3).projection for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.theta, second.theta)


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.12), (5, 0.06)])
def test_the_stored_weight_stays_near_the_original(bits: int, bound: float) -> None:
    spec = FormatSpec(bits, 64, 8)
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(1)) * 0.05
    like = random_projection(bits)
    stored = quantize_rotated(weight, like.theta, like.channel_scales, like.pairs, spec)
    assert bound / 3 < relative(effective_weight(stored), weight) < bound


def test_output_error_is_the_error_of_outputs() -> None:
    x = torch.randn(50, 24, dtype=torch.float64)
    weight, other = torch.randn(2, 8, 24, dtype=torch.float64)
    error = relative_output_error(weight, other, x.T @ x)
    assert error == pytest.approx(relative(x @ other.T, x @ weight.T))
