"""A projection in the order in which the decode GEMM's lanes read it.

The GEMM multiplies tiles of 16 outputs by blocks of 32 inputs, two matrix instructions each. Lane l of a wave holds
output l % 16 and, of a block, inputs 16 * (l // 16) .. + 15: instruction s takes the bytes 8 s .. 8 s + 7 of them. An
activation row gives a lane those inputs as 16 bytes in a row, so activations need no order of their own.
"""

import itertools
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import BLOCK, Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.folded import fold, folds

TILE = 32
"""Outputs of a workgroup: each projection is filled up to a multiple of it with outputs of scale 0."""
EPILOGUE_GROUPS = 16
"""Groups that one f16 matrix instruction of the epilogue takes."""


@dataclass(frozen=True, eq=False)
class FragmentWeight:
    """Weights of one or several projections with the same K, outputs one after the other; G = K / g.

    codes int32 [G, N/16, Q, 32, 4], Q = g/64: word w of quad q holds half of a lane's 16 codes of block 2 q + w // 2,
    codes 8 (w % 2) .. + 3 in its bytes' low nibbles and the next four in the high ones.
    plane int32 [G, N/16, 32, Q]: bit 8 i + j of word q is the fifth bit of code 4 j + i of the quad's 32; or, for MXFP4
    that is folded, [G, N] as ``folded.Folded.shifts``; else [0].
    levels int32 [P, 4]: for int4 and int4-lloyd, the 16 values of each projection's codes less the midpoint, as e4m3.
    steps int32 [G, N]: f16 scale, and the zero point in bits 16 and up; or, for MXFP4, uint8 [K/32, N] exponents, and
    where it is folded ``folded.Folded.scales``.
    format: int4, int5, lloyd, mxfp4 or folded.
    zeros f16 [N, G rounded up to 16]: minus f16(scale * (zero - midpoint)), for the epilogue; [0] without one.
    widths: outputs of each projection; starts: the first of each; N and starts count the outputs of scale 0 too.
    """

    codes: torch.Tensor
    plane: torch.Tensor
    levels: torch.Tensor
    steps: torch.Tensor
    zeros: torch.Tensor
    format: str
    group_size: int
    widths: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """First output of each projection."""
        return (0, *itertools.accumulate(map(filled, self.widths[:-1])))

    @property
    def outputs(self) -> int:
        """N."""
        return sum(map(filled, self.widths))

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[0] * self.group_size

    def to(self, device: torch.device | str) -> "FragmentWeight":
        """A copy on ``device``."""
        tensors = (self.codes, self.plane, self.levels, self.steps, self.zeros)
        return FragmentWeight(*(each.to(device) for each in tensors), self.format, self.group_size, self.widths)

    def outputs_of(self, y: torch.Tensor) -> torch.Tensor:
        """y [M, N] without the outputs of scale 0, contiguous."""
        if self.outputs == sum(self.widths):
            return y
        parts = [y[:, start : start + width] for start, width in zip(self.starts, self.widths, strict=True)]
        return torch.cat(parts, 1)

    @property
    def nbytes(self) -> int:
        """Bytes a kernel with the zero point in the loop reads of it."""
        return self.codes.nbytes + self.plane.nbytes + self.steps.nbytes


def filled(outputs: int) -> int:
    """The multiple of TILE that holds ``outputs``."""
    return -(-outputs // TILE) * TILE


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
    if len(projections) > 3:
        return f"the GEMMs select among at most three rotations, not {len(projections)}"
    if projections[0].spec.group_size not in (64, 128):
        return f"the GEMMs take groups of 64 or 128, not {projections[0].spec.group_size}"
    return ""


def form_of(projections: list[Projection] | list[Mxfp4Projection]) -> str:
    """``format`` of the weight that ``pack`` makes of them."""
    if isinstance(projections[0], Mxfp4Projection):
        return "folded" if folds(projections) else "mxfp4"
    spec = projections[0].spec
    return "lloyd" if spec.lloyd else f"int{spec.bits}"


def _side_by_side(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[..., N] of [..., N_p], each filled up with zeros."""
    return torch.cat([pad(tensor, (0, filled(tensor.shape[-1]) - tensor.shape[-1])) for tensor in tensors], -1)


def _levels(projection: Projection) -> torch.Tensor:
    """int32 [4]: what codes 0..15 stand for, less the midpoint, as e4m3, which holds them exactly."""
    values = torch.arange(16, dtype=torch.float32) if projection.levels is None else projection.levels
    return (values - projection.spec.midpoint).to(torch.float8_e4m3fn).view(torch.int32)


def _zeros(scales: torch.Tensor, zeros: torch.Tensor, midpoint: float) -> torch.Tensor:
    """FragmentWeight.zeros of scales f16 and zero points uint8 [G, N]."""
    terms = (scales.float() * (zeros.float() - midpoint)).half().neg().T
    return pad(terms, (0, -terms.shape[1] % EPILOGUE_GROUPS)).contiguous()


def pack(projections: list[Projection] | list[Mxfp4Projection], epilogue: bool = False) -> FragmentWeight:
    """Projections with one K, format and group size, as one weight; ``epilogue``: with ``zeros``, where there are any.

    Raises PluginError for what ``refusal`` names.
    """
    if reason := refusal(projections):
        raise PluginError(reason)
    spec, none = projections[0].spec, torch.empty(0, dtype=torch.int32)
    widths = tuple(projection.outputs for projection in projections)
    if isinstance(projections[0], Mxfp4Projection):
        codes = _side_by_side([projection.codes.T for projection in projections])
        exponents = _side_by_side([projection.exponents.T for projection in projections])
        if exponents.shape[0] * BLOCK != codes.shape[0]:
            raise PluginError("an MXFP4 weight needs one exponent for 32 inputs")
        words = _nibble_words(by_lane(codes, spec.group_size))
        folded = fold(codes, exponents, spec.group_size)
        plane, steps = (folded.shifts, folded.scales) if folded else (none, exponents)
        return FragmentWeight(words, plane, none, steps, none.half(), form_of(projections), spec.group_size, widths)
    lanes = by_lane(_side_by_side([projection.codes for projection in projections]), spec.group_size)
    scales = _side_by_side([projection.scales for projection in projections])
    zeros = _side_by_side([projection.zeros for projection in projections])
    steps = (scales.view(torch.int16).int() & 0xFFFF) | (zeros.int() << 16)
    return FragmentWeight(
        _nibble_words(lanes),
        _plane_words(lanes) if spec.bits == 5 else none,
        none if spec.bits == 5 else torch.stack([_levels(projection) for projection in projections]),
        steps,
        _zeros(scales, zeros, spec.midpoint) if epilogue else none.half(),
        form_of(projections),
        spec.group_size,
        widths,
    )
