"""The HIP decode GEMM, executed lane by lane on the CPU, against float64 of the same codes."""

import itertools

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import decode, weights
from paroquant_gfx1201.kernels.hip.launch import Launch
from tests.plugin.hip_cases import (
    LONG,
    as_producer_leaves,
    assert_rounded_once,
    needs_emulation,
    only,
    quantized,
    random_codes,
)

KINDS = [
    ("int4", "int8"),
    ("int4", "e4m3"),
    ("int5", "int8"),
    ("int5", "e4m3"),
    ("mxfp4", "e4m3"),
    ("folded", "e4m3"),
    ("int4-lloyd", "e4m3"),
]
SHAPES = [  # K, group size, outputs of each projection, rows, shares of K
    (640, 128, (64,), 1, 1),
    (1152, 128, (32, 64), 17, 2),
    (576, 64, (32, 40, 96), 5, 3),
    (576, 64, (64,), 33, 1),
    (1280, 128, (96,), 64, 4),
    (192, 64, (32,), 20, 3),
]
FULL_SHAPES = [
    (inputs, group_size, (1024, 256, 256), rows, None)
    for inputs, group_size in ((5120, 128), (8704, 128), (576, 64))
    for rows in (1, 5, 8, 17, 40, 64)
]


def launch_for(
    name: str, element: str, inputs: int, group_size: int, outputs: tuple[int, ...], rows: int, shares: int | None
) -> tuple[Launch, torch.Tensor]:
    projections = [random_codes(name, inputs, count, group_size, seed) for seed, count in enumerate(outputs)]
    activations, expected = quantized(projections, rows, element, "group")
    rows_of = as_producer_leaves(activations, element)
    return decode.decode(*rows_of, weights.pack(projections), element, shares), expected


@needs_emulation
@pytest.mark.parametrize(("name", "element"), KINDS)
@pytest.mark.parametrize(("inputs", "group_size", "outputs", "rows", "shares"), FULL_SHAPES if LONG else SHAPES)
def test_outputs_are_float64_of_the_same_codes_rounded_once_to_bf16(
    inputs: int, group_size: int, outputs: tuple[int, ...], rows: int, shares: int | None, name: str, element: str
) -> None:
    launch, expected = launch_for(name, element, inputs, group_size, outputs, rows, shares)
    y, partial, arrived = simt.run(launch)
    assert_rounded_once(y.complete(), expected)
    partial.complete()
    assert not arrived.values.any()


def test_every_shape_of_the_grid_meets_every_kernel() -> None:
    kernels = {
        launch_for(name, element, *shape)[0].kernel for (name, element), shape in itertools.product(KINDS, SHAPES)
    }
    assert len(kernels) == len(KINDS) * 2 * len(decode.ROWS)


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("name", ["int4", "int5", "mxfp4"])
def test_packing_loses_no_code(name: str, group_size: int) -> None:
    projection = random_codes(name, 2 * group_size, 64, group_size, 0)
    packed = weights.pack([projection])
    blocks = group_size // 32
    words = packed.codes.transpose(2, 3).reshape(2, 4, 32, blocks, 2)
    lanes = torch.zeros(2, 4, 32, blocks, 4, 4, dtype=torch.long)
    for byte, four in itertools.product(range(4), range(4)):
        lanes[..., four, byte] = words[..., four // 2] >> (8 * byte + 4 * (four % 2)) & 15
        if name == "int5":
            plane = packed.plane.unsqueeze(-1).expand(2, 4, 32, blocks // 2, 2).reshape(2, 4, 32, blocks)
            offset = 4 * (torch.arange(blocks) % 2) + four
            lanes[..., four, byte] |= (plane >> (8 * byte + offset) & 1) << 4
    codes = projection.codes.T if name == "mxfp4" else projection.codes
    for k, n in itertools.product(range(0, 2 * group_size, 7), range(0, 64, 5)):
        group, inside = divmod(k, group_size)
        block, place = divmod(inside, 32)
        lane = n % 16 + 16 * (place // 16)
        assert lanes[group, n // 16, lane, block, place % 16 // 4, place % 4] == codes[k, n]


@pytest.mark.parametrize("name", ["int4", "int5", "mxfp4", "int4-lloyd"])
def test_a_projection_is_filled_up_with_outputs_that_are_dropped_again(name: str) -> None:
    packed = weights.pack([random_codes(name, 128, outputs, 128, 0) for outputs in (24, 32, 8)])
    assert (packed.outputs, packed.starts) == (96, (0, 32, 64))
    columns = torch.arange(96).expand(2, 96)
    assert packed.outputs_of(columns)[1].tolist() == [*range(24), *range(32, 64), *range(64, 72)]
    whole = weights.pack([random_codes(name, 128, 64, 128, 0)])
    assert whole.outputs_of(columns[:, :64]).data_ptr() == columns.data_ptr()


ONE_LOOK_UP = only("decode.hip", '#include "decode.h"\nDECODE(LLOYD, lloyd, E4M3, e4m3, 64, 16)\n')


@needs_emulation
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("permute_bytes(table[1], table[0], place)", "permute_bytes(table[0], table[1], place)"),
        ("half ? packed >> 4 : packed", "half ? packed : packed >> 4"),
        ("FORMAT == LLOYD ? 7.5f", "FORMAT == LLOYD ? 8.0f"),
    ],
    ids=["halves of the table swapped", "nibbles swapped", "another midpoint"],
)
def test_a_planted_fault_of_the_look_up_is_found(old: str, new: str) -> None:
    launch, expected = launch_for("int4-lloyd", "e4m3", 128, 64, (32, 32), 3, 1)
    assert_rounded_once(simt.run(launch, (ONE_LOOK_UP,))[0].complete(), expected)
    wrong = simt.run(launch, (ONE_LOOK_UP, simt.Edit("weights.h", old, new)))[0].complete()
    with pytest.raises(AssertionError):
        assert_rounded_once(wrong, expected)


def test_what_no_kernel_can_multiply_is_refused() -> None:
    with pytest.raises(PluginError, match="1 to 64 rows, not 65"):
        launch_for("int4", "int8", 128, 128, (32,), 65, 1)
    with pytest.raises(PluginError, match="the rows must be e4m3"):
        launch_for("mxfp4", "int8", 128, 128, (32,), 1, 1)
    with pytest.raises(PluginError, match="at most three rotations"):
        weights.pack([random_codes("int4", 128, 32, 128, seed) for seed in range(4)])
