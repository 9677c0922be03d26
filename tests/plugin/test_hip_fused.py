"""The fused HIP producers, executed on the CPU, against the formulas in float64 and the reference's codes.

A value that lies within 1e-4 of the distance between two bf16 from the middle between them may round either way: rows
that hold one are left out, and most rows hold none.
"""

from collections.abc import Callable

import pytest
import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import fused, layout
from paroquant_gfx1201.modes import Band
from tests.plugin.hip_cases import as_bytes, needs_emulation, random_rotations, rotate_exactly

pytestmark = needs_emulation

ROWS, EPSILON, EDGE = 24, 1e-6, 1e-4
SIZES = [(256, 128), (192, 64)]


def random_rows(seed: int, columns: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, columns, generator=generator) * spread).bfloat16()


def on_an_edge(values: torch.Tensor) -> torch.Tensor:
    """bool [rows] of float64 [rows, columns]."""
    _, exponent = torch.frexp(values)
    places = (values.abs() / torch.ldexp(torch.ones_like(values), exponent - 8)) % 1
    return ((places - 0.5).abs() < EDGE).any(1)


def check(
    written: list[simt.Written], hidden: torch.Tensor, clear: torch.Tensor, rotations: list, element: str
) -> None:
    """Codes, scales and row sums of ``hidden`` bf16 [M, K] in the rows ``clear``."""
    assert clear.float().mean() > 0.5
    codes, scales, row_sums = (each.complete() for each in written)
    for index, each in enumerate(rotations):
        band = Band(element, "group", "loop")
        expected = reference.quantize_activations(rotate_exactly(hidden, each), band)
        plain = as_bytes(expected.codes + 0.0, element)
        plain[plain == 0x80] = 0
        assert torch.equal(codes[index][clear], plain[clear])
        assert torch.equal(scales[index][:, clear], expected.scales.squeeze(-1)[:, clear])
        assert torch.equal(row_sums[index][:, clear], expected.row_sums[:, clear])


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def one_rotation(inputs: int, size: int) -> tuple[list, torch.Tensor]:
    rotations = [random_rotations(inputs, size, 7)]
    return rotations, layout.build(rotations[0]).unsqueeze(0)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize(("inputs", "size"), SIZES)
def test_silu_of_the_gate_times_up(inputs: int, size: int, element: str) -> None:
    rotations, table = one_rotation(inputs, size)
    gate, up = random_rows(1, inputs, 4.0), random_rows(2, inputs)
    gate[0, :4] = torch.tensor([-3e38, -100.0, 100.0, 1e-38])
    written = simt.run(fused.silu_mul(torch.cat([gate, up], 1), table, element, size))
    activated = silu(gate.double())
    hidden = (activated.bfloat16().double() * up.double()).bfloat16()
    check(written, hidden, ~on_an_edge(activated), rotations, element)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize(("inputs", "size"), SIZES)
def test_an_output_times_the_sigmoid_of_its_gate(inputs: int, size: int, element: str) -> None:
    rotations, table = one_rotation(inputs, size)
    x, gate = random_rows(1, inputs), random_rows(2, inputs, 4.0)
    written = simt.run(fused.sigmoid_gate(x, gate, table, element, size))
    factor = 1 / (1 + torch.exp(-gate.double()))
    hidden = (x.double() * factor.bfloat16().double()).bfloat16()
    check(written, hidden, ~on_an_edge(factor), rotations, element)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize(("inputs", "size"), SIZES)
def test_the_norm_of_a_head_times_silu_of_its_gate(inputs: int, size: int, element: str) -> None:
    rotations, table = one_rotation(inputs, size)
    x, gate = random_rows(1, inputs, 3.0), random_rows(2, inputs, 2.0)
    weight = torch.rand(size, generator=torch.Generator().manual_seed(3)) + 0.5
    written = simt.run(fused.gated_norm(x, gate, weight, EPSILON, table, element, size))
    heads = x.double().unflatten(1, (-1, size))
    normed = heads / (heads.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
    exact = normed.flatten(1) * silu(gate.double())
    check(written, exact.bfloat16(), ~on_an_edge(exact), rotations, element)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize(("inputs", "size", "count"), [(256, 128, 3), (1152, 128, 1), (192, 64, 2)])
def test_the_norm_of_a_row_and_its_residual(inputs: int, size: int, count: int, element: str) -> None:
    rotations = [random_rotations(inputs, size, seed) for seed in range(count)]
    table = torch.stack([layout.build(each) for each in rotations])
    x, residual = random_rows(1, inputs, 3.0), random_rows(2, inputs)
    weight = torch.randn(inputs, generator=torch.Generator().manual_seed(3)) * 0.2
    written = simt.run(fused.add_norm(x, residual, weight, EPSILON, table, element, size))
    total = (x.double() + residual.double()).bfloat16()
    exact = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * (1 + weight.double())
    clear = ~on_an_edge(exact)
    if inputs > 1000:  # too many values for a row without an edge: those that the kernel wrote are exact or beside it
        hidden = written[1].complete()
        wrong = hidden != exact.bfloat16()
        assert wrong.sum() <= 2 * EDGE * hidden.numel() + 3
        clear = torch.ones(ROWS, dtype=torch.bool)
    else:
        hidden = exact.bfloat16()
        assert torch.equal(written[1].complete()[clear], hidden[clear])
    assert torch.equal(written[0].complete(), total)
    check(written[2:], hidden, clear, rotations, element)


def test_what_no_kernel_takes_is_refused() -> None:
    _, table = one_rotation(128, 64)
    x = random_rows(0, 128)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("heads of 64 channels", lambda: fused.gated_norm(x, x, torch.ones(128), EPSILON, table, "int8", 64)),
        ("one rotation, not 2", lambda: fused.silu_mul(x, torch.cat([table, table]), "int8", 64)),
        ("are for K=128, the rows have K=64", lambda: fused.silu_mul(x, table, "int8", 64)),
    ]
    for message, call in refused:
        with pytest.raises(PluginError, match=message):
            call()
