"""Decode kernels compiled ahead of time for Hopper, capability 9.0: what can be said of them without the card."""

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from paroquant_gfx1201.kernels.triton import decode, decode_tiles, hopper_decode, weights  # noqa: E402
from tests.plugin import sass  # noqa: E402
from tests.plugin.ahead import compiled  # noqa: E402

pytestmark = pytest.mark.skipif(weights.INTERPRETED, reason="Triton interprets kernels in this process")

HOPPER = GPUTarget("cuda", 90, 32)
MULTIPROCESSOR = {"shared": 227 * 1024, "registers": 65536}
PRODUCTS = {"i8": "m64n{}k32.s32.s8.s8", "fp8e4nv": "m64n{}k32.f32.e4m3.e4m3"}


def described(kind: str, block: list[int], swizzle: int, bits: int = 8) -> str:
    """The signature of a tensor descriptor."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{kind}{block},{layout!r}>".replace(" ", "")


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("int4", "i8"),
        ("int5", "i8"),
        ("int4", "fp8e4nv"),
        ("int5", "fp8e4nv"),
        ("int4-lloyd", "fp8e4nv"),
        ("mxfp4", "fp8e4nv"),
    ],
)
@pytest.mark.parametrize("count", [8, 64])
def test_decode_multiplies_with_wgmma_and_its_programs_fit_the_multiprocessor(
    form: str, rows: str, count: int, tmp_path: Path
) -> None:
    bits = 5 if form == "int5" else 4
    tiles = hopper_decode.tiles_for(count, form)
    constants = {
        "BITS": bits, "FORM": weights.FORMS[form], "MIDPOINT": weights.MIDPOINTS[form],
        "BLOCK_M": count, "BLOCK_N": tiles.outputs, "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    blocks = form == "mxfp4"
    types = {
        "nibbles": described("u8", [tiles.outputs // (4 if blocks else 2), 128], 128),
        "plane": described("u8", [tiles.outputs // 8, 128], 0),
        "steps": described("i16", [tiles.outputs], 0, 16) if blocks else described("i32", [tiles.outputs], 0, 32),
        "levels": "*fp8e4nv", "tops": "*u8", "codes": described(rows, [count, 128], 128),
        "row_scales": "*fp32", "row_sums": "*fp32", "y": "*bf16", "partial": "*fp32", "arrived": "*i32",
    }  # fmt: skip
    kernel = hopper_decode.hopper_decode_kernel
    made = compiled(kernel, HOPPER, constants, types, num_warps=tiles.warps, maxnreg=tiles.registers)
    assert f"wgmma.mma_async.sync.aligned.{PRODUCTS[rows].format(count)}" in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    code = sass.disassemble(made.asm["cubin"], tmp_path)
    assert sum(instruction.multiplies for instruction in code) >= 4 and sass.disturbed(code) == []
    assert not [instruction for instruction in code if instruction.opcode.startswith(("LDL", "STL"))]
    # The copying warp brings a whole group of four with it.
    threads = 32 * (tiles.warps + 4)
    assert tiles.programs * made.metadata.shared <= MULTIPROCESSOR["shared"]
    assert tiles.programs * threads * tiles.registers <= MULTIPROCESSOR["registers"]


@pytest.mark.parametrize(("form", "unpacked_by"), [("int4-lloyd", "cvt.rn.f16x2.e4m3x2"), ("mxfp4", "mul.rn.f16x2")])
@pytest.mark.parametrize("count", [8, 64])
def test_the_portable_decode_unpacks_codes_that_are_no_integers_in_registers(
    form: str, unpacked_by: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_tiles, "processors", lambda device: 132)
    tiles = decode_tiles.tiles_for(count, 4, torch.float8_e4m3fn, torch.device("cuda"))
    constants = {
        "GROUP": 64 if form == "mxfp4" else 128, "ROW_GROUP": 128, "BITS": 4, "FORM": weights.FORMS[form],
        "MIDPOINT": weights.MIDPOINTS[form],
        "OPERAND": tl.float16, "BLOCK_M": count, "BLOCK_N": tiles.outputs,
        "SPLITS": 0 if tiles.even else tiles.programs,
        "STAGES": tiles.stages, "TOGETHER": tiles.together, "WIDTH": tiles.width, "PTX": True,
    }  # fmt: skip
    types = {
        "codes": "*fp8e4nv", "row_scales": "*fp32", "row_sums": "*fp32", "nibbles": "*u8", "plane": "*u8",
        "steps": "*i16" if form == "mxfp4" else "*i32", "levels": "*fp8e4nv", "y": "*bf16", "partial": "*fp32",
        "arrived": "*i32",
    }  # fmt: skip
    made = compiled(decode.decode_kernel, HOPPER, constants, types, num_warps=tiles.warps, num_stages=tiles.stages)
    assert unpacked_by in made.asm["ptx"] and "mma" in made.asm["ptx"]
