"""KL divergence of weight formats on one model, offline: transformers, float32, no server.

    python benchmarks/format_kl.py BF16_DIR LABEL=CHECKPOINT[:RULE][@MODE] ... --text FILE [--text FILE]

Each CHECKPOINT's layers are dequantized into the float32 model of BF16_DIR. `:mse` or `:ocp` requantizes an NVFP4
checkpoint to MXFP4 first, as the server does at load. `@int8-group`, `@int8-token`, `@e4m3-group`, `@e4m3-token`
quantizes the activations in front of them too, by the plugin's reference numerics. KL(bf16 || candidate), nats, over
the whole vocabulary at every position, float64 sums. The interval is 1.96 standard errors over sequences.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from paroquant_gfx1201 import fit, reference
from paroquant_gfx1201.formats.catalog import read_layers
from paroquant_gfx1201.formats.nvfp4 import Fp8Weight, Nvfp4Weight
from paroquant_gfx1201.modes import Band
from paroquant_gfx1201.quantize_fp4 import requantize

SEQUENCE_TOKENS = 512
GROUP_SIZE = 64
"""Activation group in front of requantized weights; the demo model's hidden size takes no larger one."""


class Served(torch.nn.Module):
    """A linear layer as the plugin's CPU path computes it."""

    def __init__(self, layer: object, band: Band) -> None:
        super().__init__()
        self.prepared, self.band = reference.prepare(layer), band

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x.reshape(-1, x.shape[-1]), self.prepared, self.band).view(*x.shape[:-1], -1)


def sequences(model_dir: Path, texts: list[Path], limit: int) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found = []
    for text in texts:
        tokens = tokenizer(text.read_text(), return_tensors="pt").input_ids[0][:limit]
        found += list(tokens[: len(tokens) // SEQUENCE_TOKENS * SEQUENCE_TOKENS].view(-1, 1, SEQUENCE_TOKENS))
    return found


def apply(model: torch.nn.Module, checkpoint: str) -> None:
    """Put the checkpoint's layers into the model."""
    path, _, mode = checkpoint.partition("@")
    path, _, rule = path.partition(":")
    for name, layer in read_layers(Path(path)):
        if rule:
            layer = requantize(layer, rule, GROUP_SIZE)
        parent, _, last = name.rpartition(".")
        if mode:
            element, granularity = mode.split("-")
            setattr(model.get_submodule(parent), last, Served(layer, Band(element, granularity, "loop")))
            continue
        plain = isinstance(layer, Nvfp4Weight | Fp8Weight)
        weight = layer.dequantize() if plain else fit.effective_weight(layer)
        model.get_submodule(name).weight.data.copy_(weight)


@torch.inference_mode()
def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """f32 [positions, vocabulary]."""
    return model(tokens, use_cache=False).logits[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", nargs="+")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    batches = sequences(arguments.model, arguments.text, arguments.tokens)

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()

    model = load()
    base = [logits(model, tokens) for tokens in batches]
    print(f"{len(batches)} sequences of {SEQUENCE_TOKENS} tokens")
    print("| format | KL, nats | median | p99 | top-1 |\n|---|--:|--:|--:|--:|", flush=True)
    for item in [*arguments.checkpoint, "bf16 itself="]:
        label, _, checkpoint = item.partition("=")
        model = load()
        if checkpoint:
            apply(model, checkpoint)
        positions, same, means = [], [], []
        for tokens, wanted in zip(batches, base, strict=True):
            p, q = wanted.log_softmax(-1), logits(model, tokens).log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
            positions.append(kl)
            means.append(kl.mean().item())
            same.append((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        every = torch.cat(positions)
        half = 1.96 * statistics.stdev(means) / len(means) ** 0.5
        print(
            f"| {label} | {every.mean():.4f} ± {half:.4f} | {every.median():.4f} | {every.quantile(0.99):.3f} | "
            f"{statistics.mean(same):.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
