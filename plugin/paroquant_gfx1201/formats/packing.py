"""Bit packing of codes: AWQ nibble words and the int5 fifth-bit plane.

All functions work on the last dimension and are exact inverses of each other.
"""

import torch

NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ order: nibble slot s (bits 4s..4s+3) of word w holds column 8 * w + NIBBLE_COLUMNS[s]."""


def _sum_bits(fields: torch.Tensor, width: int) -> torch.Tensor:
    """[..., n] fields of ``width`` bits, slot 0 lowest, to [...] int32 words (two's complement)."""
    shifts = torch.arange(fields.shape[-1], dtype=torch.int64) * width
    words = (fields.to(torch.int64) << shifts).sum(-1)
    # Word values reach 2**32 - 1; fold into int32's range before the narrowing cast.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., N] (low four bits used) to int32 [..., N/8]. N must be a multiple of 8."""
    *rows, columns = codes.shape
    slots = (codes & 15).reshape(*rows, columns // 8, 8)[..., list(NIBBLE_COLUMNS)]
    return _sum_bits(slots, 4)


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., N/8] to uint8 [..., N] with values 0..15."""
    shifts = torch.arange(8, dtype=torch.int32) * 4
    slots = (words.unsqueeze(-1) >> shifts) & 15
    column_of_slot = torch.tensor(NIBBLE_COLUMNS)
    natural = slots[..., torch.argsort(column_of_slot)]
    return natural.to(torch.uint8).flatten(-2)


def pack_plane(codes: torch.Tensor) -> torch.Tensor:
    """Bit 4 of uint8 [..., N] to int32 [..., N/32]: bit n % 32 (LSB first) of word n // 32."""
    *rows, columns = codes.shape
    return _sum_bits(((codes >> 4) & 1).reshape(*rows, columns // 32, 32), 1)


def unpack_plane(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., N/32] to uint8 [..., N] with values 0 or 16, ready to be OR-ed to the nibbles."""
    shifts = torch.arange(32, dtype=torch.int32)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return (bits << 4).to(torch.uint8).flatten(-2)
