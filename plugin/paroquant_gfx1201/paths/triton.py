"""The portable path: the Triton kernels, on any GPU that Triton compiles for."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.kernels.folded import folds
from paroquant_gfx1201.modes import Band, Order, ZeroPoint
from paroquant_gfx1201.paths.path import Prepared, Product
from paroquant_gfx1201.paths.weights import Weights
from paroquant_gfx1201.reference import Activations

GROUPS = (64, 128)


@dataclass(frozen=True)
class Triton:
    """Every format by int8 or e4m3 rows, any number of rows and outputs."""

    name: str = "triton"

    def refusal(self, weights: Weights, band: Band) -> str:
        """Without Triton or a GPU, and for groups that no kernel takes."""
        if find_spec("triton") is None:
            return "triton is not installed"
        if weights.spec.group_size not in GROUPS:
            return f"it takes groups of 64 or 128, not {weights.spec.group_size}"
        from paroquant_gfx1201.kernels.triton.weights import INTERPRETED

        on_gpu = weights.device.type == "cuda"
        return "" if on_gpu or INTERPRETED else f"it runs on a GPU, not on {weights.device}"

    def form(self, weights: Weights) -> str:
        """The format; MXFP4 is folded where its exponents allow it."""
        return "folded" if weights.kind == "mxfp4" and folds(weights.projections) else weights.kind

    def zero_point(self, band: Band) -> ZeroPoint:
        """Exactly, in f32, whatever the band says: no f16 epilogue exists here."""
        return "loop"

    def order(self, band: Band) -> Order:
        """Row after row: it has no other."""
        return "rows"

    def prepare(self, weights: Weights, epilogue: bool) -> Prepared:
        """Rotations as three bf16 terms, codes in half-group order."""
        from paroquant_gfx1201.kernels.triton import producer
        from paroquant_gfx1201.kernels.triton.linear import multiply
        from paroquant_gfx1201.kernels.triton.weights import pack

        matrices = torch.stack([reference.rotation_matrices(projection) for projection in weights.projections])
        terms = producer.split_rotation(matrices).to(weights.device)
        packed = [pack(projection).to(weights.device) for projection in weights.projections]

        def run(rows: torch.Tensor, band: Band) -> Product:
            quantized = producer.quantize_rows(rows.bfloat16(), terms, band.element, band.granularity)
            each = [quantized.of(index) for index in range(len(packed))]
            parts = [multiply(part, weight, rows.dtype) for part, weight in zip(each, packed, strict=True)]
            sums = "int32" if band.element == "int8" and packed[0].is_integer else "f32"
            y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            return Product(y, sums, lambda: [_as_reference(part) for part in each])

        return run


def _as_reference(rows: Any) -> Activations:
    """A rotation's rows in the reference's layout, on the CPU."""
    groups = len(rows.row_sums)
    codes = rows.codes.cpu().float().unflatten(1, (groups, -1)).transpose(0, 1)
    return Activations(codes, rows.scales.cpu().unsqueeze(-1), rows.row_sums.cpu())
