"""The roofline's arithmetic against the kernels and their weights."""

from __future__ import annotations

import pytest

from paroquant_gfx1201 import roofline
from paroquant_gfx1201.kernels.hip import codeobject
from paroquant_gfx1201.kernels.hip.weights import pack
from paroquant_gfx1201.roofline import BLOCK, GROUP, LAYERS, R9700, Layer, Mode, gemm, producer
from tests.plugin.hip_cases import needs_clang, random_codes

MODES = [Mode(weights, element, scales) for weights, element, scales in (
    ("int4", "int8", "group"), ("int4", "e4m3", "token"), ("int5", "int8", "group"), ("int5", "e4m3", "token"),
    ("mxfp4", "e4m3", "token"),
)]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return roofline.kernels()


@pytest.mark.parametrize("_clang", [pytest.param(19, marks=needs_clang(19))])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 2048])
def test_the_turns_counted_multiply_every_weight_with_every_row_once(mode, rows, _clang, found) -> None:
    """The matrix instructions of all turns have as many operations as the product has."""
    kernel = found[mode.kernel(rows)]
    layer = Layer("any", 5120, 17408, 2, 1)
    estimate = gemm(layer, mode, rows, kernel)
    clocks = kernel.valu + R9700.wmma_clocks * kernel.count("v_wmma")
    turns = estimate.instructions_s * R9700.simds * R9700.clock_hz / clocks
    assert turns * kernel.count("v_wmma") * 2 * 16**3 == pytest.approx(estimate.operations)


@pytest.mark.parametrize("weights", sorted(roofline.WEIGHT_BITS))
def test_the_weight_bytes_are_those_of_the_kernels_operands(weights: str) -> None:
    weight = pack([random_codes(weights, 512, 256, GROUP, seed=1)])
    unused = weight.plane.nbytes if weights != "int5" else 0  # kernels are given a buffer in any case
    assert 8 * (weight.nbytes - unused) / (256 * 512) == roofline.WEIGHT_BITS[weights]


def test_the_card_does_a_matrix_instruction_in_eight_clocks_and_its_ridge_is_where_it_is_published() -> None:
    assert R9700.wmma_clocks == pytest.approx(8, rel=1e-3)
    assert R9700.operations_s / R9700.bytes_s == pytest.approx(598, abs=1)
    narrow, wide = (gemm(LAYERS[3], Mode("mxfp4", "e4m3", "token"), rows, None) for rows in (128, 192))
    assert narrow.memory_s > narrow.matrix_s and wide.memory_s < wide.matrix_s, "4.25 bits: memory up to about 159 rows"


def test_a_layer_moves_what_can_be_counted_by_hand() -> None:
    layer = Layer("tiny", 256, 64, 2, 1)
    mode = Mode("int4", "int8", "group")
    weights, codes, scales, sums, y = 256 * 64 * 4.25 / 8, 2 * 3 * 256, 2 * 2 * 3 * 4, 2 * 2 * 3 * 4, 3 * 64 * 2
    assert gemm(layer, mode, 3, None).bytes == weights + codes + scales + sums + y
    assert producer(layer, mode, 3, None).bytes == 3 * 256 * 2 + codes + scales + sums
    assert gemm(layer, Mode("int4", "int8", "token"), BLOCK, None).bytes < gemm(layer, mode, BLOCK, None).bytes


def test_the_page_calls_itself_an_estimate_and_says_why_instructions_are_missing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(codeobject, "missing", lambda version: "clang++-19: not installed")
    assert roofline.main(["--rows", "8", "--weights", "int4", "--activations", "e4m3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ESTIMATES") and "Nothing was" in said
    assert "No estimate from instructions: clang++-19: not installed" in said
    rows = [line for line in said.splitlines() if line.startswith("| gate_up_proj | 8 |")]
    assert rows[0].split("|")[6:8] == [" - ", " - "] and "60 (" in rows[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--rows", "0"], "--rows"), (["--weights", "mxfp4"], "--activations e4m3")],
)
def test_what_cannot_be_is_refused_in_a_line(words: list[str], says: str, capsys) -> None:
    assert roofline.main(words) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1
