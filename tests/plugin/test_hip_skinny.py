"""The HIP skinny GEMM, executed lane by lane on the CPU, against float64."""

import pytest
import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import skinny
from tests.plugin.hip_cases import LONG, assert_rounded_once, needs_emulation, only

SHAPES = [  # K, N, rows, shares of K
    (5120, 48, 5, None),
    (544, 24, 16, 3),
    (96, 8, 1, 1),
    (256, 96, 33, 2),
    (1024, 56, 64, 7),
    (160, 16, 17, 1),
]
FULL_SHAPES = [(5120, outputs, rows, None) for outputs in (48, 96, 256) for rows in (1, 8, 17, 40, 64)]


def operands(inputs: int, outputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight, each with a row of one large value, so that a row or output out of place shows."""
    generator = torch.Generator().manual_seed(inputs + outputs + rows)
    x = torch.randn(rows, inputs, generator=generator) * torch.arange(1, rows + 1).unsqueeze(1)
    weight = torch.randn(outputs, inputs, generator=generator) + 0.1
    return x.bfloat16(), weight.bfloat16()


@needs_emulation
@pytest.mark.parametrize(("inputs", "outputs", "rows", "shares"), FULL_SHAPES if LONG else SHAPES)
def test_outputs_are_float64_rounded_once_to_bf16(inputs: int, outputs: int, rows: int, shares: int | None) -> None:
    x, weight = operands(inputs, outputs, rows)
    y, partial, arrived = simt.run(skinny.skinny(x, weight, shares))
    assert_rounded_once(y.complete(), x.double() @ weight.double().T)
    partial.complete()
    assert not arrived.values.any()


ONE = only("skinny.hip", '#include "skinny.h"\nSKINNY(32)\n')


@needs_emulation
@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("skinny.h", "if (output >= N) output = N - 1;", "if (output > N) output = N - 1;", "heap-buffer-overflow"),
        ("skinny.h", "row < M ? row : M - 1", "row <= M ? row : M - 1", "heap-buffer-overflow"),
        ("split.h", "if (row < M && output < N) {", "if (row < M && output <= N) {", "heap-buffer-overflow"),
        ("split.h", "arrived[block] = 0", "arrived[block] = 1", "counters"),
        (
            "split.h",
            "if (before[0] != shares - 1) return;",
            "if (before[0] != shares - 2) return;",
            "a race|counters",
        ),
        ("skinny.h", "+ lane / 16 * 2;\n  const", "+ 2 - lane / 16 * 2;\n  const", "values"),
    ],
    ids=["an output too many", "a row too many", "writes an output too many", "counters", "first", "k"],
)
def test_a_planted_fault_is_found(file: str, old: str, new: str, found: str) -> None:
    x, weight = operands(256, 24, 17)
    launch = skinny.skinny(x, weight, 3)

    def outputs_of(*edits: simt.Edit) -> None:
        y, partial, arrived = simt.run(launch, edits)
        if arrived.values.any():
            raise simt.EmulationError("counters are left over")
        partial.complete()
        try:
            assert_rounded_once(y.complete(), x.double() @ weight.double().T)
        except AssertionError:
            raise simt.EmulationError("values are wrong") from None

    outputs_of(ONE)
    with pytest.raises(simt.EmulationError, match=found):
        outputs_of(ONE, simt.Edit(file, old, new))


def test_what_it_does_not_take_is_refused() -> None:
    x, weight = operands(64, 16, 3)
    with pytest.raises(PluginError, match=r"is torch\.bfloat16 of K=64, the rows are torch\.float32 of K=64"):
        skinny.skinny(x.float(), weight)
    with pytest.raises(PluginError, match="multiplies bfloat16, not float32"):
        skinny.skinny(x.float(), weight.float())
    with pytest.raises(PluginError, match=r"of K=32, the rows are torch\.bfloat16 of K=64"):
        skinny.skinny(x, weight[:, :32])
    with pytest.raises(PluginError, match="K in multiples of 32, not K=48"):
        skinny.skinny(x[:, :48], weight[:, :48])
    with pytest.raises(PluginError, match="1 to 64 rows, not 65"):
        skinny.skinny(x.new_zeros(65, 64), weight)
    with pytest.raises(PluginError, match="multiples of 8, not N=12"):
        skinny.skinny(x, weight[:12])


def test_shares_fill_the_gpu_and_leave_each_wave_a_step() -> None:
    assert skinny.shares_for(48, 5120) == 40
    assert skinny.shares_for(96, 5120) == 21
    assert skinny.shares_for(1280, 5120) == 1
    assert skinny.shares_for(16, 64) == 1
