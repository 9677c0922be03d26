"""The HIP prefill GEMM, executed lane by lane on the CPU, against float64 of the same codes."""

import itertools

import pytest
import torch
from torch.nn.functional import pad

from paroquant_gfx1201 import reference
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import prefill, rows, weights
from paroquant_gfx1201.kernels.hip.launch import Launch
from paroquant_gfx1201.modes import Band
from tests.plugin.conftest import relative
from tests.plugin.hip_cases import (
    BF16_FLOOR,
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
EPILOGUES = [
    ("int4", "int8", "group"),
    ("int4", "int8", "token"),
    ("int4", "e4m3", "token"),
    ("int5", "int8", "group"),
    ("int5", "int8", "token"),
    ("int5", "e4m3", "token"),
    ("int4-lloyd", "e4m3", "token"),
]
SHAPES = [  # K, group size, outputs of each projection, rows
    (384, 128, (96, 72, 24), 130),
    (320, 64, (64, 96), 40),
]
TILED = [
    *((name, element, "token") for name, element in KINDS),
    *((name, "int8", "group") for name in ("int4", "int5")),
]
TILED_SHAPES = [
    (256, 128, (32, 64), 17),
    (192, 64, (64, 32), 81),  # the second wave of rows has tiles past the last
]
FEW = 20_000
"""Outputs whose error still scatters about the floor."""
F16_FACTORS = 4e-4
"""Relative error of row sums and zero scales rounded to f16, where zero points are equally likely."""
EPILOGUE_SHAPES = [
    (1088, 64, (96, 40), 200),  # 17 groups: one more than a matrix instruction takes
    (256, 128, (40,), 17),
]
FULL_SHAPES = [
    (inputs, group_size, (256, 64, 128), rows)
    for inputs, group_size in ((5120, 128), (576, 64))
    for rows in (65, 200, 300)
]


def launch_for(
    name: str,
    element: str,
    granularity: str,
    inputs: int,
    group_size: int,
    outputs: tuple[int, ...],
    count: int,
    tiles: bool = False,
) -> tuple[Launch, torch.Tensor]:
    projections = [random_codes(name, inputs, width, group_size, seed) for seed, width in enumerate(outputs)]
    activations, expected = quantized(projections, count, element, granularity)
    codes, *rest = as_producer_leaves(activations, element)
    codes = rows.to_tiles(codes) if tiles else codes
    return prefill.prefill(codes, *rest, weights.pack(projections), element), expected


@needs_emulation
@pytest.mark.parametrize(("name", "element"), KINDS)
@pytest.mark.parametrize("granularity", ["group", "token"])
@pytest.mark.parametrize(("inputs", "group_size", "outputs", "count"), FULL_SHAPES if LONG else SHAPES)
def test_outputs_are_float64_of_the_same_codes_rounded_once_to_bf16(
    inputs: int, group_size: int, outputs: tuple[int, ...], count: int, granularity: str, name: str, element: str
) -> None:
    launch, expected = launch_for(name, element, granularity, inputs, group_size, outputs, count)
    (y,) = simt.run(launch)
    assert_rounded_once(y.complete(), expected)


@needs_emulation
@pytest.mark.parametrize(("name", "element", "granularity"), TILED)
@pytest.mark.parametrize(("inputs", "group_size", "outputs", "count"), FULL_SHAPES if LONG else TILED_SHAPES)
def test_rows_in_tiles_give_the_same_bits(
    inputs: int, group_size: int, outputs: tuple[int, ...], count: int, name: str, element: str, granularity: str
) -> None:
    shape = (name, element, granularity, inputs, group_size, outputs, count)
    plain, tiled = (launch_for(*shape, tiles=tiles)[0] for tiles in (False, True))
    assert tiled.kernel == f"{plain.kernel}_tiles"
    assert torch.equal(simt.run(tiled)[0].complete(), simt.run(plain)[0].complete())


def with_epilogue(
    name: str, element: str, granularity: str, inputs: int, group_size: int, outputs: tuple[int, ...], count: int
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The launch, float64 [M, N] of the same codes, and the same with row sums and zero scales rounded to f16."""
    projections = [random_codes(name, inputs, width, group_size, seed) for seed, width in enumerate(outputs)]
    activations, expected = quantized(projections, count, element, granularity)
    rounded = []
    for projection, part in zip(projections, activations, strict=True):
        weight = reference.prepare(projection).weight.double()
        codes = (part.codes.double() * part.scales.double()).transpose(0, 1).flatten(1)
        sums = reference.row_sums(part, Band(element, granularity, "epilogue")).double()
        correction = sums @ weight[inputs:] * (part.scales[0].double() if granularity == "token" else 1.0)
        y = codes @ weight[:inputs] + correction
        rounded.append(pad(y, (0, weights.filled(y.shape[1]) - y.shape[1])))
    packed = weights.pack(projections, epilogue=True)
    codes, *rest = as_producer_leaves(activations, element)
    launch = prefill.prefill(rows.to_tiles(codes), *rest, packed, element, "epilogue")
    return launch, expected, torch.cat(rounded, 1)


@needs_emulation
@pytest.mark.parametrize(("name", "element", "granularity"), EPILOGUES)
@pytest.mark.parametrize(("inputs", "group_size", "outputs", "count"), FULL_SHAPES if LONG else EPILOGUE_SHAPES)
def test_the_zero_point_in_the_epilogue_costs_the_rounding_of_its_f16_factors(
    inputs: int, group_size: int, outputs: tuple[int, ...], count: int, name: str, element: str, granularity: str
) -> None:
    launch, expected, rounded = with_epilogue(name, element, granularity, inputs, group_size, outputs, count)
    y = simt.run(launch)[0].complete()
    assert_rounded_once(y, rounded)
    assert relative(y, expected) <= BF16_FLOOR or expected.numel() < FEW
    assert relative(rounded, expected) <= F16_FACTORS


ONE_EPILOGUE = only("prefill.hip", '#include "prefill.h"\nPREFILL_EPILOGUE(INT5, int5, INT8, int8, 64, group, false)\n')


@needs_emulation
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("prefill.h", "row_sums[place] * (TOKEN ? 1.0f : scales[place])", "row_sums[place]"),
        ("prefill.h", "zeros[(static_cast<long>(tile + t) * 16", "zeros[(static_cast<long>(tile) * 16"),
        ("weights.h", "(128 - midpoint) *", "(127 - midpoint) *"),
        ("prefill.h", "group < groups ? group : groups - 1", "group"),
    ],
    ids=["row sums not scaled", "zero points of other outputs", "another midpoint", "groups past the last"],
)
def test_a_planted_fault_of_the_epilogue_is_found(file: str, old: str, new: str) -> None:
    launch, _, rounded = with_epilogue("int5", "int8", "group", 192, 64, (32, 32), 40)
    assert_rounded_once(simt.run(launch, (ONE_EPILOGUE,))[0].complete(), rounded)
    with pytest.raises((AssertionError, simt.EmulationError)):
        assert_rounded_once(simt.run(launch, (ONE_EPILOGUE, simt.Edit(file, old, new)))[0].complete(), rounded)


def test_an_epilogue_without_a_kernel_or_without_its_terms_is_refused() -> None:
    with pytest.raises(PluginError, match="by e4m3 rows with a scale per group"):
        with_epilogue("int5", "e4m3", "group", 128, 64, (32,), 3)
    codes, *rest = launch_for("int5", "int8", "token", 128, 64, (32,), 3)[0].arguments[:3]
    plain = weights.pack([random_codes("int5", 128, 32, 64, 0)])
    with pytest.raises(PluginError, match="packed without the terms of the epilogue"):
        prefill.prefill(rows.to_tiles(codes), *rest, plain, "int8", "epilogue")
    with pytest.raises(PluginError, match="the epilogue read rows in tiles"):
        prefill.prefill(codes, *rest, plain, "int8", "epilogue")


def test_tiles_of_other_rows_or_without_a_kernel_are_refused() -> None:
    codes, *rest = launch_for("int5", "int8", "token", 128, 64, (32,), 17)[0].arguments[:3]
    weight = weights.pack([random_codes("int5", 128, 32, 64, 0)])
    with pytest.raises(PluginError, match=r"\[1, 1, 4, 32, 16\] are not of 17 rows"):
        prefill.prefill(rows.to_tiles(codes[:, :16]), *rest, weight, "int8")
    with pytest.raises(PluginError, match="e4m3 rows with a scale per group in tiles"):
        launch_for("int5", "e4m3", "group", 128, 64, (32,), 3, tiles=True)
    assert torch.equal(rows.from_tiles(rows.to_tiles(codes), 17), codes)


def test_one_group_is_one_scale_a_token_in_tiles_too() -> None:
    launch, _ = launch_for("int5", "e4m3", "token", 64, 64, (32,), 3, tiles=True)
    assert launch.kernel == "prefill_int5_e4m3_g64_token_tiles"


ONE = only("prefill.hip", '#include "prefill.h"\nPREFILL(INT5, int5, INT8, int8, 64, group, false, ROW_MAJOR, )\n')
ONE_TILED = only(
    "prefill.hip", '#include "prefill.h"\nPREFILL(INT5, int5, INT8, int8, 64, group, false, TILED, _tiles)\n'
)
BUFFER = "staged + group % 2 * BLOCK_TILES * PARTS * WAVE"


@needs_emulation
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("    workgroup_barrier();  //", "    //", "a race"),
        (BUFFER, "staged", "a race"),
        ("rows[r] = row < M ? row : M - 1;", "rows[r] = row <= M ? row : M - 1;", "heap-buffer-overflow"),
        ("    if (row < M) {", "    if (row <= M) {", "heap-buffer-overflow"),
    ],
    ids=["no barrier", "one buffer", "reads a row too many", "writes a row too many"],
)
def test_a_planted_fault_is_found(old: str, new: str, found: str) -> None:
    launch, _ = launch_for("int5", "int8", "group", 320, 64, (96, 64), 129)
    edit = simt.Edit("prefill.h", old, new)
    with pytest.raises(simt.EmulationError, match=found):
        simt.run(launch, (ONE, edit))


@needs_emulation
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("prefill.h", "first < M ? first : (M - 1) / 16 * 16", "first"),
        ("prefill.h", "places_of<ORDER>(M) * K", "M * K"),
        ("fold.h", "lane * 16;", "(lane ^ 16) * 16;"),
        ("fold.h", "ROW_MAJOR ? 32 : 512)", "ROW_MAJOR ? 32 : 256)"),
    ],
    ids=["a tile too many", "rotations as rows", "halves swapped", "half a block"],
)
def test_a_planted_fault_of_the_tiles_is_found(file: str, old: str, new: str) -> None:
    launch, expected = launch_for("int5", "int8", "group", 320, 64, (96, 64), 129, tiles=True)
    with pytest.raises((AssertionError, simt.EmulationError)):
        assert_rounded_once(simt.run(launch, (ONE_TILED, simt.Edit(file, old, new)))[0].complete(), expected)


def test_every_kernel_is_run() -> None:
    combinations = itertools.product(KINDS, ("group", "token"), SHAPES)
    kernels = {launch_for(*kind, granularity, *shape)[0].kernel for kind, granularity, shape in combinations}
    assert len(kernels) == len(KINDS) * 4
    tiled = {launch_for(*kind, *shape, tiles=True)[0].kernel for kind in TILED for shape in TILED_SHAPES}
    assert len(tiled) == len(TILED) * 2


def test_rows_of_another_weight_are_refused() -> None:
    launch, _ = launch_for("int4", "int8", "token", 128, 64, (32, 32), 3)
    codes, scales, row_sums = launch.arguments[:3]
    other = weights.pack([random_codes("int4", 128, 32, 64, 0)])
    with pytest.raises(PluginError, match="1 rotations, the rows have K=128, 2 rotations"):
        prefill.prefill(codes, scales, row_sums, other, "int8")
