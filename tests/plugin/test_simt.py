"""The SIMT harness finds what it is there for: each fault is planted into a kernel's real text."""

import pytest
import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip import layout, producer
from paroquant_gfx1201.kernels.hip.launch import Launch, Out
from paroquant_gfx1201.kernels.simt import Edit, EmulationError
from paroquant_gfx1201.modes import Band
from tests.plugin.conftest import relative
from tests.plugin.hip_cases import BF16_FLOOR, as_bytes, needs_emulation, only, random_rotations, rotate_exactly
from tests.plugin.test_hip_decode import launch_for

pytestmark = needs_emulation

ONE_DECODE = only("decode.hip", '#include "decode.h"\nDECODE(INT4, int4, INT8, int8, 128, 16)\n')
ONE_PRODUCER = only(
    "producer.hip",
    '#include "producer.h"\nPRODUCERS(128, 8, int8, INT8)\nBY_GROUP(128, 8, int8, INT8, TILED, _tiles)\n',
)


def run_decode(*edits: Edit) -> tuple[list[simt.Written], torch.Tensor]:
    """A launch whose last rows, outputs and groups all leave a tile, a wave or a share partly empty."""
    launch, expected = launch_for("int4", "int8", 1152, 128, (32, 32), 13, 2)
    return simt.run(launch, (ONE_DECODE, *edits)), expected


def run_producer(*edits: Edit, granularity: str = "group", tiles: bool = False) -> list[simt.Written]:
    x = torch.randn(9, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = layout.build(random_rotations(384, 128, 0)).unsqueeze(0)
    return simt.run(producer.quantize_rows(x, table, "int8", granularity, 128, 8, tiles), (ONE_PRODUCER, *edits))


def test_without_a_fault_nothing_is_found() -> None:
    (y, partial, _), expected = run_decode()
    assert relative(y.complete(), expected) < 2 * BF16_FLOOR
    partial.complete()
    for granularity in ("group", "token"):
        for written in run_producer(granularity=granularity):
            written.complete()


def test_a_row_too_many_is_a_write_outside_the_buffer() -> None:
    tail = Edit("producer.h", "row < M; row += shares", "row <= M; row += shares")
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        run_producer(tail)


@pytest.mark.parametrize(
    ("granularity", "old", "new"),
    [
        ("group", "row < places_of<ORDER>(M); row += shares", "row < M; row += shares"),
        (
            "token",
            "    for (int group = wave; group < groups; group += waves)\n      store",
            "    if (wave < 0)\n      store",
        ),
    ],
)
def test_a_row_of_a_tile_past_the_last_that_nobody_writes_is_found(granularity: str, old: str, new: str) -> None:
    if granularity == "token":
        new = f"    int group = 0;\n{new}"
    with pytest.raises(EmulationError, match="elements were never written"):
        run_producer(Edit("producer.h", old, new), granularity=granularity, tiles=True)[0].complete()


def test_a_value_that_is_not_the_same_in_a_wave_is_found() -> None:
    with pytest.raises(EmulationError, match="same_in_wave: "):
        run_producer(Edit("producer.h", "same_in_wave(thread_id() / WAVE)", "same_in_wave(thread_id() / 16)"))


def test_a_clamp_of_rows_that_is_off_by_one_reads_outside_the_buffer() -> None:
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        run_decode(Edit("decode.h", "if (row >= M) row = M - 1;", "if (row > M) row = M - 1;"))


def test_a_store_that_ignores_the_last_row_writes_outside_the_buffer() -> None:
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        run_decode(Edit("split.h", "if (row < M && output < N) {", "if (row <= M && output < N) {"))


def test_a_group_too_few_in_a_share_is_a_wrong_sum() -> None:
    fault = Edit(
        "decode.h", "int last = (share + 1) * groups / shares;", "int last = (share + 1) * groups / shares - 1;"
    )
    (y, *_), expected = run_decode(fault)
    assert relative(y.complete(), expected) > 0.1


@pytest.mark.parametrize(
    ("edit", "granularity"),
    [
        (Edit("producer.h", "  workgroup_barrier();\n", ""), "token"),
        (Edit("rotate.h", "      wave_sync();\n      for (int pair", "      for (int pair"), "group"),
        (Edit("rotate.h", "sine * first));\n      }\n      wave_sync();", "sine * first));\n      }"), "group"),
    ],
    ids=["barrier", "after reading", "after writing"],
)
def test_a_missing_synchronisation_of_a_producer_is_a_race(edit: Edit, granularity: str) -> None:
    with pytest.raises(EmulationError, match="a race, or a read of uninitialised memory"):
        run_producer(edit, granularity=granularity)


def test_a_missing_barrier_of_the_decode_gemm_is_a_race() -> None:
    with pytest.raises(EmulationError, match="a race, or a read of uninitialised memory"):
        run_decode(Edit("split.h", "total[t][r][v];\n  workgroup_barrier();", "total[t][r][v];"))


def test_a_barrier_that_one_wave_skips_is_a_deadlock() -> None:
    fault = Edit("producer.h", "  workgroup_barrier();\n", "  if (wave > 0) workgroup_barrier();\n")
    with pytest.raises(EmulationError, match=r"deadlock: lane \d+ waits at the barrier of producer\.h:\d+"):
        run_producer(fault, granularity="token")


def test_lanes_that_meet_at_different_lines_are_a_divergent_barrier() -> None:
    two = "  if (wave > 0) workgroup_barrier();\n  if (wave == 0)\n    workgroup_barrier();\n"
    with pytest.raises(EmulationError, match=r"divergent barrier: lanes are at producer\.h:\d+ and at producer\.h:\d+"):
        run_producer(Edit("producer.h", "  workgroup_barrier();\n", two), granularity="token")


def test_a_lane_that_leaves_its_wave_is_a_deadlock() -> None:
    fault = Edit(
        "producer.h",
        "  float scale = scale_of<ELEMENT>(__b",
        "  if (lane == 7) return;\n  float scale = scale_of<ELEMENT>(__b",
    )
    with pytest.raises(EmulationError, match=r"waits at the wave operation of encode\.h"):
        run_producer(fault)


def test_an_output_that_nobody_writes_is_named() -> None:
    fault = Edit(
        "producer.h",
        "    row_sums[static_cast<long>(index) * M + row] =",
        "    if (row != 4) row_sums[index * M + row] =",
    )
    codes, scales, row_sums = run_producer(fault)
    codes.complete()
    scales.complete()
    with pytest.raises(EmulationError, match=r"3 elements were never written, the first at \[0, 0, 4\]"):
        row_sums.complete()


def test_lds_that_is_a_word_too_small_is_an_overflow() -> None:
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        run_decode(
            Edit(
                "split.h",
                "SHARED(float, sums, WAVES * ELEMENTS * WIDTH)",
                "SHARED(float, sums, WAVES * ELEMENTS * WIDTH - 1)",
            )
        )


def test_a_swapped_nibble_order_is_a_wrong_product() -> None:
    swapped = Edit("weights.h", "half ? packed >> 4 : packed;", "half ? packed : packed >> 4;")
    (y, *_), expected = run_decode(swapped)
    assert relative(y.complete(), expected) > 0.1


def test_a_code_rounded_the_other_way_differs_from_the_reference() -> None:
    truncated = Edit(
        "encode.h",
        "return __builtin_bit_cast(u32, clamp(step, -INT8_MOST, INT8_MOST) + 12582912.0f);",
        "return static_cast<int>(clamp(step, -INT8_MOST, INT8_MOST));",
    )
    codes = run_producer(truncated)[0].complete()
    x = torch.randn(9, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotated = rotate_exactly(x, random_rotations(384, 128, 0))
    expected = as_bytes(reference.quantize_activations(rotated, Band("int8", "group", "loop")).codes, "int8")
    assert not torch.equal(codes[0], expected)


def test_undefined_arithmetic_is_reported() -> None:
    text = (
        '#include "device.h"\nKERNEL(32) shifted(int* out, int by) { out[thread_id()] = 1 << by; }\nEXPORT(shifted)\n'
    )
    launch = Launch("producer.hip", "shifted", (1,), 32, (Out((32,), torch.int32), 40))
    with pytest.raises(EmulationError, match="shift exponent 40 is too large"):
        simt.run(launch, (only("producer.hip", text),))


def test_a_fault_planted_in_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not contain"):
        simt.build("producer.hip", (Edit("producer.h", "no such text", ""),))
