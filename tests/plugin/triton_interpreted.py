"""The Triton kernels, executed on the CPU by Triton's interpreter, against the reference.

Not collected by name: Triton decides at its first import whether to interpret, so ``test_triton_kernels`` runs this
file in a process of its own.
"""

import pytest
import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import fp4
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.triton import decode, decode_tiles, prefill, prefill_tiles, producer, weights
from paroquant_gfx1201.kernels.triton.linear import TritonLinear
from paroquant_gfx1201.modes import Band, Mode
from paroquant_gfx1201.paths import BandedLinear, Weights
from tests.plugin.conftest import random_projection, relative
from tests.plugin.hip_cases import random_codes

INTEGERS = [("int4", 64), ("int5", 64)]
VALUES = [(form, size) for form in ("int4-lloyd", "mxfp4", "folded") for size in (64, 128)]
FITTING = [(*form, "int8") for form in INTEGERS] + [(*form, "e4m3") for form in INTEGERS + VALUES]
"""Weights, their rows' group size, and the rows that they are multiplied by."""
FLOAT32_FLOOR = 2e-6
"""Relative error of f32 sums over the small K of these tests."""
TERMS_FLOOR = 1e-5
"""The same where zero points are a product of bf16 terms, to 2^-16 of what they add."""


def as_reference(rows: producer.QuantizedRows) -> reference.Activations:
    """The rows in the reference's layout."""
    groups = len(rows.row_sums)
    codes = rows.codes.float().unflatten(1, (groups, -1)).transpose(0, 1)
    return reference.Activations(codes, rows.scales.unsqueeze(-1), rows.row_sums)


def signed_permutations(groups: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """f32 [groups, size, size]: rotations by quarter turns and power-of-two scales, exact in any order of sums."""
    matrices = torch.zeros(groups, size, size)
    for group in range(groups):
        order = torch.randperm(size, generator=generator)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        powers = 2.0 ** torch.randint(-2, 3, (size,), generator=generator)
        matrices[group, torch.arange(size), order] = signs * powers
    return matrices


def adversarial_rows(count: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 rows: random, all zero, subnormal, ties of the int8 and of the e4m3 grid, a huge range."""
    x = torch.randn(count, inputs, generator=generator)
    x[1 % count] = 0.0
    x[2 % count] *= 1e-39
    x[3 % count] = torch.arange(inputs) % 255 - 127
    x[3 % count, ::2] *= 0.5
    x[4 % count] = 2.0 ** (torch.arange(inputs) % 60 - 40).float()
    return x.bfloat16()


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize("granularity", ["group", "token"])
@pytest.mark.parametrize("size", [64, 128])
def test_codes_scales_and_row_sums_are_the_references_bit_for_bit(element: str, granularity: str, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = adversarial_rows(7, 2 * size, generator)
    matrices = torch.stack([signed_permutations(2, size, generator) for _ in range(2)])
    band = Band(element, granularity, "loop")
    expected = reference.quantize_activations(rotation.rotate_groups(x.float(), matrices), band)
    actual = producer.quantize_rows(x, producer.split_rotation(matrices), element, granularity)
    for index in range(2):
        part = as_reference(actual.of(index))
        assert torch.equal(part.codes, expected.of(index).codes)
        assert torch.equal(part.scales, expected.of(index).scales)
        assert torch.equal(part.row_sums, expected.of(index).row_sums)


def test_the_three_terms_of_a_rotation_add_up_to_its_float32_matrix() -> None:
    matrices = reference.rotation_matrices(random_projection(4)).unsqueeze(0)
    terms = producer.split_rotation(matrices).double()
    assert torch.equal(terms.sum(2), matrices.double())


def every_e4m3_step() -> torch.Tensor:
    """f32: every e4m3 value, every midpoint between two, and the f32 neighbours of both."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))])
    return torch.cat([points, -points]).clamp(-448, 448)


def test_a_step_on_or_beside_every_e4m3_midpoint_encodes_as_torch_does() -> None:
    steps = every_e4m3_step()
    size = 128
    # One row a step: a peak of 448 makes the scale 448 * f32(1 / 448) = 1, so that the step is the value itself.
    x = steps.bfloat16()
    x = x[x.float() == x.float()]
    rows = torch.zeros(len(x), size, dtype=torch.bfloat16)
    rows[:, 0], rows[:, 1] = 448.0, x
    eye = torch.eye(size).expand(1, 1, size, size)
    actual = producer.quantize_rows(rows, producer.split_rotation(eye), "e4m3").of(0)
    band = Band("e4m3", "group", "loop")
    expected = reference.quantize_activations(rotation.rotate_groups(rows.float(), eye[0]), band)
    assert torch.equal(as_reference(actual).codes, expected.codes)
    assert not (actual.codes.view(torch.uint8) == 0x80).any()


@pytest.mark.parametrize("bits", [4, 5])
def test_packing_keeps_every_code_scale_and_zero(bits: int) -> None:
    projection = random_projection(bits)
    packed = weights.pack(projection)
    expected = projection.codes.int() - projection.zeros.int().repeat_interleave(64, 0)
    assert torch.equal(prefill.expand(packed).transpose(1, 2).flatten(0, 1).int(), expected)
    assert torch.equal((packed.steps & 0xFFFF).short().view(torch.float16), projection.scales)


@pytest.mark.parametrize("bits", [4, 5])
def test_expanded_floats_are_the_same_integers(bits: int) -> None:
    packed = weights.pack(random_projection(bits))
    expected = prefill.expand(packed).float()
    if prefill.keeps_zero_points(packed, torch.float8_e4m3fn):
        expected += (packed.steps >> 16).unsqueeze(-1) - 2 ** (bits - 1)
    assert torch.equal(prefill.expand(packed, torch.float8_e4m3fn).float(), expected)


def test_blocks_of_every_exponent_expand_to_what_they_are_worth() -> None:
    made = random_codes("mxfp4", 320, 16, 64, 0)
    exponents = torch.tensor([0, 1, 2, 126, 127, 128, 129, 200, 253, 100], dtype=torch.uint8)
    projection = Mxfp4Projection(made.spec, made.codes, torch.stack([exponents.roll(n) for n in range(16)]))
    expanded = prefill.expand(weights.pack(projection), torch.float8_e4m3fn)
    assert torch.equal(expanded.transpose(1, 2).flatten(0, 1).float(), projection.dequantize())


def test_exponents_that_lie_close_fold_into_e4m3_for_each_output() -> None:
    made = random_codes("folded", 320, 6, 64, 0)
    codes, exponents = made.codes.clone(), made.exponents.clone()
    # As far apart as they may be, at both ends of e8m0, for every code; and a block of zeros beyond them.
    codes[0, :32] = torch.arange(32) % 16
    codes[0, 32:64] = torch.arange(32) % 16
    exponents[0], exponents[0, 1] = 12, 0
    exponents[1], exponents[1, 3] = 254, 242
    codes[2, 64:96], exponents[2, 2] = torch.tensor([0, 8]).repeat(16), 255
    projection = Mxfp4Projection(made.spec, codes, exponents)
    packed = weights.pack(projection)
    expanded = prefill.expand(packed, torch.float8_e4m3fn, 64)
    assert expanded.dtype == torch.float8_e4m3fn
    lifted = expanded.transpose(1, 2).flatten(0, 1).double() * 2.0 ** (packed.tops.double() - 133)
    exact = fp4.decode_e2m1(codes).double().unflatten(1, (-1, 32))
    exact *= 2.0 ** (exponents.double().clamp(max=254) - 127).unsqueeze(-1)
    assert torch.equal(lifted, exact.flatten(1).T)
    apart = exponents.clone()
    apart[3, 0] = apart[3].max() - 13
    assert not weights.pack(Mxfp4Projection(made.spec, codes, apart)).is_folded


def test_every_centred_int4_and_every_int5_code_less_its_midpoint_is_an_e4m3_value() -> None:
    codes = torch.arange(-16, 17).float()
    assert torch.equal(codes.to(torch.float8_e4m3fn).float(), codes)
    assert torch.tensor(17.0).to(torch.float8_e4m3fn).float() != 17.0


def rows_for(
    projection: Projection | Mxfp4Projection, count: int, element: str, granularity: str
) -> producer.QuantizedRows:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(count, projection.inputs, generator=generator) + 0.5).bfloat16()
    terms = producer.split_rotation(reference.rotation_matrices(projection).unsqueeze(0))
    return producer.quantize_rows(x, terms, element, granularity).of(0)


@pytest.mark.parametrize(("name", "size", "element"), FITTING)
@pytest.mark.parametrize("count", [1, 17])
def test_decode_is_float64_of_the_same_codes(name: str, size: int, element: str, count: int) -> None:
    projection = random_codes(name, 3 * size, 96, size, 0)
    prepared = reference.prepare(projection)
    rows = rows_for(projection, count, element, "group")
    expected = reference.same_codes(as_reference(rows), prepared.weight, prepared.offsets)
    for programs, together, width, even in ((1, 1, 0, False), (2, 2, 4, False), (3, 2, 4, True), (99, 1, 0, True)):
        tiles = decode_tiles.DecodeTiles(64, programs, 4, 2, together, width, even)
        actual = decode.decode(rows, weights.pack(projection), torch.float32, tiles)
        assert relative(actual, expected) < FLOAT32_FLOOR


@pytest.mark.parametrize(("name", "size", "element"), FITTING)
@pytest.mark.parametrize("granularity", ["group", "token"])
def test_prefill_is_float64_of_the_same_codes(name: str, size: int, element: str, granularity: str) -> None:
    projection = random_codes(name, 3 * size, 96, size, 0)
    prepared = reference.prepare(projection)
    rows = rows_for(projection, 70, element, granularity)
    expected = reference.same_codes(as_reference(rows), prepared.weight, prepared.offsets)
    tiles = prefill_tiles.PrefillTiles(64, 64, 4, 2)
    packed = weights.pack(projection)
    actual = prefill.prefill(rows, packed, torch.float32, tiles)
    kept = prefill.keeps_zero_points(packed, rows.codes.dtype)
    assert relative(actual, expected) < (TERMS_FLOOR if kept else FLOAT32_FLOOR)


def test_decode_leaves_its_arrival_counters_at_zero_and_repeats_bit_for_bit() -> None:
    projection = random_projection(5)
    rows, packed = rows_for(projection, 3, "int8", "group"), weights.pack(projection)
    tiles = decode_tiles.DecodeTiles(64, 5, 4, 2, even=True)
    first = decode.decode(rows, packed, torch.float32, tiles)
    assert torch.equal(first, decode.decode(rows, packed, torch.float32, tiles))


def test_decode_refuses_rows_with_one_scale_per_token() -> None:
    projection = random_projection(4)
    with pytest.raises(PluginError, match="scales per token"):
        decode.decode(rows_for(projection, 2, "int8", "token"), weights.pack(projection))


@pytest.mark.parametrize(("name", "size"), VALUES)
@pytest.mark.parametrize("multiply", [decode.decode, prefill.prefill])
def test_int8_rows_are_refused_by_weights_that_are_e4m3_values(name: str, size: int, multiply) -> None:
    projection = random_codes(name, 3 * size, 96, size, 0)
    with pytest.raises(PluginError, match=r"(int4-lloyd|mxfp4) weights are e4m3 values: the rows must be e4m3 too"):
        multiply(rows_for(projection, 2, "int8", "group"), weights.pack(projection))


@pytest.mark.parametrize("count", [3, 70])
@pytest.mark.parametrize(
    ("element", "switches"),
    [("int8", {"RADIANCE_PQ_PG": "1"}), ("int8", {"RADIANCE_PQ_PTOK": "1"}), ("e4m3", {"RADIANCE_PQ_PTOK": "1"})],
)
def test_the_linear_module_computes_the_band_of_its_rows(count: int, element: str, switches: dict[str, str]) -> None:
    """Other bands' activations are further off than the f16 zero-scales of the reference, for which the bound is."""
    environment = {"RADIANCE_PQ_ZPE": "0", "RADIANCE_PQ_PTOK": "0", **switches}
    mode = Mode.from_environment({**environment, "RADIANCE_PQ_I8": "1" if element == "int8" else "0"})
    projection = random_projection(5)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, count, projection.inputs, generator=generator).bfloat16()
    expected = reference.linear(x[0], reference.prepare(projection), mode.band(count))
    y = TritonLinear(projection, mode, "cpu")(x.float())
    assert y.shape == (1, count, projection.outputs)
    assert relative(y[0], expected.double()) < 3e-4
    other = "token" if mode.band(count).granularity == "group" else "group"
    wrong = reference.linear(x[0], reference.prepare(projection), Band(element, other, "loop"))
    assert relative(y[0], wrong.double()) > 1e-3


@pytest.mark.parametrize("count", [3, 70])
def test_the_path_multiplies_each_projection_behind_its_own_rotation(count: int) -> None:
    """Asked for the epilogue, it says that it corrects the zero point exactly, and does."""
    environment = {"RADIANCE_PQ_PATH": "triton", "RADIANCE_PQ_I8": "1", "RADIANCE_PQ_ZPE": "1"}
    mode = Mode.from_environment(environment)
    projections = [random_projection(5, outputs=outputs, seed=outputs) for outputs in (96, 40)]
    linear = BandedLinear(Weights(projections, torch.bfloat16, torch.device("cpu")), mode)
    assert mode.bands["prefill"].zero_point == "epilogue"
    assert linear.choices["prefill"].path.zero_point(mode.bands["prefill"]) == "loop"
    generator = torch.Generator().manual_seed(5)
    path, product = linear.multiply(torch.randn(count, 192, generator=generator))
    assert path == linear.path == "triton"
    for y, projection, rows in zip(product.y.split([96, 40], 1), projections, product.activations(), strict=True):
        prepared = reference.prepare(projection)
        assert relative(y, reference.same_codes(rows, prepared.weight, prepared.offsets)) < FLOAT32_FLOOR
