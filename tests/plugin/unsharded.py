"""What a quantized Qwen3.5 checkpoint means, in float64: one projection on given inputs, and the whole model.

Nothing here is sharded, merged or packed.
"""

import re
from pathlib import Path

import torch

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.formats.catalog import read_layers
from paroquant_gfx1201.formats.checkpoint import read_headers, read_tensors
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Projection, Mxfp4Spec
from paroquant_gfx1201.formats.nvfp4 import Nvfp4Weight
from paroquant_gfx1201.modes import Mode
from paroquant_gfx1201.quantize_fp4 import requantize, to_mxfp4

RULE = "mse"
GATES = re.compile(r"\.linear_attn\.in_proj_[ab]\.weight$")


def projections(directory: Path) -> dict:
    """The checkpoint's quantized projections by name; those of an NVFP4 one as MXFP4, its bf16 GDN gates too."""
    layers = dict(read_layers(directory))
    if not any(isinstance(layer, Nvfp4Weight) for layer in layers.values()):
        return layers
    found = {name: requantize(layer, RULE, 128) for name, layer in layers.items()}
    gates = {name: entry for name, entry in read_headers(directory).items() if GATES.search(name)}
    for name, weight in read_tensors(gates):
        codes = to_mxfp4(weight.float(), RULE)
        found[name.removesuffix(".weight")] = Mxfp4Projection(Mxfp4Spec(128, 1, RULE), *codes)
    return found


def multiply(rows: torch.Tensor, projection, mode: Mode, ranks: int) -> torch.Tensor:
    """float64 [M, N] of rows [M, K] with activations quantized as ``mode`` says.

    ``ranks`` that split K have each a scale per token of their own, where scales are per token.
    """
    size, rows = projection.spec.group_size, rows.double()
    if projection.theta is not None:
        cos, sin = (factor.double() for factor in rotation.cosines(projection.theta))
        rows = rotation.rotate(rows * projection.channel_scales.double(), cos, sin, projection.pairs, size)
    parts = []
    for part in rows.chunk(ranks, 1):
        groups = part.float().unflatten(1, (-1, size)).transpose(0, 1)
        activations = reference.quantize_activations(groups, mode.band(len(rows)))
        parts.append((activations.codes.double() * activations.scales.double()).transpose(0, 1).flatten(1))
    return torch.cat(parts, 1) @ projection.dequantize(torch.float64)


class Exact(torch.nn.Module):
    """A projection with its activations left alone."""

    def __init__(self, projection) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reference.exact(x.flatten(0, -2), self.projection).unflatten(0, x.shape[:-1])


def model(directory: Path, bf16: Path):
    """transformers' model in float64 with the checkpoint's dequantized weights.

    transformers keeps norms, gates and the recurrent state in float32 whatever the dtype: about 1e-6 of the result.
    """
    from transformers import Qwen3_5ForCausalLM

    made = Qwen3_5ForCausalLM.from_pretrained(bf16, dtype=torch.float64, attn_implementation="eager").eval()
    if directory == bf16:
        return made
    headers = read_headers(directory)
    stored = dict(read_tensors(headers))
    for name, projection in projections(directory).items():
        parent, _, last = name.rpartition(".")
        setattr(made.get_submodule(parent), last, Exact(projection))
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, stored[name].double()), name
    return made


def log_probabilities(made, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [len(tokens) - 1, vocabulary]: of each token but the first."""
    with torch.inference_mode():
        logits = made(tokens[None], use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)
