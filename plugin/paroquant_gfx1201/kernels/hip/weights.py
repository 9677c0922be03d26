"""A projection in the order in which the decode GEMM's lanes read it.

The GEMM multiplies tiles of 16 outputs by blocks of 32 inputs, two matrix instructions each. Lane l of a wave holds
output l % 16 and, of a block, inputs 16 * (l // 16) .. + 15: instruction s takes the bytes 8 s .. 8 s + 7 of them. An
activation row gives a lane those inputs as 16 bytes in a row, so activations need no order of their own.
"""

import itertools
from dataclasses import dataclass

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import BLOCK, Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection

TILE = 32
"""Outputs of a workgroup, so N of every projection is a multiple of it."""


@dataclass(frozen=True, eq=False)
class FragmentWeight:
    """Weights of one or several projections with the same K, outputs one after the other; G = K / g.

    codes int32 [G, N/16, Q, 32, 4], Q = g/64: word w of quad q holds half of a lane's 16 codes of block 2 q + w // 2,
    codes 8 (w % 2) .. + 3 in its bytes' low nibbles and the next four in the high ones.
    plane int32 [G, N/16, 32, Q]: bit 8 i + j of word q is the fifth bit of code 4 j + i of the quad's 32; [0] for int4.
    steps int32 [G, N]: f16 scale, and the zero point in bits 16 and up; or, for MXFP4, uint8 [K/32, N] exponents.
    starts: first output of each projection.
    """

    codes: torch.Tensor
    plane: torch.Tensor
    steps: torch.Tensor
    format: str
    group_size: int
    outputs: int
    starts: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[0] * self.group_size

    def to(self, device: torch.device | str) -> "FragmentWeight":
        """A copy on ``device``."""
        tensors = (self.codes.to(device), self.plane.to(device), self.steps.to(device))
        return FragmentWeight(*tensors, self.format, self.group_size, self.outputs, self.starts)

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads of it."""
        return self.codes.nbytes + self.plane.nbytes + self.steps.nbytes


def by_lane(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """uint8 [K, N] to [G, N/16, 32 lanes, g/32 blocks, 4 (fours of codes), 4]."""
    inputs, outputs = codes.shape
    # k = group, block, half, four, byte; n = tile, lane % 16; lane = half, lane % 16.
    split = codes.view(inputs // group_size, group_size // 32, 2, 4, 4, outputs // 16, 16)
    return split.permute(0, 5, 2, 6, 1, 3, 4).reshape(inputs // group_size, outputs // 16, 32, group_size // 32, 4, 4)


def _words(fields: torch.Tensor, width: int) -> torch.Tensor:
    """[..., n] fields of ``width`` bits to int32 words, the first lowest."""
    shifts = torch.arange(fields.shape[-1]) * width
    words = (fields.long() << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _nibble_words(lanes: torch.Tensor) -> torch.Tensor:
    """by_lane's [G, T, 32, B, 4, 4] to FragmentWeight.codes."""
    low, high = lanes[:, :, :, :, 0::2] & 15, lanes[:, :, :, :, 1::2] & 15
    words = _words(low | high << 4, 8)  # [G, T, 32, B, 2]
    groups, tiles, width, blocks, _ = words.shape
    return words.view(groups, tiles, width, blocks // 2, 4).transpose(2, 3).contiguous()


def _plane_words(lanes: torch.Tensor) -> torch.Tensor:
    """by_lane's [G, T, 32, B, 4, 4] to FragmentWeight.plane."""
    groups, tiles, width, blocks = lanes.shape[:4]
    fours = (lanes >> 4 & 1).view(groups, tiles, width, blocks // 2, 8, 4)
    return _words(fours.transpose(4, 5).flatten(4), 1).contiguous()


def refusal(projections: list[Projection] | list[Mxfp4Projection]) -> str:
    """Why the GEMMs cannot multiply these; empty where they can."""
    spec = projections[0].spec
    if len(projections) > 3:
        return f"the GEMMs select among at most three rotations, not {len(projections)}"
    if wrong := next((projection.outputs for projection in projections if projection.outputs % TILE), None):
        return f"the GEMMs take outputs in multiples of {TILE}, not N={wrong}"
    if spec.group_size not in (64, 128):
        return f"the GEMMs take groups of 64 or 128, not {spec.group_size}"
    if isinstance(projections[0], Projection) and spec.lloyd:
        return "the GEMMs multiply integer codes: int4-lloyd has no HIP kernel"
    return ""


def pack(projections: list[Projection] | list[Mxfp4Projection]) -> FragmentWeight:
    """Projections with one K, format and group size, as one weight. Raises PluginError for what ``refusal`` names."""
    if reason := refusal(projections):
        raise PluginError(reason)
    spec = projections[0].spec
    ends = list(itertools.accumulate(projection.outputs for projection in projections))
    starts, outputs = [0, *ends[:-1]], ends[-1]
    if isinstance(projections[0], Mxfp4Projection):
        codes = torch.cat([projection.codes for projection in projections]).T
        exponents = torch.cat([projection.exponents for projection in projections]).T.contiguous()
        if exponents.shape[0] * BLOCK != codes.shape[0]:
            raise PluginError("an MXFP4 weight needs one exponent for 32 inputs")
        lanes = by_lane(codes.contiguous(), spec.group_size)
        empty = torch.empty(0, dtype=torch.int32)
        return FragmentWeight(_nibble_words(lanes), empty, exponents, "mxfp4", spec.group_size, outputs, tuple(starts))
    lanes = by_lane(torch.cat([projection.codes for projection in projections], 1), spec.group_size)
    scales = torch.cat([projection.scales for projection in projections], 1)
    zeros = torch.cat([projection.zeros for projection in projections], 1)
    steps = (scales.contiguous().view(torch.int16).int() & 0xFFFF) | (zeros.int() << 16)
    plane = _plane_words(lanes) if spec.bits == 5 else torch.empty(0, dtype=torch.int32)
    return FragmentWeight(
        _nibble_words(lanes), plane, steps, f"int{spec.bits}", spec.group_size, outputs, tuple(starts)
    )
