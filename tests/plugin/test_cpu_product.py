"""The compiled integer product against torch's, on every shape of rows and both granularities."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.kernels import cpu
from paroquant_gfx1201.modes import Band

BANDS = [Band("int8", granularity, form) for granularity in ("group", "token") for form in ("loop", "epilogue")]


@pytest.fixture(autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def problem(rows: int, inputs: int, outputs: int, size: int, band: Band, lowest: int = -16):
    random = torch.Generator().manual_seed(rows + inputs + outputs)
    groups = inputs // size
    codes = torch.randint(lowest, -lowest, (groups, size, outputs), generator=random, dtype=torch.int8)
    scales = torch.rand(groups, outputs, generator=random) + 0.01
    zero_weight = torch.randn(groups, outputs, generator=random)
    rotated = torch.randn(groups, rows, size, generator=random)
    if rows > 1:
        rotated[:, rows // 2] = 0  # a row of nothing has scale 0
    return reference.quantize_activations(rotated, band), codes, scales, zero_weight


@pytest.mark.parametrize("band", BANDS, ids=lambda band: f"{band.granularity}-{band.zero_point}")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 17, 200])
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(576, 960, 64), (1536, 576, 64), (256, 48, 128)])
def test_it_is_the_references_product_to_float32_rounding(rows, inputs, outputs, size, band):
    activations, codes, scales, zero_weight = problem(rows, inputs, outputs, size, band)
    wanted = reference.multiply_int8(activations, codes, scales, zero_weight, band)
    found = cpu.multiply(activations, cpu.pack(codes), scales, zero_weight, band)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_the_dot_of_a_group_is_exact_at_its_largest():
    band = Band("int8", "group", "loop")
    codes = torch.full((1, 64, 16), 15, dtype=torch.int8)
    codes[:, :, ::2] = -16
    activations = reference.quantize_activations(torch.full((1, 1, 64), 127.0), band)
    y = cpu.multiply(activations, cpu.pack(codes), torch.ones(1, 16), torch.zeros(1, 16), band)
    assert y.tolist() == [[-16 * 127 * 64.0, 15 * 127 * 64.0] * 8]


def test_packing_is_undone_by_reading_it_as_documented():
    codes = torch.randint(-16, 16, (3, 8, 32), dtype=torch.int8)
    packed = cpu.pack(codes)
    assert packed.shape == (3, 2, 2, 16, 4) and packed.dtype == torch.uint8
    for group, k, n in [(0, 0, 0), (2, 7, 31), (1, 5, 17)]:
        assert packed[group, n // 16, k // 4, n % 16, k % 4] == int(codes[group, k, n]) + 16


@pytest.mark.parametrize("shape", [(2, 64, 40), (2, 6, 32), (0,)])
def test_shapes_that_do_not_fill_its_lanes_are_left_to_torch(shape):
    assert not cpu.suits(torch.zeros(shape, dtype=torch.int8))


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
