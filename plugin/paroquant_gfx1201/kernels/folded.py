"""MXFP4 whose exponents are folded into the bytes that the matrix unit reads: one scale an output, not one a block.

e4m3 holds every value of e2m1 times 2^6 exactly, and 2^-12 times as much: a block whose exponent lies up to 12 below
the largest of its output can be lowered by that while its codes are unpacked, by one subtraction from a table of eight
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from paroquant_gfx1201.formats.mxfp4 import BLOCK, Mxfp4Projection

MOST_APART = 12
"""Of the largest exponent of an output and another."""
LIFT = 6
"""Bytes are values times 2^LIFT where a block has its output's largest exponent."""
BIAS = 127
"""Of e8m0."""


@dataclass(frozen=True, eq=False)
class Folded:
    """shifts int32 [G, N]: byte b is 8 times (an exponent's unit in e4m3) how far block b of the group lies below its
    output's largest exponent; scales f32 [N]: 2^(largest - BIAS - LIFT)."""

    shifts: torch.Tensor
    scales: torch.Tensor


def below_largest(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [K/32, N], how far exponents lie below the largest of their output; and that, int32 [N].

    A block of zeros stands in nobody's way: it lies 0 below. codes uint8 [K, N], exponents uint8 [K/32, N].
    """
    largest = exponents.int().amax(0)
    if (below := largest - exponents.int()).max() <= MOST_APART:
        return below, largest  # without a look at the codes, which are 32 times as many bytes
    used = ((codes & 7) > 0).unflatten(0, (-1, BLOCK)).any(1)
    largest = torch.where(used, exponents.int(), -1).amax(0)
    return torch.where(used, largest - exponents.int(), 0), torch.where(largest < 0, BIAS, largest)


def farthest(codes: torch.Tensor, exponents: torch.Tensor) -> int:
    """How far an exponent lies below its output's largest, of codes uint8 [K, N] and exponents uint8 [K/32, N]."""
    return int(below_largest(codes, exponents)[0].max())


def folds(projections: Sequence[Mxfp4Projection]) -> bool:
    """Whether that is exact for every one of them."""
    return all(farthest(each.codes.T, each.exponents.T) <= MOST_APART for each in projections)


def fold(codes: torch.Tensor, exponents: torch.Tensor, group_size: int) -> Folded | None:
    """What takes the exponents' place; None where they are too far apart for it to be exact."""
    below, largest = below_largest(codes, exponents)
    if below.max() > MOST_APART:
        return None
    bytes_of = pad(below.unflatten(0, (-1, group_size // BLOCK)) * 8, (0, 0, 0, 4 - group_size // BLOCK))
    shifts = (bytes_of << (8 * torch.arange(4, dtype=torch.int32)).view(1, 4, 1)).sum(1).int()
    return Folded(shifts, torch.exp2((largest - BIAS - LIFT).double()).float())
