"""What clang makes of the HIP kernels for gfx1201: registers, spills, LDS, wave size, opcodes, the hot loop."""

from functools import cache
from pathlib import Path

import pytest

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip import codeobject
from paroquant_gfx1201.kernels.hip.codeobject import KernelCode
from paroquant_gfx1201.roofline import R9700
from tests.plugin.hip_cases import needs_clang

VERSIONS = [pytest.param(version, marks=needs_clang(version)) for version in (19, 22)]
KINDS = ("int4_int8", "int4_e4m3", "int5_int8", "int5_e4m3", "mxfp4_e4m3", "folded_e4m3", "lloyd_e4m3")
TILED = (*(f"{kind} token" for kind in KINDS), "int4_int8 group", "int5_int8 group")
EPILOGUES = (
    *("int4_int8 group", "int4_int8 token", "int5_int8 group", "int5_int8 token"),
    *("int5_e4m3 token", "lloyd_e4m3 token"),
)
SCALES = ("group", "token")
FUSED = ("silu_mul", "sigmoid_gate", "gated_norm", "add_norm")
LDS_OF_WORKGROUP = 65536

CODE_BYTES = {"int4": 0.5, "int5": 0.625, "mxfp4": 0.5, "folded": 0.5, "lloyd": 0.5}


@cache
def kernels(version: int, directory: Path) -> dict[str, KernelCode]:
    built = sorted(directory.glob("*.co")) or codeobject.build(directory, version)
    return {name: kernel for path in built for name, kernel in codeobject.inspect(path, version).items()}


@pytest.fixture(params=VERSIONS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, KernelCode]:
    if request.param == 19:
        return kernels(19, request.getfixturevalue("objects"))
    return kernels(request.param, tmp_path_factory.getbasetemp() / f"objects-{request.param}")


def test_every_kernel_is_there(compiled: dict[str, KernelCode]) -> None:
    decode = {f"decode_{kind}_g{group}_m{rows}" for kind in KINDS for group in (64, 128) for rows in (16, 32, 64)}
    producers = {
        f"{granularity}_{element}_g{group}_r{krot}"
        for granularity in SCALES
        for element in ("int8", "e4m3")
        for group in (64, 128)
        for krot in (1, 8)
    }
    tiled_rows = ("token_int8", "token_e4m3", "group_int8")
    producers |= {f"{rows}_g{group}_r{krot}_tiles" for rows in tiled_rows for group in (64, 128) for krot in (1, 8)}
    prefill = {
        f"prefill_{kind}_g{group}_{granularity}" for kind in KINDS for group in (64, 128) for granularity in SCALES
    }
    for kinds, last in ((TILED, "tiles"), (EPILOGUES, "tiles_epilogue")):
        for kind, granularity in (each.split() for each in kinds):
            prefill |= {f"prefill_{kind}_g{group}_{granularity}_{last}" for group in (64, 128)}
    fused = {f"{kind}_{element}_g{group}" for kind in FUSED for element in ("int8", "e4m3") for group in (64, 128)}
    skinny = {f"skinny_bf16_m{rows}" for rows in (16, 32, 64)}
    assert set(compiled) == decode | fused | prefill | producers | skinny


def test_nothing_spills_and_nothing_uses_scratch_or_another_wave_size(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        assert (kernel.spills, kernel.scratch_bytes, kernel.wave) == (0, 0, 32), kernel.name
        assert kernel.lds_bytes <= LDS_OF_WORKGROUP, kernel.name
        assert kernel.count("scratch_", loop=False) == 0, kernel.name


def test_decode_keeps_the_waves_that_hide_memory(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        rows = kernel.name.rpartition("_m")[2]
        if kernel.name.startswith("decode"):
            assert kernel.occupancy >= {"16": 10, "32": 5, "64": 5}[rows], (kernel.name, kernel.vgprs)


def test_decode_multiplies_on_the_matrix_unit_and_reads_weights_past_the_cache(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        if not kernel.name.startswith("decode"):
            continue
        opcode = "v_wmma_i32_16x16x16_iu8" if "_int8_" in kernel.name else "v_wmma_f32_16x16x16_fp8_fp8"
        group, rows = (int(part[1:]) for part in kernel.name.split("_")[-2:])
        assert kernel.count("v_wmma") == kernel.count(opcode) == 2 * (group // 16) * (rows // 16), kernel.name
        assert kernel.count("v_dot", loop=False) == 0, kernel.name
        assert kernel.count("ds_") == 0, kernel.name


def test_decode_waits_for_memory_and_not_for_instructions(compiled: dict[str, KernelCode]) -> None:
    """At up to 16 rows the loop's instructions take at most half of the clocks in which its weights arrive; at up to
    64 rows at most all of them, except MXFP4's, whose scales are four times as many."""
    for kernel in compiled.values():
        if not kernel.name.startswith("decode"):
            continue
        _, name, _, group, rows = kernel.name.split("_")
        scales = int(group[1:]) / 32 if name == "mxfp4" else 4
        weight_bytes = 2 * 16 * (int(group[1:]) * CODE_BYTES[name] + scales)
        clocks = kernel.valu + R9700.wmma_clocks * kernel.count("v_wmma")
        allowed = {"m16": 0.5, "m32": 1.0, "m64": 1.5 if name == "mxfp4" or group == "g64" else 1.0}[rows]
        arrive = weight_bytes / R9700.bytes_a_clock
        assert clocks <= allowed * arrive, (kernel.name, clocks, arrive)


PREFILL_VALU = {"int4": 70, "int5": 80, "mxfp4": 150, "folded": 22, "lloyd": 60}
"""Of a group's 16 x 16 outputs, at most. The fold of a published kernel for this GPU is 16 (e4m3 per token); unpacking,
scales, addresses and the conversion from int32 come on top here."""


def test_folded_exponents_leave_the_sums_on_the_matrix_unit(compiled: dict[str, KernelCode]) -> None:
    """Per token nothing is done to a product but to add the next: what is left unpacks weights, 8 words of a lane for
    64 inputs and 16 outputs at up to six instructions each, and is less than a quarter of the matrix unit's clocks."""
    for group in (64, 128):
        for last in ("token", "token_tiles"):
            kernel = compiled[f"prefill_folded_e4m3_g{group}_{last}"]
            assert kernel.valu <= group // 64 * 8 * 6 + 16, (kernel.name, kernel.valu)
            assert kernel.valu < R9700.wmma_clocks * kernel.count("v_wmma") / 4
            assert 8 * kernel.valu < compiled[f"prefill_mxfp4_e4m3_g{group}_{last}"].valu, kernel.name
        for rows in (16, 32, 64):
            folded, plain = (compiled[f"decode_{form}_e4m3_g{group}_m{rows}"] for form in ("folded", "mxfp4"))
            assert folded.valu < 0.6 * plain.valu, (folded.name, folded.valu, plain.valu)


def test_rows_in_tiles_cost_the_loop_no_instruction_more(compiled: dict[str, KernelCode]) -> None:
    """The same 16-byte loads, whose addresses are as cheap, and the same products: only where they lie is another."""
    for name, kernel in compiled.items():
        if name.startswith("prefill") and name.endswith("_tiles"):
            plain = compiled[name.removesuffix("_tiles")]
            assert kernel.count("global_load_b128") == plain.count("global_load_b128") >= 4, name
            assert kernel.count("v_wmma") == plain.count("v_wmma") and kernel.valu <= plain.valu + 8, name
        if name.startswith(("group", "token")) and name.endswith("_tiles"):
            assert kernel.valu <= compiled[name.removesuffix("_tiles")].valu + 16, name


def test_prefill_is_matrix_instructions_first(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        if not kernel.name.startswith("prefill"):
            continue
        _, name, element, group = kernel.name.split("_")[:4]
        opcode = "v_wmma_i32_16x16x16_iu8" if element == "int8" else "v_wmma_f32_16x16x16_fp8_fp8"
        products = 2 * 4 * int(group[1:]) // 16
        assert kernel.count("v_wmma") == kernel.count(opcode) == products, kernel.name
        assert kernel.count("s_barrier") <= 2, kernel.name
        assert kernel.occupancy >= 6, (kernel.name, kernel.vgprs)
        assert kernel.valu / 8 <= PREFILL_VALU[name], (kernel.name, kernel.valu / 8)


def test_the_epilogue_takes_the_zero_point_out_of_the_loop(compiled: dict[str, KernelCode]) -> None:
    """One instruction less at least for each output of a group: 8 of a lane's, in 8 tiles."""
    for name, kernel in compiled.items():
        if name.endswith("_epilogue"):
            loop = compiled[name.removesuffix("_epilogue")]
            assert kernel.valu <= loop.valu - 64, (name, kernel.valu, loop.valu)
            outside = kernel.count("v_wmma_f32_16x16x16_f16", loop=False)
            assert outside == 8 and kernel.count("v_wmma_f32_16x16x16_f16") == 0, name
            assert loop.count("v_wmma_f32_16x16x16_f16", loop=False) == 0, name
    # int4 by e4m3 rows takes centred codes from a table for it, and has still fewer.
    for group in (64, 128):
        by_table = compiled[f"prefill_lloyd_e4m3_g{group}_token_tiles_epilogue"]
        assert by_table.valu < compiled[f"prefill_int4_e4m3_g{group}_token_tiles"].valu


def test_producers_convert_in_hardware_and_never_wait_for_other_waves(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        if kernel.name.startswith("group"):
            assert kernel.count("s_barrier", loop=False) == 0, kernel.name
            assert kernel.occupancy >= 12, (kernel.name, kernel.vgprs)
        if kernel.name.startswith(("group_e4m3", "token_e4m3")):
            values = 4 if "_g128_" in kernel.name else 2
            assert kernel.count("v_cvt_pk_fp8_f32", loop=False) == values // 2, kernel.name
        if kernel.name.startswith(SCALES):
            assert kernel.count("v_div_", loop=False) <= 8, kernel.name


def test_fused_producers_meet_other_waves_only_for_the_norm_of_a_row(compiled: dict[str, KernelCode]) -> None:
    for kernel in compiled.values():
        if kernel.name.startswith(FUSED):
            assert kernel.count("s_barrier_wait", loop=False) == kernel.name.startswith("add_norm"), kernel.name
            assert kernel.occupancy >= 12, (kernel.name, kernel.vgprs)


def test_the_skinny_product_is_loads_and_matrix_instructions(compiled: dict[str, KernelCode]) -> None:
    """Each turn two 16-byte loads and two products for the outputs' tile and each tile of rows, and little else."""
    for rows in (16, 32, 64):
        kernel = compiled[f"skinny_bf16_m{rows}"]
        tiles = rows // 16
        assert kernel.count("v_wmma") == kernel.count("v_wmma_f32_16x16x16_bf16") == 2 * tiles
        assert kernel.count("global_load_b128") == 2 * (1 + tiles)
        assert kernel.valu <= 8 * (1 + tiles), kernel.valu
        assert kernel.occupancy >= 10, kernel.vgprs


def test_a_rotation_layer_is_as_few_lds_instructions_as_its_layout_promises(compiled: dict[str, KernelCode]) -> None:
    """A layer reads R values as R / 2 pairs and stores R; the first stores and the last read come on top."""
    for group, values in ((128, 4), (64, 2)):
        kernel = compiled[f"group_int8_g{group}_r8"]
        assert kernel.count("ds_") <= values + 8 * (values // 2 + values) + 1


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(tmp_path: Path) -> None:
    if codeobject.missing(19):
        pytest.skip(codeobject.missing(19))
    with pytest.raises(PluginError, match="no such file"):
        codeobject.compile_source("absent.hip", tmp_path / "out")
