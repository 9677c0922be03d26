"""The producers' arithmetic over whole ranges of inputs: e4m3 conversion, quotients, int8 rounding."""

import pytest
import torch

from paroquant_gfx1201.kernels import simt
from paroquant_gfx1201.kernels.hip.launch import Launch, Out
from tests.plugin.hip_cases import LONG, needs_emulation, only

pytestmark = needs_emulation

ENCODERS = only(
    "producer.hip",
    """
#include "encode.h"
// Two lanes' worth of inputs a step: codes of consecutive bit patterns from `first`, each `stride` apart.
KERNEL(1024) encode_patterns(u8* codes, int first, int stride, int count) {
  u32 bits = static_cast<u32>(first);
  for (int i = thread_id() * 4; i < count; i += 32 * 4) {
    float values[4];
    for (int j = 0; j < 4; j++) values[j] = __builtin_bit_cast(float, bits + static_cast<u32>(stride) * (i + j));
    u32 low = encode_e4m3_pair(values[0], values[1]), high = encode_e4m3_pair(values[2], values[3]);
    *reinterpret_cast<u32*>(codes + i) = plain_zeros(low | high << 16);
  }
}
EXPORT(encode_patterns)

// For every mantissa of a divisor: are quotients the nearest floats? Where the reciprocal is not, for all dividends.
KERNEL(1024) divide(int* many_reciprocals, int* quotients, int stride) {
  int other_reciprocals = 0, other_quotients = 0;
  u32 state = thread_id() * 2654435761u + 1;
  for (u32 mantissa = thread_id(); mantissa < 1 << 23; mantissa += 32 * stride) {
    float divisor = __builtin_bit_cast(float, 0x3f800000 | mantissa), inverse = reciprocal(divisor);
    bool nearest = inverse == 1.0f / divisor;
    other_reciprocals += !nearest;
    int tries = nearest ? 8 : 1 << 23;
    for (int i = 0; i < tries; i++) {
      state = state * 1664525u + 1013904223u;
      float value = __builtin_bit_cast(float, 0x42000000 | (nearest ? state >> 9 : static_cast<u32>(i)));
      other_quotients += quotient(value, divisor, inverse) != value / divisor;
    }
  }
  many_reciprocals[thread_id()] = other_reciprocals > 4;
  quotients[thread_id()] = other_quotients;
}
EXPORT(divide)
""",
)


def expected_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8: torch's e4m3 of finite f32 values clamped to +-448, with NaN and -0 as 0."""
    clamped = torch.where(values.isnan(), 0.0, values.clamp(-448, 448))
    codes = clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(codes == 0x80, 0, codes)


def patterns(first: int, stride: int, count: int) -> torch.Tensor:
    bits = (torch.arange(count, dtype=torch.int64) * stride + first) & 0xFFFFFFFF
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def check_patterns(first: int, stride: int, count: int) -> None:
    signed = first - 2**32 if first >= 2**31 else first
    launch = Launch("producer.hip", "encode_patterns", (1,), 32, (Out((count,), torch.uint8), signed, stride, count))
    (codes,) = simt.run(launch, (ENCODERS,))
    assert torch.equal(codes.complete(), expected_codes(patterns(first, stride, count)))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x5A5A, 0x7FFF, 0x8000, 0xFFFF])
def test_e4m3_codes_are_the_nearest_for_every_upper_half_of_a_float(low: int) -> None:
    """Codes change, and ties lie, only where the upper half changes: lower halves of 0, of 1 and of the ends decide."""
    check_patterns(low, 1 << 16, 1 << 16)


@pytest.mark.skipif(not LONG, reason="all 2**32 floats take minutes: set PARO_LONG_TESTS=1")
def test_e4m3_codes_are_the_nearest_for_all_floats() -> None:
    for block in range(1 << 8):
        check_patterns(block << 24, 1, 1 << 24)


def test_quotients_are_correctly_rounded_whichever_way_the_reciprocal_estimate_errs() -> None:
    """Both runs of a launch have estimates off by one ulp, to opposite sides; neither may matter. A few reciprocals are
    not the nearest float all the same, and Markstein's theorem says nothing about them: they meet every dividend."""
    stride = 1 if LONG else 16
    launch = Launch("producer.hip", "divide", (1,), 32, (Out((32,), torch.int32), Out((32,), torch.int32), stride))
    many_reciprocals, quotients = simt.run(launch, (ENCODERS,))
    assert quotients.complete().sum() == 0
    assert many_reciprocals.complete().sum() == 0
