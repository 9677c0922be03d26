"""The producers' tables: every store hits 32 different banks, and the walk they describe is the rotation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip import layout
from tests.plugin.hip_cases import random_rotations


def fields(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unsigned [..., count] fields of int32 words, the lowest first."""
    shifts = torch.arange(count) * bits
    return (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def as_f16(halves: torch.Tensor) -> torch.Tensor:
    return halves.to(torch.int32).to(torch.int16).view(torch.float16).double()


def walk(table: torch.Tensor, x: torch.Tensor, krot: int) -> torch.Tensor:
    """float64 [G, g]: what lanes that follow the table do to x [G, g]; asserts that stores never conflict."""
    groups, size = x.shape
    values, row = size // 32, torch.arange(groups).unsqueeze(1)

    def store(slots: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        memory = torch.full((groups, size), float("nan"), dtype=torch.float64)
        for instruction in range(values):
            target = slots[..., instruction]
            assert all(len(set(banks)) == 32 for banks in (target % layout.BANK_WORDS).tolist())
            memory[row, target] = held[..., instruction]
        return memory

    def own(memory: torch.Tensor) -> torch.Tensor:
        return memory.view(groups, values, 32).transpose(1, 2)

    loaded = x.double().view(groups, 32, values)
    memory = store(fields(table[:, 0], 8, values), loaded.gather(2, fields(table[:, 1], 8, values)))
    scales = torch.cat([as_f16(fields(table[:, 2 + pair], 16, 2)) for pair in range(values // 2)], -1)
    held = own(memory) * scales
    place = 2 + values // 2
    for _ in range(krot):
        turned = []
        for pair in range(values // 2):
            cos, sin = as_f16(fields(table[:, place + 1 + pair], 16, 2)).unbind(-1)
            first, second = held[..., 2 * pair], held[..., 2 * pair + 1]
            turned += [cos * first + sin * second, cos * second - sin * first]
        memory = store(fields(table[:, place], 8, values), torch.stack(turned, -1))
        held, place = own(memory), place + 1 + values // 2
    return memory


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), group_size=st.sampled_from([64, 128]), krot=st.sampled_from([1, 8]))
def test_the_table_is_free_of_conflicts_and_rotates_as_the_formula_does(seed: int, group_size: int, krot: int) -> None:
    rotations = random_rotations(3 * group_size, group_size, seed, krot)
    table = layout.build(rotations)
    assert table.shape == (3, layout.table_words(group_size, krot), 32)
    x = torch.randn(3, group_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cos, sin = (angle.double() for angle in rotation.cosines(rotations.theta))
    scaled = x.view(1, -1) * rotations.channel_scales.double()
    expected = rotation.rotate(scaled, cos, sin, rotations.pairs, group_size)
    assert torch.equal(walk(table, x, krot), expected.view(3, group_size))


def test_a_table_with_a_wrong_slot_is_noticed() -> None:
    table = layout.build(random_rotations(64, 64, 0))
    table[0, 0, 5] ^= 1
    with pytest.raises(AssertionError):
        walk(table, torch.randn(1, 64), 8)


def test_other_group_sizes_are_refused() -> None:
    with pytest.raises(PluginError, match="64 or 128 channels, not 32"):
        layout.build(random_rotations(64, 32, 0))
