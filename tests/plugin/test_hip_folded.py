"""MXFP4 with folded exponents: every code at every distance is what it was, through the GEMMs, executed on the CPU."""

import dataclasses

import pytest
import torch

from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.folded import BIAS, LIFT, MOST_APART, farthest
from paroquant_gfx1201.kernels.hip import weights
from paroquant_gfx1201.kernels.hip.decode import decode
from paroquant_gfx1201.kernels.hip.prefill import prefill
from paroquant_gfx1201.kernels.hip.rows import to_tiles
from tests.plugin.hip_cases import needs_emulation, only, random_codes

ONE = 0x38
"""1 in e4m3."""


def every_distance(inputs: int, group_size: int, outputs: int = 64) -> Mxfp4Projection:
    """Output n's blocks b lie (n + 5 b) % 13 below its largest exponent, and one of them has it."""
    generator = torch.Generator().manual_seed(group_size)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    blocks = torch.arange(inputs // 32)
    below = (torch.arange(outputs).unsqueeze(1) + 5 * blocks) % (MOST_APART + 1)
    whole = torch.arange(outputs) % len(blocks)
    below[torch.arange(outputs), whole] = 0
    codes[torch.arange(outputs), 32 * whole + 3] = 7
    return Mxfp4Projection(Mxfp4Spec(group_size, 1), codes, (120 - below).to(torch.uint8))


def picked(inputs: int, first: int, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are 1 at one input each, from ``first`` on, with scales of 1: their product is the weight itself."""
    codes = torch.zeros(1, rows, inputs, dtype=torch.uint8)
    codes[0, torch.arange(rows), first + torch.arange(rows)] = ONE
    return codes, torch.ones(1, groups, rows), torch.zeros(1, inputs // 64, rows)


def wrong(projection: Mxfp4Projection, edits: tuple[simt.Edit, ...] = ()) -> int:
    """Weights that come out of the decode GEMM as another value, of any input."""
    packed, expected = weights.pack([projection]), projection.dequantize()
    assert packed.format == "folded"
    found = 0
    for first in range(0, projection.inputs, 64):
        rows = picked(projection.inputs, first, 64, projection.inputs // projection.spec.group_size)
        y = simt.run(decode(*rows, packed, "e4m3", 1), edits)[0].complete()
        found += int((y.float() != expected[first : first + 64]).sum())
    return found


@needs_emulation
@pytest.mark.parametrize("group_size", [64, 128])
def test_decode_gives_back_every_weight(group_size: int) -> None:
    projection = every_distance(128, group_size)
    seen = {
        (int(code), int(below))
        for code, below in zip(
            projection.codes.flatten(),
            (120 - projection.exponents.int()).repeat_interleave(32, 1).flatten(),
            strict=True,
        )
    }
    assert len(seen) == 16 * (MOST_APART + 1)
    assert wrong(projection) == 0


@needs_emulation
@pytest.mark.parametrize("group_size", [64, 128])
def test_prefill_gives_back_every_weight(group_size: int) -> None:
    projection = every_distance(256, group_size)
    codes, scales, row_sums = picked(256, 0, 256, 1)
    launch = prefill(to_tiles(codes), scales, row_sums, weights.pack([projection]), "e4m3")
    assert launch.kernel == f"prefill_folded_e4m3_g{group_size}_token_tiles"
    assert torch.equal(simt.run(launch)[0].complete().float(), projection.dequantize())


ONE_DECODE = only("decode.hip", '#include "decode.h"\nDECODE(FOLDED, folded, E4M3, e4m3, 128, 64)\n')


@needs_emulation
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v2s{0x0400, 0}", "v2s{0, 0}"),
        ("number * 0x01010100", "2 * quad * 0x01010100"),
        ("(packed << 4 & 0x80808080)", "(packed & 0x80808080)"),
        ("0x7c787470", "0x7c787870"),
    ],
    ids=["the subnormal", "another block's shift", "another sign", "a magnitude"],
)
def test_a_planted_fault_is_found(old: str, new: str) -> None:
    projection = every_distance(128, 128)
    assert wrong(projection, (ONE_DECODE,)) == 0
    assert wrong(projection, (ONE_DECODE, simt.Edit("weights.h", old, new))) > 0


def test_exponents_that_lie_too_far_apart_are_not_folded_and_a_block_of_zeros_has_none() -> None:
    projection = every_distance(128, 128)
    assert weights.form_of([projection]) == "folded"
    exponents = projection.exponents.clone()
    exponents[7, 2] = 120 - MOST_APART - 1
    far = dataclasses.replace(projection, exponents=exponents)
    assert farthest(far.codes.T, far.exponents.T) == MOST_APART + 1
    packed = weights.pack([projection, far])
    assert packed.format == weights.form_of([projection, far]) == "mxfp4"
    assert (packed.steps.dtype, len(packed.plane)) == (torch.uint8, 0)
    codes = far.codes.clone()
    codes[7, 64:96] = 8  # minus zero
    assert weights.form_of([dataclasses.replace(far, codes=codes)]) == "folded"


def test_outputs_of_zeros_alone_and_those_that_fill_a_tile_have_a_scale_and_no_shift() -> None:
    projection = every_distance(64, 64, 24)
    codes, exponents = projection.codes.clone(), projection.exponents.clone()
    codes[5], exponents[5, 0], exponents[5, 1] = 0, 1, 200
    packed = weights.pack([dataclasses.replace(projection, codes=codes, exponents=exponents)])
    assert packed.format == "folded"
    assert packed.steps[5] == packed.steps[30] == 2.0**-LIFT
    assert packed.plane[0, 5] == packed.plane[0, 30] == 0
    assert packed.steps[0] == 2.0 ** (120 - BIAS - LIFT)


def test_the_extremes_of_e8m0_have_a_scale() -> None:
    made = random_codes("folded", 64, 32, 64, 0)
    for exponent in (0, 254):
        packed = weights.pack([dataclasses.replace(made, exponents=torch.full_like(made.exponents, exponent))])
        assert (packed.steps == 2.0 ** (exponent - BIAS - LIFT)).all() and packed.steps.min() > 0
