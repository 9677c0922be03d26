"""A Qwen3.5 model of four layers and random weights: what its architecture asks of a loader, in a few megabytes.

Two layers of GatedDeltaNet, two of gated attention. Whatever one of two tensor-parallel ranks holds is a multiple of
the group size 128, as in the published models: K is 256 or 512, attention has 4 heads of 64 and 2 of keys,
GatedDeltaNet 2 key heads and 4 value heads of 128.
"""

from pathlib import Path

import torch

GROUP_SIZE = 128
FIT_STEPS = 2
"""Enough that rotations are no identity and differ from projection to projection."""

BUILDS = {
    "int4": ("--format", "paroquant-int4"),
    "int5": ("--format", "int5-bitplane"),
    "lloyd": ("--format", "paroquant-int4-lloyd"),
    "mxfp4": ("--format", "mxfp4-paro"),
    "nvfp4": ("--format", "nvfp4"),
}


def make(directory: Path) -> None:
    """Write the bf16 model: matrices N(0, 1/K), norms around one, the decay of the gates as transformers draws it."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=1024,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        # Tokens must differ by more than a norm's epsilon, and logits by more than rounding.
        model.get_input_embeddings().weight.normal_()
    model.bfloat16().save_pretrained(directory)


def build(model: Path, out: Path, name: str, *extra: str) -> None:
    """Quantize by the plugin's own command line, in this process."""
    from paroquant_gfx1201.build.__main__ import main

    steps = () if "--rotations" in extra or name == "nvfp4" else ("--steps", str(FIT_STEPS))
    sizes = ("--group-size", str(GROUP_SIZE), *steps, *extra)
    status = main(["quantize", "--model", str(model), "--out", str(out), *BUILDS[name], *sizes])
    if status:
        raise RuntimeError(f"the builder ended with status {status}")
