"""One kernel launch as a value: what the GPU's loader and the emulation both carry out."""

from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
OBJECTS = SOURCES / "objects"
"""Code objects, one for each source."""
WAVE = 32
"""Lanes of a wave."""


@dataclass(frozen=True)
class Out:
    """A buffer that the kernel only writes, every element of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class InOut:
    """A buffer that the kernel reads and writes."""

    tensor: torch.Tensor


Argument = torch.Tensor | Out | InOut | int
"""A tensor is a buffer that the kernel only reads."""


@dataclass(frozen=True, eq=False)
class Launch:
    """``kernel`` of kernels/hip/``source`` over ``grid`` workgroups of ``threads``; dynamic_lds in bytes."""

    source: str
    kernel: str
    grid: tuple[int, ...]
    threads: int
    arguments: tuple[Argument, ...]
    dynamic_lds: int = 0
