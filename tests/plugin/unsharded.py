"""What a quantized Qwen3.5 checkpoint computes: transformers' model in float64, its quantized linears replaced by ours.

Nothing here is sharded, merged or packed. transformers keeps its norms, the gates and the recurrent state in float32,
whatever the model's dtype: about 1e-6 of the result.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.formats.catalog import read_layers
from paroquant_gfx1201.formats.checkpoint import read_headers, read_tensors
from paroquant_gfx1201.formats.nvfp4 import Nvfp4Weight
from paroquant_gfx1201.modes import Band, Mode
from paroquant_gfx1201.quantize_fp4 import requantize

ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")


class Quantized(torch.nn.Module):
    """One projection in float64. ``band`` None leaves activations alone; a scale per token is one per rank's inputs."""

    def __init__(self, projection, ranks: int, mode: Mode | None) -> None:
        super().__init__()
        self.projection, self.ranks, self.mode = projection, ranks, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.double().flatten(0, -2)
        if self.mode is None:
            y = reference.exact(rows, self.projection)
        else:
            band = self.mode.band(len(rows))
            y = self.dequantized(rows, band) @ self.projection.dequantize(torch.float64)
        return y.view(*x.shape[:-1], -1)

    def dequantized(self, rows: torch.Tensor, band: Band) -> torch.Tensor:
        """float64 [M, K]: rotated and quantized activations."""
        projection, size = self.projection, self.projection.spec.group_size
        if projection.theta is not None:
            cos, sin = (factor.double() for factor in rotation.cosines(projection.theta))
            rows = rotation.rotate(rows * projection.channel_scales.double(), cos, sin, projection.pairs, size)
        found = []
        for part in rows.chunk(self.ranks, 1):
            groups = part.float().unflatten(1, (-1, size)).transpose(0, 1)
            activations = reference.quantize_activations(groups, band)
            values = activations.codes.double() * activations.scales.double()
            found.append(values.transpose(0, 1).flatten(1))
        return torch.cat(found, 1)


def model(directory: Path, bf16: Path, mode: Mode | None, ranks: int = 1, rule: str = "mse", kept: Mapping = {}):
    """The model of a checkpoint quantized from ``bf16``; NVFP4 requantized by ``rule``; ``kept`` replaces projections."""
    from transformers import Qwen3_5ForCausalLM

    made = Qwen3_5ForCausalLM.from_pretrained(bf16, dtype=torch.float64, attn_implementation="eager").eval()
    if directory == bf16:
        return made
    for name, layer in read_layers(directory):
        if isinstance(layer, Nvfp4Weight):
            layer = requantize(layer, rule, 128)
        parent, _, last = name.rpartition(".")
        split = ranks if last in ROW_PARALLEL else 1
        setattr(made.get_submodule(parent), last, Quantized(kept.get(name, layer), split, mode))
    rest = dict(read_tensors(read_headers(directory)))
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter, rest[name].double(), rtol=0, atol=0)
    return made


def log_probabilities(made, tokens: list[int]) -> torch.Tensor:
    """float64 [len(tokens) - 1, vocabulary]: of what follows each token but the last."""
    with torch.inference_mode():
        logits = made(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)
