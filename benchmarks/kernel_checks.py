"""Correctness of the Triton kernels on an NVIDIA card, as ``kernels_h200`` runs it before it times anything.

Codes, scales and row sums of the producers bit for bit against the reference on the CPU, GEMMs against float64 of the
same codes. A check raises AssertionError at the first difference.
"""

from __future__ import annotations

import itertools

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.formats import fp4
from paroquant_gfx1201.kernels.folded import MOST_APART
from paroquant_gfx1201.kernels.triton import decode, prefill, producer, weights
from paroquant_gfx1201.modes import Band

FLOAT32_BOUND = 2e-6
TERMS_BOUND = 1e-5
"""Where zero points are a product of bf16 terms, to 2^-16 of what they add."""
FP8_BOUND = 5e-4
"""Of e4m3 rows where they are multiplied as such: Hopper's fp8 unit adds the products of a group with 14 bits or so,
of which blocks of very different sizes leave the smaller ones fewer."""
APART = "mxfp4 apart"
BFLOAT16_BOUND = 1.7e-3
BFLOAT16_BOUND_OF_FEW = 2.0**-8
"""The most that rounding to bf16 can give; the mean over fewer outputs than MANY may be above 1.7e-3."""
MANY = 50_000
ROWS = (1, 5, 8, 17, 40, 64, 200)
CUDA = torch.device("cuda")
LEVELS = (-7.5, -6.0, -5.0, -4.0, -3.0, -2.25, -1.5, -0.75, 0.0625, 0.75, 1.5, 2.25, 3.25, 4.0, 5.5, 7.0)
"""Lloyd levels less 7.5, e4m3 values."""


def signed_permutations(rotations: int, groups: int, size: int) -> torch.Tensor:
    """f32 [P, G, g, g]: quarter turns with power-of-two channel scales; any order of their sums is exact."""
    order = torch.rand(rotations, groups, size).argsort(-1)
    values = (torch.randint(0, 2, order.shape) * 2.0 - 1) * 2.0 ** torch.randint(-2, 3, order.shape)
    return torch.zeros(rotations, groups, size, size).scatter(-1, order.unsqueeze(-1), values.unsqueeze(-1))


def adversarial_rows(count: int, inputs: int) -> torch.Tensor:
    """bf16 [count, inputs], in turn: random, zeros, subnormals, int8 ties, a range of 2^60, one spike."""
    x = torch.randn(count, inputs)
    ramp = torch.arange(inputs)
    x[1::6] = 0.0
    x[2::6] *= 1e-39
    x[3::6] = (ramp % 255 - 127) * torch.where(ramp % 2 == 0, 0.5, 1.0)
    x[4::6] = 2.0 ** (ramp % 60 - 40).float()
    x[5::6] *= 1e-4
    x[5::6, 7] = 3e4
    return x.bfloat16()


def as_reference(rows: producer.QuantizedRows) -> reference.Activations:
    """The rows in the reference's layout, on the CPU."""
    codes = rows.codes.cpu().float().unflatten(1, (len(rows.row_sums), -1)).transpose(0, 1)
    return reference.Activations(codes, rows.scales.cpu().unsqueeze(-1), rows.row_sums.cpu())


def check_producers(case: tuple[tuple[int, int], int]) -> dict[str, int]:
    """Number of launches and codes compared. Raises AssertionError at the first difference."""
    (inputs, size), rotations = case
    launches = values = 0
    matrices = signed_permutations(rotations, inputs // size, size)
    terms = producer.split_rotation(matrices).to(CUDA)
    for count in ROWS:
        x = adversarial_rows(count, inputs)
        rotated = rotation.rotate_groups(x.float(), matrices)
        for element, granularity in itertools.product(("int8", "e4m3"), ("group", "token")):
            expected = reference.quantize_activations(rotated.clone(), Band(element, granularity, "loop"))
            actual = producer.quantize_rows(x.to(CUDA), terms, element, granularity)
            for index in range(rotations):
                part, whole = as_reference(actual.of(index)), expected.of(index)
                where = f"{element} per {granularity}, K={inputs} M={count} P={rotations}"
                assert torch.equal(part.codes, whole.codes), f"codes differ: {where}"
                assert torch.equal(part.scales, whole.scales), f"scales differ: {where}"
                assert torch.equal(part.row_sums, whole.row_sums), f"row sums differ: {where}"
            launches += 1
            values += part.codes.numel() * rotations
    return {"launches": launches, "codes": values}


def check_real_rotation() -> dict[str, float]:
    """Random orthogonal matrices, where the order of f32 sums matters: how many codes differ, and by how much."""
    matrices = torch.linalg.qr(torch.randn(1, 40, 128, 128))[0]
    x = torch.randn(512, 5120).bfloat16()
    actual = as_reference(producer.quantize_rows(x.to(CUDA), producer.split_rotation(matrices).to(CUDA), "int8").of(0))
    rotated = rotation.rotate_groups(x.float(), matrices)
    expected = reference.quantize_activations(rotated, Band("int8", "group", "loop")).of(0)
    difference = (actual.codes - expected.codes).abs()
    assert difference.max() <= 1, "a code is off by more than one"
    return {"codes": difference.numel(), "off_by_one": int(difference.sum())}


def random_weight(inputs: int, size: int, outputs: int, form: str) -> tuple[weights.PackedWeight, torch.Tensor]:
    """A packed weight on the card and the same in float64 [K, N]. APART: its exponents cannot be folded."""
    if form in ("mxfp4", APART):
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=CUDA)
        lowest = 121 - (MOST_APART if form == "mxfp4" else 4 * MOST_APART)
        exponents = torch.randint(lowest, 122, (outputs, inputs // 32), dtype=torch.uint8, device=CUDA)
        blocks = fp4.decode_e2m1(codes.cpu()).to(CUDA).double().unflatten(1, (-1, 32))
        exact = (blocks * 2.0 ** (exponents.double() - 127).unsqueeze(-1)).flatten(1).T
        return weights.pack_blocks(codes, exponents), exact
    bits = 5 if form == "int5" else 4
    codes = torch.randint(0, 1 << bits, (inputs, outputs), dtype=torch.uint8, device=CUDA)
    zeros = torch.randint(0, 1 << bits, (inputs // size, outputs), dtype=torch.uint8, device=CUDA)
    scales = (torch.rand(inputs // size, outputs, device=CUDA) * 0.01 + 0.001).half()
    levels = None
    values = codes.double()
    if form == "int4-lloyd":
        levels = torch.tensor(LEVELS, device=CUDA) + 7.5
        values = levels.double()[codes.long()]
    centred = values - zeros.double().repeat_interleave(size, 0)
    exact = centred * scales.double().repeat_interleave(size, 0)
    return weights.pack_codes(codes, zeros, scales, bits, levels), exact


def random_rows(count: int, inputs: int, size: int, element: str, granularity: str) -> producer.QuantizedRows:
    """Rows of random activations under a random orthogonal rotation."""
    matrices = torch.linalg.qr(torch.randn(1, inputs // size, size, size, device=CUDA))[0]
    x = (torch.randn(count, inputs, device=CUDA) * 2.0 ** torch.randn(count, 1, device=CUDA)).bfloat16()
    return producer.quantize_rows(x, producer.split_rotation(matrices), element, granularity).of(0)


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected`` f64."""
    return ((y.double() - expected).norm() / expected.norm()).item()


def check_gemms(case: tuple[tuple[int, int, int], str, tuple[str, str]]) -> dict[str, float]:
    """Path to its largest relative error, with f32 and with bf16 outputs. NaN is above every bound.

    Raises AssertionError for an error above the bound.
    """
    (inputs, size, outputs), form, (element, granularity) = case
    worst: dict[str, float] = {}
    packed, exact = random_weight(inputs, size, outputs, form)
    for count in ROWS:
        rows = random_rows(count, inputs, size, element, granularity)
        values = rows.codes.double()
        by_group = values.unflatten(1, (len(rows.row_sums), -1)) * rows.scales.double().T.unsqueeze(-1)
        expected = by_group.flatten(1) @ exact
        bands = [("prefill", prefill.prefill)]
        if count <= decode.MAX_ROWS and granularity == "group":
            bands.append(("decode", decode.decode))
        for (band, kernel), dtype in itertools.product(bands, (torch.float32, torch.bfloat16)):
            error = relative(kernel(rows, packed, dtype), expected)
            path = f"{band} {form} x {element} per {granularity}"
            path += f", {str(dtype)[6:]} outputs"
            if dtype == torch.bfloat16:
                bound = BFLOAT16_BOUND if expected.numel() > MANY else BFLOAT16_BOUND_OF_FEW
            else:
                kind = rows.codes.dtype
                of_rows = prefill.expanded_type(packed, kind) == kind
                fp8 = element == "e4m3" and (of_rows if band == "prefill" else decode.on_hopper(rows, packed))
                terms = band == "prefill" and prefill.keeps_zero_points(packed, kind)
                bound = FP8_BOUND if fp8 else TERMS_BOUND if terms else FLOAT32_BOUND
            assert error <= bound, f"{path}, K={inputs} N={outputs} M={count}: relative error {error:.2e}"
            worst[path] = max(worst.get(path, 0.0), error)
    return worst
