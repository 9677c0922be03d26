"""The quantized linear as a plain torch module over the Triton kernels."""

import torch

from paroquant_gfx1201 import reference
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.triton import decode, prefill, producer, weights
from paroquant_gfx1201.modes import Mode


def multiply(rows: producer.QuantizedRows, weight: weights.PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """y [M, N] of ``dtype`` by the kernel of the band: decode for up to 64 rows with a scale per group."""
    if len(rows.codes) <= decode.MAX_ROWS and rows.granularity == "group":
        return decode.decode(rows, weight, dtype)
    return prefill.prefill(rows, weight, dtype)


class TritonLinear(torch.nn.Module):
    """y = W x of one projection of any format, activations quantized as ``mode`` says for the number of rows.

    The zero point is always corrected exactly, in f32: ``mode``'s form of it makes no difference here.
    """

    def __init__(self, projection: Projection | Mxfp4Projection, mode: Mode, device: torch.device | str) -> None:
        super().__init__()
        self.mode = mode
        self.weight = weights.pack(projection).to(device)
        self.terms = producer.split_rotation(reference.rotation_matrices(projection).unsqueeze(0)).to(device)
        self.bias = None if projection.bias is None else projection.bias.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] in x's dtype of x [..., K], which is rounded to bf16."""
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        band = self.mode.band(len(rows))
        quantized = producer.quantize_rows(rows, self.terms, band.element, band.granularity).of(0)
        y = multiply(quantized, self.weight, x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)
