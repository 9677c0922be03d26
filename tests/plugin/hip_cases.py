"""What the tests of the HIP kernels share: which compilers are there, and random rotations and projections."""

import os

import pytest
import torch
from torch.nn.functional import pad

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.formats.mxfp4 import BLOCK, Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.folded import MOST_APART
from paroquant_gfx1201.kernels.hip import codeobject
from paroquant_gfx1201.kernels.hip.launch import SOURCES
from paroquant_gfx1201.kernels.hip.layout import Rotations
from paroquant_gfx1201.kernels.hip.weights import filled
from paroquant_gfx1201.modes import Band
from tests.plugin.conftest import relative

LONG = bool(os.environ.get("PARO_LONG_TESTS"))
REQUIRED = os.environ.get("PARO_REQUIRE_CLANG", "").split(",")
"""Versions of clang that must be there: without one the tests fail instead of being skipped."""


def needs(reason: str | None, version: int) -> pytest.MarkDecorator:
    """Skip for ``reason``, or fail where that clang is required."""
    assert not reason or str(version) not in REQUIRED, reason
    return pytest.mark.skipif(reason is not None, reason=reason or "")


needs_emulation = needs(simt.missing(), 19)


def needs_clang(version: int) -> pytest.MarkDecorator:
    """Skip where gfx1201 code cannot be compiled with this clang."""
    return needs(codeobject.missing(version), version)


def only(source: str, text: str) -> simt.Edit:
    """``text`` instead of the whole of ``source``, so that a test compiles no kernel that it does not run."""
    return simt.Edit(source, (SOURCES / source).read_text(), text)


def random_rotations(inputs: int, group_size: int, seed: int, krot: int = 8, still: bool = False) -> Rotations:
    """Random angles, pairs and channel scales; ``still``: angles of zero and scales of one, which change nothing."""
    generator = torch.Generator().manual_seed(seed)
    theta = (torch.rand(krot, inputs // 2, generator=generator) - 0.5) * 6
    scales = torch.exp(torch.randn(1, inputs, generator=generator) * 0.3)
    if still:
        theta, scales = torch.zeros_like(theta), torch.ones_like(scales)
    return Rotations(theta.half(), rotation.greedy_pairs(inputs, group_size, krot, seed), scales.half(), group_size)


def rotate_exactly(x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
    """f32 [G, M, g]: x [M, K] as the kernels rotate it, operation by operation."""
    cos, sin = rotation.cosines(rotations.theta)
    scaled = x.float() * rotations.channel_scales.float()
    rotated = rotation.rotate(scaled, cos, sin, rotations.pairs, rotations.group_size)
    return rotated.unflatten(1, (-1, rotations.group_size)).transpose(0, 1)


def random_codes(name: str, inputs: int, outputs: int, group_size: int, seed: int) -> Projection | Mxfp4Projection:
    """Every code, zero point and exponent equally likely: no structure for a mistake to hide behind.

    ``mxfp4``: exponents too far apart to be folded; ``folded``: as far as folding allows.
    """
    generator = torch.Generator().manual_seed(seed)
    turned = random_rotations(inputs, group_size, seed)
    rest = (turned.theta, turned.pairs, turned.channel_scales)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    if name in ("mxfp4", "folded"):
        exponents = integers(125 - MOST_APART - 1 - 8 * (name == "mxfp4"), 125, outputs, inputs // BLOCK)
        return Mxfp4Projection(Mxfp4Spec(group_size, 8), integers(0, 16, outputs, inputs), exponents, *rest)
    lloyd = name == "int4-lloyd"
    bits = 4 if lloyd else int(name.removeprefix("int"))
    groups = inputs // group_size
    codes, zeros = integers(0, 1 << bits, inputs, outputs), integers(0, 1 << bits, groups, outputs)
    scales = (torch.rand(groups, outputs, generator=generator) * 0.01 + 0.001).half()
    grid = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().unique()
    grid = grid[(grid >= -8) & (grid < 8)]
    levels = 7.5 + grid[torch.randperm(len(grid), generator=generator)[:16]].sort().values if lloyd else None
    return Projection(FormatSpec(bits, group_size, 8, lloyd), codes, zeros, scales, *rest, levels=levels)


def as_bytes(codes: torch.Tensor, element: str) -> torch.Tensor:
    """The reference's codes f32 [G, M, g] as the kernels' uint8 [M, K]."""
    rows = codes.transpose(0, 1).flatten(1)
    return rows.to(torch.int8 if element == "int8" else torch.float8_e4m3fn).view(torch.uint8)


def quantized(
    projections: list[Projection] | list[Mxfp4Projection], rows: int, element: str, granularity: str
) -> tuple[list[reference.Activations], torch.Tensor]:
    """Each rotation's activations of random rows with a mean, and float64 [M, N] of the same codes.

    N counts the outputs of scale 0 that ``weights.pack`` fills a projection up with.
    """
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, projections[0].inputs, generator=generator) + 0.5).bfloat16().float()
    activations, expected = [], []
    for projection in projections:
        prepared = reference.prepare(projection)
        rotated = rotation.rotate_groups(x, prepared.rotation)
        activations.append(reference.quantize_activations(rotated, Band(element, granularity, "loop")))
        y = reference.same_codes(activations[-1], prepared.weight, prepared.offsets)
        expected.append(pad(y, (0, filled(y.shape[1]) - y.shape[1])))
    return activations, torch.cat(expected, 1)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def as_producer_leaves(activations: list[reference.Activations], element: str) -> Rows:
    """Codes uint8 [P, M, K], scales f32 [P, G or 1, M] and row sums f32 [P, G, M]."""
    return (
        torch.stack([as_bytes(each.codes, element) for each in activations]),
        torch.stack([each.scales.squeeze(-1) for each in activations]),
        torch.stack([each.row_sums for each in activations]),
    )


BF16_FLOOR = 1.7e-3
"""Relative error of rounding outputs to bf16 once, for many outputs; few scatter about it."""
BF16_HALF_ULP = 2.0**-8
"""Of a value's magnitude, at most: half of the distance to the next bf16."""
SUMS = 2e-6
"""Of the root mean square of the outputs: the f32 sums over K."""


def assert_rounded_once(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16 ``actual`` is float64 ``expected`` rounded to nearest, but for what sums in f32 add."""
    scale = expected.pow(2).mean().sqrt()
    assert ((actual.double() - expected).abs() <= BF16_HALF_ULP * expected.abs() + SUMS * scale).all()
    floor = relative(expected.bfloat16(), expected)
    assert relative(actual, expected) <= 1.002 * floor
    assert expected.numel() < 20_000 or floor <= BF16_FLOOR
