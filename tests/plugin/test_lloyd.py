"""The codebook: on its grid, no worse than uniform, and what scipy's k-means and brute force say."""

import numpy as np
import pytest
import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.fit import quantize_rotated, rotated_importance
from paroquant_gfx1201.formats.projection import Projection, check_levels
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.lloyd import fit_levels, level_grid, nearest, quantize_lloyd
from paroquant_gfx1201.quantize import quantize
from tests.plugin.conftest import random_projection, relative

SPEC = FormatSpec(4, 64, 8, lloyd=True)


def gaussian(rows: int = 96, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) * 0.05


def test_the_grid_is_every_e4m3_value_from_minus_eight_to_below_eight() -> None:
    grid = level_grid() - 7.5
    assert grid[0] == -8
    assert grid[-1] == 7.5
    assert (np.diff(grid) > 0).all()
    assert torch.equal(torch.from_numpy(grid).to(torch.float8_e4m3fn).double(), torch.from_numpy(grid))
    assert len(grid) == 2 * 80  # 80 magnitudes below 8; 0 once, and -8 for it


def test_fitted_levels_are_valid_and_beat_the_integers() -> None:
    u = gaussian().flatten() * 40 + 7.5
    levels = fit_levels(u, torch.ones_like(u))
    check_levels("p.levels", levels)
    error = ((levels[nearest(u, levels).long()] - u) ** 2).sum()
    uniform = ((u.round().clamp(0, 15) - u) ** 2).sum()
    assert error < 0.9 * uniform


def test_the_fit_comes_within_three_percent_of_unconstrained_k_means() -> None:
    from scipy.cluster.vq import kmeans2

    u = (gaussian().flatten() * 40 + 7.5).double()
    levels = fit_levels(u, torch.ones_like(u)).double()
    ours = ((levels[nearest(u, levels).long()] - u) ** 2).sum().item()
    free, label = kmeans2(u.numpy()[:, None], np.arange(16.0)[:, None], iter=200, minit="matrix")
    theirs = ((free[label, 0] - u.numpy()) ** 2).sum()
    assert ours < 1.03 * theirs


def test_weights_pull_levels_towards_what_matters() -> None:
    u = torch.cat([torch.linspace(0, 15, 1000), torch.full((200,), 3.4)])
    loud = torch.where(u == torch.tensor(3.4), 1e4, 1.0)
    near = (fit_levels(u, loud) - 3.4).abs().min()
    assert near <= (fit_levels(u, torch.ones_like(u)) - 3.4).abs().min()
    assert near < 0.13  # half the grid's spacing between 3 and 4


def test_equal_bytes_less_error_than_the_uniform_grid() -> None:
    weight = gaussian()
    codes, zeros, scales, levels = quantize_lloyd(weight, 64, torch.ones(256))
    values = levels[codes.long()].unflatten(0, (-1, 64)) - zeros.float().unsqueeze(1)
    ours = relative((values * scales.float().unsqueeze(1)).flatten(0, 1).T, weight)
    codes, zeros, scales = quantize(weight, 15, 64)
    steps = codes.float().unflatten(0, (-1, 64)) - zeros.float().unsqueeze(1)
    uniform = relative((steps * scales.float().unsqueeze(1)).flatten(0, 1).T, weight)
    assert ours < 0.93 * uniform


def test_the_importance_of_a_rotated_input_is_its_mean_square() -> None:
    like = random_projection(4, 128)
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, 1, 128)
    matrices = rotation.block_matrices(*rotation.cosines(like.theta), like.pairs, 64)
    rotated = rotation.rotate_groups(x * like.channel_scales.float(), matrices)
    expected = rotated.square().sum(1).flatten()
    torch.testing.assert_close(rotated_importance(x.T @ x, matrices, like.channel_scales), expected, rtol=1e-4, atol=0)


def lloyd_projection() -> Projection:
    like = random_projection(4)
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(8)) * 0.05
    return quantize_rotated(weight, like.theta, like.channel_scales, like.pairs, SPEC)


def test_levels_are_stored_beside_the_int4_tensors_and_read_back() -> None:
    projection = lloyd_projection()
    tensors = projection.to_tensors("p")
    assert tensors["p.levels"].dtype == torch.float32
    assert set(tensors) == {f"p.{name}" for name in SPEC.shapes(192, 96)}
    again = Projection.from_tensors("p", tensors, SPEC)
    assert torch.equal(again.dequantize(), projection.dequantize())
    table = projection.levels[projection.codes.long()].unflatten(0, (-1, 64))
    expected = (table - projection.zeros.float().unsqueeze(1)) * projection.scales.float().unsqueeze(1)
    assert torch.equal(projection.dequantize(), expected.flatten(0, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda levels: levels + 0.01, "not 7.5 plus an e4m3 value"),
        (lambda levels: levels.flip(0), "does not ascend"),
        (lambda levels: levels * torch.nan, "nan"),
        (lambda levels: levels[:15], "float32 \\[15\\]"),
        (lambda levels: levels.half(), "float16"),
        (lambda levels: levels + 16, "not 7.5 plus"),
    ],
)
def test_levels_that_a_kernel_cannot_hold_are_refused(change, says: str) -> None:
    tensors = lloyd_projection().to_tensors("p")
    tensors["p.levels"] = change(tensors["p.levels"])
    with pytest.raises(PluginError, match=rf"p\.levels.*{says}"):
        Projection.from_tensors("p", tensors, SPEC)
