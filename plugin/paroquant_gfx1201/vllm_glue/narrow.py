"""The linear method of layers that the checkpoint has not quantized: vLLM's own, or the skinny GEMM where it fits."""

import os

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method

from paroquant_gfx1201 import attest
from paroquant_gfx1201.paths import narrow
from paroquant_gfx1201.vllm_glue import op


def unquantized(prefix: str) -> "NarrowLinearMethod":
    """The method of the linear layer ``prefix``, which the attestation names among those that are not quantized."""
    attest.process.unquantized[prefix] = "linear"
    return NarrowLinearMethod(prefix)


@register_weight_loader_v2_supported_method
class NarrowLinearMethod(UnquantizedLinearMethod):
    """One linear layer as the checkpoint has it. ``taken``: whether its forward is ours."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix, self.taken = prefix, False
        op.register()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the path, and attest it where there was a choice."""
        weight, mode = layer.weight.data, op.process_mode()
        if narrow.is_asked(mode, weight.device):
            reason = narrow.refusal(weight, mode)
            self.taken = not reason
            declined = {narrow.PATH: reason} if reason else {}
            path, most_rows = (narrow.PATH, narrow.MOST_ROWS) if self.taken else ("vllm", None)
            attest.process.narrow[self.prefix] = attest.NarrowRecord(path, most_rows, declined)
            attest.process.write(os.environ)
        if self.taken:
            narrow.prepare(weight)
        else:
            super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] of x [..., K], in x's dtype."""
        if not self.taken:
            return super().apply(layer, x, bias)
        y = torch.ops.vllm.paroquant_gfx1201_narrow(x, layer.weight)
        return y if bias is None else y + bias
