"""The compiled int8 path against the reference in torch: codes bit for bit, products to float32 rounding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.modes import Band

BANDS = [Band("int8", granularity, form) for granularity in ("group", "token") for form in ("loop", "epilogue")]


@pytest.fixture(autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def problem(rows: int, inputs: int, outputs: int, size: int, rotations: int = 1):
    """(x bf16 [M, K], matrices f32 [P, G, g, g] whose sums are exact, codes, scales, zero weight)."""
    random = torch.Generator().manual_seed(rows + inputs + outputs)
    groups = inputs // size
    codes = torch.randint(-16, 16, (groups, size, outputs), generator=random, dtype=torch.int8)
    scales = torch.rand(groups, outputs, generator=random) + 0.01
    zero_weight = torch.randn(groups, outputs, generator=random)
    x = torch.randn(rows, inputs, generator=random).bfloat16()
    if rows > 1:
        x[rows // 2] = 0  # a row of nothing has scale 0
    return x, signed_permutations(rotations, groups, size, random), codes, scales, zero_weight


def signed_permutations(rotations: int, groups: int, size: int, random: torch.Generator) -> torch.Tensor:
    """Each row of a matrix has one power of two with a sign: a product with it is exact in any order."""
    made = torch.zeros(rotations, groups, size, size)
    for matrix in made.flatten(0, 1):
        signs = torch.randint(0, 2, (size,), generator=random) * 2.0 - 1
        powers = 2.0 ** torch.randint(-3, 4, (size,), generator=random)
        matrix[torch.arange(size), torch.randperm(size, generator=random)] = signs * powers
    return made


def by_reference(x: torch.Tensor, matrices: torch.Tensor, band: Band) -> reference.Activations:
    return reference.quantize_activations(rotation.rotate_groups(x.float(), matrices), band)


def produced(x: torch.Tensor, matrices: torch.Tensor, band: Band) -> reference.Activations:
    return cpu.produce(x, matrices.transpose(-1, -2).contiguous(), band)


BY_NAME = {"argvalues": BANDS, "ids": lambda band: f"{band.granularity}-{band.zero_point}"}
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 17, 200]
SHAPES = [(576, 960, 64), (1536, 576, 64), (256, 48, 128), (512, 16, 256), (48, 32, 16)]


@pytest.mark.parametrize("band", **BY_NAME)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs", "size"), SHAPES)
def test_it_is_the_references_product_to_float32_rounding(rows, inputs, outputs, size, band):
    x, matrices, codes, scales, zero_weight = problem(rows, inputs, outputs, size)
    activations = by_reference(x, matrices, band).of(0)
    wanted = reference.multiply_int8(activations, codes, scales, zero_weight, band)
    ours = reference.Activations(activations.codes.to(torch.int8), activations.scales, activations.row_sums)
    around = torch.full((rows, outputs + 32), float("nan"))
    found = around[:, 16:-16]
    cpu.multiply(ours, cpu.pack(codes), cpu.pack_scales(scales, zero_weight), band, found)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert around[:, :16].isnan().all() and around[:, -16:].isnan().all(), "nothing beside its columns is written"
    rounded = torch.empty(rows, outputs, dtype=torch.bfloat16)
    cpu.multiply(ours, cpu.pack(codes), cpu.pack_scales(scales, zero_weight), band, rounded)
    assert torch.equal(rounded, found.bfloat16())


@pytest.mark.parametrize("band", **BY_NAME)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rotations", [1, 3])
@pytest.mark.parametrize(("inputs", "size"), [(576, 64), (256, 128), (512, 256), (48, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_scales_and_sums_are_the_references_bit_for_bit(rows, inputs, size, rotations, dtype, band):
    x, matrices, *_ = problem(rows, inputs, 16, size, rotations)
    if dtype == torch.float32:
        x = x.float() * 1.001  # so that the bf16 copy of the per-token mode is another number
    same(produced(x, matrices, band), by_reference(x, matrices, band))


HARD = {
    "zeros": torch.zeros(64),
    "ties": torch.arange(64) * 0.5 - 16 + 127 * torch.nn.functional.one_hot(torch.tensor(3), 64),
    "subnormal": torch.arange(64) * 1e-40,
    "a wide range": 2.0 ** torch.arange(-32, 32),
    "one spike": 1e30 * torch.nn.functional.one_hot(torch.tensor(9), 64),
    "the largest": torch.full((64,), 3.3e38),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("band", **BY_NAME)
def test_hard_rows_are_the_references_too(name, band):
    x = torch.stack([HARD[name], -HARD[name].flip(0)]).float()
    same(produced(x, torch.eye(64)[None, None], band), by_reference(x, torch.eye(64)[None, None], band))


@pytest.mark.parametrize("band", **BY_NAME)
def test_what_is_not_a_number_stays_none(band):
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    found = produced(x, torch.eye(64)[None, None], band)
    y = torch.zeros(3, 16)
    cpu.multiply(found.of(0), cpu.pack(torch.ones(1, 64, 16, dtype=torch.int8)), torch.ones(1, 1, 2, 16), band, y)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("granularity", ["group", "token"])
def test_under_real_rotations_hardly_a_code_differs_and_by_one(granularity):
    band, random = Band("int8", granularity, "loop"), torch.Generator().manual_seed(1)
    matrices = torch.linalg.qr(torch.randn(2, 9, 64, 64, generator=random)).Q.contiguous()
    x = torch.randn(300, 576, generator=random).bfloat16()
    found, wanted = produced(x, matrices, band), by_reference(x, matrices, band)
    apart = (found.codes.float() - wanted.codes).abs()
    assert apart.max() <= 1 and apart.count_nonzero() <= 2e-4 * apart.numel()
    assert torch.allclose(found.scales, wanted.scales, rtol=1e-2 if granularity == "token" else 1e-5)


def same(found: reference.Activations, wanted: reference.Activations) -> None:
    assert found.codes.dtype == torch.int8 and torch.equal(found.codes.float(), wanted.codes)
    assert torch.equal(found.scales, wanted.scales) and torch.equal(found.row_sums, wanted.row_sums)


def test_the_dot_of_a_group_is_exact_at_its_largest():
    band = Band("int8", "group", "loop")
    codes = torch.full((1, 64, 16), 15, dtype=torch.int8)
    codes[:, :, ::2] = -16
    activations = produced(torch.full((1, 64), 127.0), torch.eye(64)[None, None], band)
    y = torch.empty(1, 16)
    cpu.multiply(activations.of(0), cpu.pack(codes), cpu.pack_scales(torch.ones(1, 16), torch.zeros(1, 16)), band, y)
    assert y.tolist() == [[-16 * 127 * 64.0, 15 * 127 * 64.0] * 8]


def test_packing_is_undone_by_reading_it_as_documented():
    codes = torch.randint(-16, 16, (3, 16, 32), dtype=torch.int8)
    packed = cpu.pack(codes)
    assert packed.shape == (2, 3, 4, 16, 4) and packed.dtype == torch.uint8
    for group, k, n in [(0, 0, 0), (2, 7, 31), (1, 15, 17)]:
        assert packed[n // 16, group, k // 4, n % 16, k % 4] == int(codes[group, k, n]) + 16
    scales, zeros = torch.rand(3, 32), torch.rand(3, 32)
    beside = cpu.pack_scales(scales, zeros)
    assert beside.shape == (2, 3, 2, 16)
    assert torch.equal(beside[1, 2], torch.stack([scales[2, 16:], zeros[2, 16:]]))


@pytest.mark.parametrize(("group_size", "outputs"), [(64, 40), (24, 32), (512, 32)])
def test_shapes_that_do_not_fill_its_lanes_are_left_to_torch(group_size, outputs):
    assert not cpu.fits(group_size, outputs)
    assert cpu.fits(64, 32)


def test_it_is_built_once_and_atomically(tmp_path: Path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    cpu.library(environment)
    (built,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = built.stat().st_mtime_ns
    cpu._loaded.cache_clear()
    cpu.library(environment)
    assert built.stat().st_mtime_ns == before and [p for p in tmp_path.rglob("*") if p.is_file()] == [built]


@pytest.mark.parametrize(
    ("compiler", "said"), [("", "no C\\+\\+ compiler is here"), ("#!/bin/sh\necho 'no AVX' >&2\nexit 1\n", "no AVX")]
)
def test_a_machine_without_a_working_compiler_says_why(tmp_path: Path, monkeypatch, compiler, said):
    if compiler:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cpu.Unavailable, match=said):
        cpu.library({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
