"""E2M1 elements, E8M0 block scales, and two elements to a byte. Source: OCP Microscaling Formats v1.0."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0..7; bit 3 is the sign."""

E8M0_BIAS = 127
E8M0_NAN = 255


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of the nearest elements, ties to the even code, saturating at 6."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    # A boundary whose lower neighbour has an odd code belongs to the upper one.
    for boundary, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= boundary if inclusive else size > boundary
    return code | (values.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """f32 values of uint8 codes 0..15."""
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float32)
    return table[codes.long()]


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of codes 0..15 to uint8 [..., K/2]; even k in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_pairs``."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def encode_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 of integer exponents, saturating at 2**-127 and 2**127."""
    return (exponents + E8M0_BIAS).clamp(0, 2 * E8M0_BIAS).to(torch.uint8)


def decode_e8m0(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """2**(b - 127) of uint8 b; NaN for 255. Exact: float32 holds 2**-127 as a subnormal."""
    values = torch.exp2(scales.double() - E8M0_BIAS)
    return torch.where(scales == E8M0_NAN, torch.nan, values).to(dtype)
