"""The HIP producers, executed lane by lane on the CPU, give the reference's codes, scales and row sums bit for bit."""

import itertools

import pytest
import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import layout, producer
from paroquant_gfx1201.kernels.hip import rows as orders
from paroquant_gfx1201.modes import Band
from tests.plugin.hip_cases import LONG, as_bytes, needs_emulation, random_rotations, rotate_exactly

pytestmark = needs_emulation

MODES = list(itertools.product(("int8", "e4m3"), ("group", "token")))

SHAPES = [  # K, group size, rotations, rows: each value of the full grid below at least once
    (128, 128, 1, 200),
    (576, 64, 2, 17),
    (576, 64, 3, 64),
    (5120, 128, 1, 40),
    (5120, 128, 3, 5),
    (8704, 128, 2, 8),
    (17408, 128, 1, 1),
]
FULL_SHAPES = [
    (inputs, 64 if inputs == 576 else 128, rotations, rows)
    for inputs in (128, 576, 5120, 8704, 17408)
    for rotations in (1, 2, 3)
    for rows in (1, 5, 8, 17, 40, 64, 200)
]


def adversarial_rows(count: int, inputs: int, seed: int) -> torch.Tensor:
    """bf16 [count, K]: random, then rows of zeros, denormals, ties, a huge range, and the largest magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    channel = torch.arange(inputs)
    kinds = [
        torch.zeros(inputs),
        x[0] * 1e-39,
        torch.where(channel % 2 == 0, 127.0, (channel % 255 - 127) * 0.5),  # halves under an int8 scale of one
        torch.where(channel % 2 == 0, 448.0, 2.0 ** (channel % 20 - 12)),  # e4m3 values and below the smallest
        2.0 ** (channel % 200 - 120).float(),
        torch.where(channel % 2 == 0, 1e36, -3e35),
        x[0] * 2.0**-120,
    ]
    for index, kind in enumerate(kinds):
        if index + 1 < count:
            x[index + 1] = kind
    return x.bfloat16()


def compare(
    x: torch.Tensor, rotations: list[layout.Rotations], element: str, granularity: str, tiles: bool = False
) -> None:
    table = torch.stack([layout.build(each) for each in rotations])
    krot = len(rotations[0].theta)
    launch = producer.quantize_rows(x, table, element, granularity, rotations[0].group_size, krot, tiles)
    codes, scales, row_sums = (written.complete() for written in simt.run(launch))
    if tiles:
        assert launch.kernel.endswith("_tiles")
        held, codes = codes, orders.from_tiles(codes, len(x))
        assert torch.equal(orders.to_tiles(codes), held), "rows past the last are not zeros"
    for index, each in enumerate(rotations):
        rotated = rotate_exactly(x, each)
        assert torch.isfinite(rotated).all()
        expected = reference.quantize_activations(rotated, Band(element, granularity, "loop"))
        plain = as_bytes(expected.codes + 0.0, element)
        plain[plain == 0x80] = 0  # the reference's e4m3 keeps the sign of a zero
        assert torch.equal(codes[index], plain)
        assert torch.equal(scales[index], expected.scales.squeeze(-1))
        assert torch.equal(row_sums[index], expected.row_sums)


@pytest.mark.parametrize(("element", "granularity"), MODES)
@pytest.mark.parametrize(("inputs", "group_size", "count", "rows"), FULL_SHAPES if LONG else SHAPES)
def test_codes_scales_and_row_sums_are_the_references(
    inputs: int, group_size: int, count: int, rows: int, element: str, granularity: str
) -> None:
    rotations = [random_rotations(inputs, group_size, seed) for seed in range(count)]
    compare(adversarial_rows(rows, inputs, rows), rotations, element, granularity)


@pytest.mark.parametrize(("element", "granularity"), [("int8", "group"), ("int8", "token"), ("e4m3", "token")])
@pytest.mark.parametrize(
    ("inputs", "group_size", "count", "rows", "krot"),
    [(576, 64, 2, 17, 8), (384, 128, 3, 40, 8), (5120, 128, 1, 1, 8), (128, 64, 1, 33, 1), (256, 128, 2, 15, 1)],
)
def test_tiles_hold_the_same_codes_and_zeros_past_the_last_row(
    inputs: int, group_size: int, count: int, rows: int, krot: int, element: str, granularity: str
) -> None:
    rotations = [random_rotations(inputs, group_size, seed, krot) for seed in range(count)]
    compare(adversarial_rows(rows, inputs, rows), rotations, element, granularity, tiles=True)


@pytest.mark.parametrize(("element", "granularity"), MODES)
@pytest.mark.parametrize("group_size", [64, 128])
def test_ties_go_to_even_where_the_rotation_changes_nothing(group_size: int, element: str, granularity: str) -> None:
    rotations = [random_rotations(2 * group_size, group_size, 0, still=True)]
    compare(adversarial_rows(9, 2 * group_size, 1), rotations, element, granularity)


@pytest.mark.parametrize(("element", "granularity"), MODES)
@pytest.mark.parametrize("group_size", [64, 128])
def test_a_checkpoint_with_one_rotation_is_served_too(group_size: int, element: str, granularity: str) -> None:
    rotations = [random_rotations(3 * group_size, group_size, seed, krot=1) for seed in range(2)]
    compare(adversarial_rows(9, 3 * group_size, 2), rotations, element, granularity)


def test_rows_of_another_width_or_type_are_refused() -> None:
    table = layout.build(random_rotations(128, 128, 0)).unsqueeze(0)
    with pytest.raises(PluginError, match=r"rows of K=128, not torch\.bfloat16 of K=256"):
        producer.quantize_rows(torch.zeros(1, 256).bfloat16(), table, "int8", "group", 128, 8)
    with pytest.raises(PluginError, match=r"not torch\.float32"):
        producer.quantize_rows(torch.zeros(1, 128), table, "int8", "group", 128, 8)
    with pytest.raises(PluginError, match="e4m3 rows with a scale per group in tiles"):
        producer.quantize_rows(torch.zeros(1, 128).bfloat16(), table, "e4m3", "group", 128, 8, tiles=True)
    long = torch.zeros(1, 192, layout.table_words(128, 8), 32, dtype=torch.int32)
    with pytest.raises(PluginError, match="K=24576 does not fit LDS"):
        producer.quantize_rows(torch.zeros(1, 192 * 128).bfloat16(), long, "int8", "token", 128, 8)
