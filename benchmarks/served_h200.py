"""A whole model served greedily through the Triton kernels on a GPU, against the CPU reference. Written for an H200.

    python benchmarks/served_h200.py MODEL_DIR TOKENS.json RESULT.json

MODEL_DIR: an int5 or int4 checkpoint of a Llama model (config.json, *.safetensors). TOKENS.json: a list of prompts of
equal length, each a list of token ids. Both sides are transformers' model in bf16 with its quantized linear layers
replaced: by ``TritonLinear`` on the GPU, by ``reference.linear`` on the CPU. All prompts are one batch: prefill takes
the prefill band, each further step the decode band. Each mode is run with the checkpoint's own codes and, for int5,
with its weights rounded once more to int4, which is a worse model and as good a test.

A control runs on the GPU too, with ``reference.linear`` there: it differs from the CPU by everything but our kernels
(bf16 attention and norms, the order of f32 sums). Both are compared with the CPU on the CPU's tokens, so that one early
difference hides nothing after it. At a prompt's first step where the kernels choose another token, the gap between the
two tokens' logits on the CPU is set against twice the control's largest logit difference: a larger gap, or logits
further off than twice the control's, fail the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paroquant_gfx1201 import quantize, reference
from paroquant_gfx1201.formats import catalog, checkpoint
from paroquant_gfx1201.formats.projection import Projection
from paroquant_gfx1201.kernels.triton.linear import TritonLinear
from paroquant_gfx1201.modes import Mode

NEW_TOKENS = 64
PROCESSES = 4
ROUNDED = "int4, rounded from int5"
INT8 = {"RADIANCE_PQ_I8": "1", "RADIANCE_PQ_ZPE": "0"}
E4M3 = {"RADIANCE_PQ_I8": "0", "RADIANCE_PQ_ZPE": "0"}
MODES = {
    "int8 per group": {**INT8, "RADIANCE_PQ_PG": "1", "RADIANCE_PQ_PTOK": "0"},
    "e4m3, per token in prefill": {**E4M3, "RADIANCE_PQ_PTOK": "1"},
    "int8, per token in prefill": {**INT8, "RADIANCE_PQ_PG": "0", "RADIANCE_PQ_PTOK": "1"},
    "e4m3 per group": {**E4M3, "RADIANCE_PQ_PTOK": "0"},
}


class ReferenceLinear(torch.nn.Module):
    """The same linear by the reference numerics."""

    def __init__(self, projection: Projection, mode: Mode, device: str) -> None:
        super().__init__()
        prepared = reference.prepare(projection)
        moved = {field.name: getattr(prepared, field.name).to(device) for field in dataclasses.fields(prepared)}
        self.mode, self.prepared = mode, reference.PreparedWeight(**moved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y = reference.linear(rows, self.prepared, self.mode.band(len(rows)))
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def rounded_to_int4(projection: Projection) -> Projection:
    """The projection's weights in the rotated domain, rounded to int4 with new scales and zero points."""
    spec = dataclasses.replace(projection.spec, bits=4)
    codes, zeros, scales = quantize.quantize(projection.dequantize().T.contiguous(), 15, spec.group_size)
    return dataclasses.replace(projection, spec=spec, codes=codes, zeros=zeros, scales=scales)


def build(directory: Path, projections: dict[str, Projection], linear) -> torch.nn.Module:
    """The model in bf16 on the CPU with ``linear(projection)`` in place of each quantized layer."""
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, projection in projections.items():
        model.set_submodule(name, linear(projection))
    headers = checkpoint.read_headers(directory)
    plain = {name: entry for name, entry in headers.items() if name.rpartition(".")[0] not in projections}
    missing, unexpected = model.load_state_dict(dict(checkpoint.read_tensors(plain)), strict=False, assign=True)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the checkpoint does not fit the model: missing {missing}, unexpected {unexpected}")
    # Made without data on the meta device, and in no checkpoint.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config)
    return model.eval()


@torch.inference_mode()
def logits_of(model: torch.nn.Module, prompts: torch.Tensor, forced: torch.Tensor | None) -> torch.Tensor:
    """f32 [B, NEW_TOKENS, vocabulary] on the CPU: after the prompt, then after each greedy or ``forced`` token."""
    cache, tokens, found = None, prompts, []
    for step in range(NEW_TOKENS):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[:, -1].float()
        found.append(last.cpu())
        tokens = last.argmax(-1, keepdim=True) if forced is None else forced[:, step : step + 1].to(last.device)
    return torch.stack(found, 1)


def off_by(logits: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Relative error of the logits, the largest difference, and how often both have the same first token."""
    centred = expected.double() - expected.double().mean(-1, keepdim=True)
    return {
        "relative_error": float((logits.double() - expected).norm() / centred.norm()),
        "largest_difference": float((logits - expected).abs().max()),
        "top1_agreement": float((logits.argmax(-1) == expected.argmax(-1)).double().mean()),
    }


def divergences(ours: torch.Tensor, theirs: torch.Tensor) -> list[dict[str, float]]:
    """Each prompt's first step with another greedy token, and the gap of the two tokens in ``theirs``."""
    mine, expected, found = ours.argmax(-1), theirs.argmax(-1), []
    for prompt in range(len(mine)):
        steps = (mine[prompt] != expected[prompt]).nonzero()
        if len(steps):
            step = int(steps[0])
            there = theirs[prompt, step]
            gap = float(there[expected[prompt, step]] - there[mine[prompt, step]])
            found.append({"prompt": prompt, "step": step, "gap": gap})
    return found


def compare(case: tuple[Path, torch.Tensor, str, str]) -> dict[str, object]:
    """One row of the report: a kind of weights in a mode, by the kernels, by the control and on the CPU."""
    directory, prompts, kind, name = case
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PROCESSES))
    projections, mode = dict(catalog.read_layers(directory)), Mode.from_environment(MODES[name])
    if kind == ROUNDED:
        projections = {layer: rounded_to_int4(projection) for layer, projection in projections.items()}
    started = time.monotonic()
    model = build(directory, projections, lambda p: ReferenceLinear(p, mode, "cpu"))
    theirs = logits_of(model, prompts, None)
    cpu_s = time.monotonic() - started
    tokens = theirs.argmax(-1)
    model = build(directory, projections, lambda p: ReferenceLinear(p, mode, "cuda")).to("cuda")
    control = off_by(logits_of(model, prompts.cuda(), tokens), theirs)
    model = build(directory, projections, lambda p: TritonLinear(p, mode, "cuda")).to("cuda")
    kernels = off_by(logits_of(model, prompts.cuda(), tokens), theirs)
    other = divergences(logits_of(model, prompts.cuda(), None), theirs)
    top = theirs.topk(2, -1).values
    return {
        "weights": kind,
        "mode": name,
        "layers": len(projections),
        "prompts": len(prompts),
        "prompt_tokens": prompts.shape[1],
        "tokens": tokens.numel(),
        "prompts_equal": len(prompts) - len(other),
        "divergences": other,
        "median_margin": float((top[..., 0] - top[..., 1]).median()),
        "kernels": kernels,
        "control": control,
        "cpu_s": round(cpu_s),
        "explained": kernels["relative_error"] <= 2 * control["relative_error"]
        and all(entry["gap"] <= 2 * control["largest_difference"] for entry in other),
    }


def main(directory: Path, prompts: torch.Tensor, path: Path) -> None:
    bits = next(iter(dict(catalog.read_layers(directory)).values())).spec.bits
    kinds = ("int5", ROUNDED) if bits == 5 else ("int4",)
    cases = [(directory, prompts, kind, name) for kind, name in itertools.product(kinds, MODES)]
    report = []
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for row in pool.imap(compare, cases, 1):
            report.append(row)
            path.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    if not all(row["explained"] for row in report):
        sys.exit("the kernels differ from the CPU by more than the rest of the model does")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: served_h200.py MODEL_DIR TOKENS.json RESULT.json")
    main(Path(sys.argv[1]), torch.tensor(json.loads(Path(sys.argv[2]).read_text())), Path(sys.argv[3]))
