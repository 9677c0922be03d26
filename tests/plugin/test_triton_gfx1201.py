"""The Triton kernels compiled ahead of time for gfx1201: what can be said of them without the card.

Compiled with the tiles that they are launched with there; the code must multiply with the matrix instruction of its
type, and may keep nothing in scratch memory.
"""

import re

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from paroquant_gfx1201.kernels.triton import decode, decode_tiles, prefill, prefill_tiles, producer, weights  # noqa: E402
from tests.plugin import ahead  # noqa: E402

pytestmark = pytest.mark.skipif(weights.INTERPRETED, reason="Triton interprets kernels in this process")

GFX1201 = GPUTarget("hip", "gfx1201", 32)
LDS_BYTES = 65536
POINTERS = {
    "x": "*bf16",
    "matrices": "*bf16",
    "codes": "*i8",
    "parked": "*i16",
    "peaks": "*fp32",
    "scales": "*fp32",
    "row_scales": "*fp32",
    "row_sums": "*fp32",
    "nibbles": "*u8",
    "plane": "*u8",
    "steps": "*i32",
    "levels": "*fp8e4nv",
    "tops": "*u8",
    "y": "*bf16",
    "partial": "*fp32",
    "arrived": "*i32",
}
ROWS = {"i8": tl.int8, "fp8e4nv": tl.float16}
FITTING = [(form, rows) for form in weights.FORMS for rows in ROWS if rows != "i8" or form in ("int4", "int5")]
"""Weights and the rows that they are multiplied by."""
WMMA = {
    "i8": "v_wmma_i32_16x16x16_iu8",
    "fp8e4nv": "v_wmma_f32_16x16x16_f16",
    "bf16": "v_wmma_f32_16x16x16_bf16",
}


def compiled(kernel, constants: dict[str, object], warps: int, stages: int, types: dict[str, str] | None = None):
    """The kernel for gfx1201 with 16-byte aligned pointers; checked to spill nothing and to fit the LDS."""
    made = ahead.compiled(kernel, GFX1201, constants, {**POINTERS, **(types or {})}, num_warps=warps, num_stages=stages)
    assembly = made.asm["amdgcn"]
    counts = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_spill_count|private_segment_fixed_size): +(\d+)", assembly)
    }
    assert counts == {"vgpr_spill_count": 0, "private_segment_fixed_size": 0}
    assert made.metadata.shared <= LDS_BYTES
    return assembly


@pytest.mark.parametrize(("form", "rows"), FITTING)
@pytest.mark.parametrize(("count", "group"), [(16, 128), (64, 64), (64, 128)])
def test_decode_multiplies_with_wmma_and_spills_nothing(rows: str, form: str, count: int, group: int) -> None:
    tiles = decode_tiles.hip_tiles(count)
    constants = {
        "GROUP": 64 if form == "mxfp4" else group, "ROW_GROUP": group, "BITS": 5 if form == "int5" else 4,
        "FORM": weights.FORMS[form], "MIDPOINT": weights.MIDPOINTS[form], "OPERAND": ROWS[rows],
        "BLOCK_M": count, "BLOCK_N": tiles.outputs, "SPLITS": tiles.programs, "STAGES": tiles.stages,
        "TOGETHER": tiles.together, "WIDTH": tiles.width, "PTX": False,
    }  # fmt: skip
    types = {"codes": f"*{rows}"} | ({"steps": "*i16"} if form == "mxfp4" else {})
    assembly = compiled(decode.decode_kernel, constants, tiles.warps, tiles.stages, types)
    assert WMMA[rows] in assembly


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("per_group", [True, False])
@pytest.mark.parametrize(("form", "rows"), [*FITTING, ("folded", "fp8e4nv")])
def test_prefill_multiplies_in_the_type_of_the_rows_or_in_bf16_and_spills_nothing(
    rows: str, form: str, per_group: bool, group: int
) -> None:
    tiles = prefill_tiles.HIP_TILES
    stepped = form not in ("mxfp4", "folded")
    expanded = "bf16" if form == "mxfp4" else rows
    size = 64 if form == "mxfp4" else group
    constants = {
        "GROUP": size, "ROW_GROUP": group, "CENTRED": form != "int4-lloyd" and (rows, form) != ("fp8e4nv", "int5"),
        "STEPPED": stepped, "FOLDED": form == "folded", "TERM": tl.bfloat16, "PER_GROUP": per_group,
        "BLOCK_M": tiles.rows, "BLOCK_N": tiles.outputs, "STAGES": tiles.stages,
    }  # fmt: skip
    types = {
        "codes": f"tensordesc<{rows}[{tiles.rows},{size}]>",
        "expanded": f"tensordesc<{expanded}[{tiles.outputs},{size}]>",
        "step_tiles": f"tensordesc<{'i32' if stepped else 'i16'}[{tiles.outputs}]>",
        "row_terms": f"tensordesc<bf16[{tiles.rows},64]>",
        "column_terms": f"tensordesc<bf16[{tiles.outputs},64]>",
    }
    assembly = compiled(prefill.tile_kernel, constants, tiles.warps, tiles.stages, types)
    assert {**WMMA, "fp8e4nv": "v_wmma_f32_16x16x16_fp8_fp8"}[expanded] in assembly


@pytest.mark.parametrize(
    ("form", "to", "steps"),
    [
        ("int5", "i8", "i32"),
        ("int4", "fp8e4nv", "i32"),
        ("int5", "fp8e4nv", "i32"),
        ("int4-lloyd", "fp8e4nv", "i32"),
        ("mxfp4", "i16", "i16"),
        ("mxfp4", "fp8e4nv", "i16"),
    ],
)
def test_expanding_weights_spills_nothing(form: str, to: str, steps: str) -> None:
    constants = {
        "GROUP": 64 if form == "mxfp4" else 128, "SIZE": 128, "BITS": 5 if form == "int5" else 4,
        "FORM": weights.FORMS[form], "CENTRED": to == "i8" or form == "int4",
        "WIDE": ROWS["i8" if to == "i8" else "fp8e4nv"], "BLOCK_N": 64, "PTX": False,
    }  # fmt: skip
    compiled(prefill.expand_kernel, constants, 2, 1, {"expanded": f"*{to}", "steps": f"*{steps}"})


def test_splitting_zero_points_spills_nothing() -> None:
    constants = {"SCALED": True, "MIDPOINT": 16.0, "GROUPS": 64, "BLOCK": 32}
    compiled(prefill.split_kernel, constants, 4, 1, {"row_terms": "*i16", "column_terms": "*i16"})


@pytest.mark.parametrize(("int8", "park"), [(True, False), (False, False), (True, True)])
def test_the_producer_rotates_with_wmma_and_spills_nothing(int8: bool, park: bool) -> None:
    constants = {
        "GROUP": 128, "INT8": int8, "OPERAND": tl.bfloat16, "PARK": park, "FUSED": True,
        "HARDWARE": False, "BLOCK_M": producer.HIP_ROWS, "STAGES": 1,
    }  # fmt: skip
    assembly = compiled(producer.group_kernel, constants, 8, 1, {"codes": "*i16" if park else "*i8"})
    assert WMMA["bf16"] in assembly


def test_encoding_parked_rows_spills_nothing() -> None:
    constants = {
        "GROUP": 128,
        "GROUPS": 64,
        "INT8": False,
        "FUSED": True,
        "HARDWARE": False,
        "BLOCK_M": producer.TOKEN_ROWS,
    }
    compiled(producer.token_kernel, constants, 4, 1)
