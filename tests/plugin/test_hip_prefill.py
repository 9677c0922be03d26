"""The HIP prefill GEMM, executed lane by lane on the CPU, against float64 of the same codes."""

import itertools

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import prefill, weights
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

KINDS = [("int4", "int8"), ("int4", "e4m3"), ("int5", "int8"), ("int5", "e4m3"), ("mxfp4", "e4m3")]
SHAPES = [  # K, group size, outputs of each projection, rows
    (384, 128, (96, 64, 32), 130),
    (320, 64, (64, 96), 40),
]
FULL_SHAPES = [
    (inputs, group_size, (256, 64, 128), rows)
    for inputs, group_size in ((5120, 128), (576, 64))
    for rows in (65, 200, 300)
]


def launch_for(
    name: str, element: str, granularity: str, inputs: int, group_size: int, outputs: tuple[int, ...], rows: int
) -> tuple[Launch, torch.Tensor]:
    projections = [random_codes(name, inputs, count, group_size, seed) for seed, count in enumerate(outputs)]
    activations, expected = quantized(projections, rows, element, granularity)
    return prefill.prefill(*as_producer_leaves(activations, element), weights.pack(projections), element), expected


@needs_emulation
@pytest.mark.parametrize(("name", "element"), KINDS)
@pytest.mark.parametrize("granularity", ["group", "token"])
@pytest.mark.parametrize(("inputs", "group_size", "outputs", "rows"), FULL_SHAPES if LONG else SHAPES)
def test_outputs_are_float64_of_the_same_codes_rounded_once_to_bf16(
    inputs: int, group_size: int, outputs: tuple[int, ...], rows: int, granularity: str, name: str, element: str
) -> None:
    launch, expected = launch_for(name, element, granularity, inputs, group_size, outputs, rows)
    (y,) = simt.run(launch)
    assert_rounded_once(y.complete(), expected)


ONE = only("prefill.hip", '#include "prefill.h"\nPREFILL(INT5, int5, INT8, int8, 64, group, false)\n')
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


def test_every_kernel_is_run() -> None:
    combinations = itertools.product(KINDS, ("group", "token"), SHAPES)
    kernels = {launch_for(*kind, granularity, *shape)[0].kernel for kind, granularity, shape in combinations}
    assert len(kernels) == len(KINDS) * 4


def test_rows_of_another_weight_are_refused() -> None:
    launch, _ = launch_for("int4", "int8", "token", 128, 64, (32, 32), 3)
    codes, scales, row_sums = launch.arguments[:3]
    other = weights.pack([random_codes("int4", 128, 32, 64, 0)])
    with pytest.raises(PluginError, match="1 rotations, the rows have K=128, 2 rotations"):
        prefill.prefill(codes, scales, row_sums, other, "int8")
