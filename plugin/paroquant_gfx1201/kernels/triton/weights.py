"""A projection in the layout that the kernels read.

Group by group, each group's rows of one output next to each other, so that a tile of outputs of one
group is one contiguous piece of memory. The two nibbles of a byte lie half a group apart, and the
eight bits of a plane byte an eighth of a group apart: unpacking yields whole half groups and no
interleaving.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.folded import MOST_APART, below_largest
from paroquant_gfx1201.kernels.triton.unpack import BLOCKS, INTEGER, LEVELS

MIDPOINTS = {"int4": 8.0, "int5": 16.0, "int4-lloyd": 7.5, "mxfp4": 0.0}
FORMS = {"int4": INTEGER.value, "int5": INTEGER.value, "int4-lloyd": LEVELS.value, "mxfp4": BLOCKS.value}
MXFP4_GROUP = 64
INTERPRETED = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs these kernels: decided when they are defined."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """4- or 5-bit codes in groups of g along K, G = K / g. Those of MXFP4 are always 64, two of its blocks.

    nibbles uint8 [G, N, g/2]: code k of a group in the low half of byte k, code k + g/2 in the high.
    plane uint8 [G, N, g/8]: fifth bit of code k in bit k // (g/8) of byte k % (g/8); [0] but for int5.
    steps int32 [G, N]: the f16 scale's bits, and the zero point (0..31) in bits 16 and up; int16 [G, N] of MXFP4: the
    exponents of both halves of a group, the lower half's in the low byte.
    levels e4m3 [16]: of Lloyd codes the values less the midpoint; else [0].
    tops uint8 [N]: of MXFP4 the largest exponent of each output, where the others are close enough for e4m3 to hold the
    weights over 2^(top - 133) exactly (see ``kernels.folded``); else [0].
    form: int4, int5, int4-lloyd or mxfp4.
    """

    nibbles: torch.Tensor
    plane: torch.Tensor
    steps: torch.Tensor
    levels: torch.Tensor
    tops: torch.Tensor
    form: str

    @property
    def bits(self) -> int:
        """Of a code."""
        return 5 if self.form == "int5" else 4

    @property
    def midpoint(self) -> float:
        """What is subtracted from codes and zero points before they are multiplied as floats."""
        return MIDPOINTS[self.form]

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, and not names of e4m3 values, which take e4m3 rows."""
        return FORMS[self.form] == INTEGER.value

    @property
    def is_folded(self) -> bool:
        """Whether MXFP4 is multiplied as e4m3: in prefill, and in decode on Hopper."""
        return self.tops.numel() > 0

    @property
    def groups(self) -> int:
        """G."""
        return self.nibbles.shape[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.nibbles.shape[1]

    @property
    def group_size(self) -> int:
        """g."""
        return self.nibbles.shape[2] * 2

    @property
    def inputs(self) -> int:
        """K."""
        return self.groups * self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads of it."""
        return self.nibbles.nbytes + self.plane.nbytes + self.steps.nbytes

    def to(self, device: torch.device | str) -> "PackedWeight":
        """A copy on ``device``."""
        moved = (tensor.to(device) for tensor in (self.nibbles, self.plane, self.steps, self.levels, self.tops))
        return PackedWeight(*moved, self.form)


def require_fit(codes: torch.Tensor, weight: PackedWeight) -> None:
    """Raises PluginError for rows of another K, and for int8 rows where the weight's codes are no integers."""
    if codes.shape[1] != weight.inputs:
        raise PluginError(f"the weight has K={weight.inputs}, the rows have K={codes.shape[1]}")
    if codes.dtype == torch.int8 and not weight.is_integer:
        raise PluginError(f"{weight.form} weights are e4m3 values: the rows must be e4m3 too")


def pack_codes(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, levels: torch.Tensor | None = None
) -> PackedWeight:
    """codes uint8 [K, N], zeros uint8 [G, N], scales f16 [G, N]; levels f32 [16] of Lloyd codes; any device."""
    groups, outputs = zeros.shape
    by_group = codes.view(groups, -1, outputs).transpose(1, 2)
    plane = codes.new_empty(0)
    if bits == 5:
        eighths = (by_group >> 4).reshape(groups, outputs, 8, -1)
        plane = eighths[:, :, 0].clone()
        for bit in range(1, 8):
            plane |= eighths[:, :, bit] << bit
    steps = (scales.view(torch.int16).int() & 0xFFFF) | (zeros.int() << 16)
    form = f"int{bits}" if levels is None else "int4-lloyd"
    none = codes.new_empty(0)
    table = (none if levels is None else levels - MIDPOINTS[form]).to(torch.float8_e4m3fn)
    return PackedWeight(_nibbles(by_group & 15), plane.contiguous(), steps.contiguous(), table, none, form)


def pack(projection: Projection | Mxfp4Projection) -> PackedWeight:
    """Of any format, in groups of 64 or 128."""
    if not isinstance(projection, Mxfp4Projection):
        codes, zeros, scales, levels = projection.codes, projection.zeros, projection.scales, projection.levels
        return pack_codes(codes, zeros, scales, projection.spec.bits, levels)
    return pack_blocks(projection.codes, projection.exponents)


def pack_blocks(codes: torch.Tensor, exponents: torch.Tensor) -> PackedWeight:
    """MXFP4: codes uint8 [N, K], exponents uint8 [N, K/32]; any device."""
    by_group = codes.unflatten(1, (-1, MXFP4_GROUP)).transpose(0, 1)
    tops = none = codes.new_empty(0)
    below, largest = below_largest(codes.T, exponents.T)
    of_blocks = exponents.T.int()
    if below.max() <= MOST_APART:
        tops, of_blocks = largest.to(torch.uint8), largest - below
    low, high = of_blocks.short().unflatten(0, (-1, 2)).unbind(1)
    steps = (low | (high << 8)).contiguous()
    return PackedWeight(_nibbles(by_group), none, steps, none.to(torch.float8_e4m3fn), tops, "mxfp4")


def _nibbles(by_group: torch.Tensor) -> torch.Tensor:
    """uint8 [G, N, g/2] of 4-bit codes uint8 [G, N, g]."""
    low, high = by_group.chunk(2, dim=2)
    return (low | (high << 4)).contiguous()


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def inline_ptx(device: torch.device) -> bool:
    """Whether kernels on ``device`` take the hand-written unpacking, and CUDA's conversion to e4m3."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def operand(codes: torch.dtype) -> tl.dtype:
    """What rows of ``codes`` are multiplied as: the narrowest type that holds them and the weight codes exactly.

    f32 for e4m3 rows in the interpreter.
    """
    if codes == torch.int8:
        return tl.int8
    return tl.float32 if INTERPRETED else tl.float16


def bfloat16_operand() -> tl.dtype:
    """What bf16 tiles are multiplied as: f32 in the interpreter, which has no bf16 product."""
    return tl.float32 if INTERPRETED else tl.bfloat16
