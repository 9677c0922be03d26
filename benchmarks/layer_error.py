"""Errors of the quantized linear on every real layer of a checkpoint, on real activations.

    python benchmarks/layer_error.py BF16_DIR QUANTIZED_DIR TEXT_FILE

For each quantized projection, on the inputs that the bf16 model gives it over the first 256 tokens of the text:
- weight path: the op's bf16 output against float64 from the same activation codes and the dequantized weights
- activations: the op against float64 from the dequantized weights and unquantized inputs, per mode
Errors are relative, |y - y64| / |y64| (Frobenius); printed as median and maximum over the projections.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paroquant_gfx1201 import reference, rotation
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.formats.spec import FormatSpec
from paroquant_gfx1201.modes import Band

TOKENS = 256
MODES = {
    "e4m3 per token": Band("e4m3", "token", "loop"),
    "e4m3 per group": Band("e4m3", "group", "loop"),
    "int8 per token": Band("int8", "token", "loop"),
    "int8 per group": Band("int8", "group", "loop"),
    "int8 per group, zero point in the epilogue": Band("int8", "group", "epilogue"),
}


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def layer_inputs(model_dir: Path, text: str, names: list[str]) -> dict[str, torch.Tensor]:
    """Module name -> its input rows bf16 [TOKENS, K]."""
    tokens = AutoTokenizer.from_pretrained(model_dir)(text, return_tensors="pt").input_ids[:, :TOKENS]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    modules, found = dict(model.named_modules()), {}
    for name in names:
        modules[name].register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0][0].clone()}))
    with torch.inference_mode():
        model(tokens, use_cache=False)
    return found


def same_codes(x: torch.Tensor, projection: Projection, prepared: reference.PreparedWeight, band: Band) -> torch.Tensor:
    rotated = rotation.rotate_groups(x.float(), prepared.rotation)
    quantized = reference.quantize_activations(rotated, band)
    values = (quantized.codes.double() * quantized.scales.double()).transpose(0, 1).flatten(1)
    return values @ projection.dequantize(torch.float64)


def main(bf16_dir: Path, quantized_dir: Path, text: str) -> None:
    spec = FormatSpec.from_config(json.loads((quantized_dir / "config.json").read_text())["quantization_config"])
    tensors = load_file(quantized_dir / "model.safetensors")
    names = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    inputs = layer_inputs(bf16_dir, text, names)
    weight_path: dict[str, list[float]] = {mode: [] for mode in MODES}
    activations: dict[str, list[float]] = {mode: [] for mode in MODES}
    for name in names:
        projection = Projection.from_tensors(name, tensors, spec)
        prepared, exact = reference.prepare(projection), reference.exact(inputs[name], projection)
        for mode, band in MODES.items():
            y = reference.linear(inputs[name], prepared, band)
            weight_path[mode].append(relative(y.bfloat16(), same_codes(inputs[name], projection, prepared, band)))
            activations[mode].append(relative(y, exact))
    print(f"{len(names)} projections, {spec.bits} bits, group size {spec.group_size}, {TOKENS} tokens")
    for mode in MODES:
        weights, inputs_error = weight_path[mode], activations[mode]
        print(
            f"{mode}: weight path {statistics.median(weights):.2e} (max {max(weights):.2e}), "
            f"activations {statistics.median(inputs_error):.2e} (max {max(inputs_error):.2e})"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).read_text())
