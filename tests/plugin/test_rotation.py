"""Pairings are disjoint perfect matchings; rotations are orthogonal and mean what they say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paroquant_gfx1201 import reference, rotation
from tests.plugin.conftest import random_projection, relative


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), group_size=st.sampled_from([64, 128]))
def test_every_rotation_is_a_perfect_matching_and_no_pair_returns(seed: int, group_size: int) -> None:
    pairs = rotation.greedy_pairs(group_size, group_size, 8, seed)
    seen = set()
    for row in pairs.tolist():
        assert sorted(row) == list(range(group_size))
        matched = {tuple(sorted(row[t : t + 2])) for t in range(0, group_size, 2)}
        assert not matched & seen
        seen |= matched


def test_a_stuck_greedy_matching_is_drawn_again() -> None:
    # With four channels and three rotations all six pairs are needed, which greedy rarely hits.
    for seed in range(50):
        pairs = rotation.greedy_pairs(4, 4, 3, seed)
        assert all(sorted(row) == [0, 1, 2, 3] for row in pairs.tolist())


def test_pairs_depend_on_the_seed_alone() -> None:
    first = rotation.greedy_pairs(128, 64, 8, 3)
    first[0, 0] = -1  # a caller's change must not reach the next caller
    second = rotation.greedy_pairs(128, 64, 8, 3)
    assert second[0, 0] != -1
    assert torch.equal(first[1:], second[1:])
    assert not torch.equal(second, rotation.greedy_pairs(128, 64, 8, 4))


def angles(seed: int, inputs: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    theta = torch.randn(8, inputs // 2, generator=torch.Generator().manual_seed(seed)).double()
    return theta.cos(), theta.sin(), rotation.greedy_pairs(inputs, 64, 8, seed)


def test_block_matrices_are_orthogonal() -> None:
    matrices = rotation.block_matrices(*angles(0), 64)
    identity = torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(matrices @ matrices.transpose(1, 2), identity.expand(2, 64, 64))


def test_block_matrices_do_what_the_written_formula_does() -> None:
    cos, sin, pairs = angles(1)
    x = torch.randn(5, 128, dtype=torch.float64)
    written = rotation.rotate(x, cos, sin, pairs, 64)
    by_matrix = rotation.rotate_groups(x, rotation.block_matrices(cos, sin, pairs, 64))
    torch.testing.assert_close(by_matrix.transpose(0, 1).flatten(1), written)


def test_one_rotation_follows_the_sign_convention() -> None:
    pairs = torch.arange(64, dtype=torch.int16).view(1, 64)
    cos, sin = torch.full((1, 32), 0.6), torch.full((1, 32), 0.8)
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 1.0, 2.0
    y = rotation.rotate(x, cos, sin, pairs, 64)[0, :2].tolist()
    assert y == pytest.approx([0.6 * 1 + 0.8 * 2, 0.6 * 2 - 0.8 * 1])


def test_rotating_activations_and_weights_leaves_the_product_alone() -> None:
    cos, sin, pairs = angles(2)
    x = torch.randn(7, 128, dtype=torch.float64)
    weight = torch.randn(32, 128, dtype=torch.float64)
    scale = torch.rand(1, 128, dtype=torch.float64) + 0.5
    rotated_x = rotation.rotate(x * scale, cos, sin, pairs, 64)
    rotated_weight = rotation.rotate(weight / scale, cos, sin, pairs, 64)
    assert relative(rotated_x @ rotated_weight.T, x @ weight.T) < 1e-14


def test_cosines_are_those_of_the_kernels_records() -> None:
    theta = torch.linspace(-3.2, 3.2, 1001).half()
    cos, sin = rotation.cosines(theta)
    assert torch.equal(cos, cos.half().float())
    assert torch.equal(sin, sin.half().float())
    assert (cos - theta.double().cos()).abs().max() <= 2**-12


@pytest.mark.parametrize("bits", [4, 5])
def test_f16_records_add_less_than_half_of_the_bf16_floor(bits: int) -> None:
    projection = random_projection(bits, inputs=576)
    x = torch.randn(64, 576).bfloat16()
    prepared = reference.prepare(projection)
    rotated = rotation.rotate_groups(x.float(), prepared.rotation).transpose(0, 1).flatten(1)
    y = rotated.double() @ projection.dequantize(torch.float64)
    assert 1e-4 < relative(y, reference.exact(x, projection)) < 6e-4
