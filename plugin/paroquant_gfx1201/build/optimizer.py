"""A bf16 model directory to a ParoQuant checkpoint by the two-stage optimisation, one decoder layer at a time.

Finished layers are kept beside the output, in ``.NAME.layers``, each as a safetensors file that appears
complete or not at all; a run that was killed goes on after the last of them. Memory: the model in bf16,
one layer in float32 with gradients and Adam's moments (16 bytes a weight), and three copies of the
hidden states of the calibration tokens in bf16 (6 bytes * tokens * hidden size).
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201 import __version__
from paroquant_gfx1201.build.output import atomic_directory, sha256, write_manifest
from paroquant_gfx1201.build.quantizer import projections, read_rotations, source_of, write_rest
from paroquant_gfx1201.build.report import Report
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.checkpoint import Writer, read_config, read_header, read_headers, read_tensors
from paroquant_gfx1201.formats.spec import FormatSpec

if TYPE_CHECKING:
    import torch

    from paroquant_gfx1201.optimize import Rotation, Settings

RECIPE = "recipe.json"


@dataclass(frozen=True)
class OptimizeRecipe:
    """``rotations``: a checkpoint whose rotations are taken and frozen; then only stage 2 runs."""

    spec: FormatSpec
    seed: int
    calibration: Path
    sequences: int
    sequence_tokens: int
    batch: int
    device: str
    rotations: Path | None

    def to_json(self, settings: "Settings", text: str) -> dict[str, Any]:
        """The manifest's ``recipe``."""
        headers = read_headers(self.rotations) if self.rotations else {}
        hashes = {file.name: sha256(file) for file in sorted({entry.file for entry in headers.values()})}
        return {
            "step": "finetune" if self.rotations else "optimize",
            **self.spec.to_config(),
            "seed": self.seed,
            "sequences": self.sequences,
            "sequence_tokens": self.sequence_tokens,
            "batch": self.batch,
            "settings": {**asdict(settings), "betas": list(settings.betas)},
            "calibration_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "rotations_of": hashes or None,
        }


def optimize_model(
    model: Path, out: Path, recipe: OptimizeRecipe, settings: "Settings", report: Report
) -> dict[str, float]:
    """Optimise the model directory ``model`` into the new directory ``out``.

    Returns the mean over the layers of the validation loss after against before, and the seconds taken.
    """
    started = time.monotonic()
    if not model.is_dir():
        raise PluginError(f"{model} is not a model directory")
    read_config(model)
    if out.exists():
        raise PluginError(f"{out} exists already: remove it or choose another --out")
    headers = read_headers(model)
    names = projections(headers, recipe.spec)
    try:
        text = recipe.calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"{recipe.calibration} cannot be read: {error}") from None
    source = source_of(model, headers)
    stated = {"version": __version__, "source": source, "recipe": recipe.to_json(settings, text)}
    layers = out.absolute().parent / f".{out.name}.layers"
    _claim(layers, stated)
    losses = _run(model, names, text, recipe, settings, layers, report)
    with atomic_directory(out) as directory:
        writer = Writer(directory)
        for index in sorted(set(names.values())):
            writer.add(dict(read_tensors(read_header(_file(layers, index)))))
        write_rest(writer, model, headers, names, recipe.spec.to_config())
        result = {
            "projections": len(names),
            "mean_loss_ratio": round(sum(after / before for before, after in losses.values()) / len(losses), 6),
        }
        by_layer = {str(index): [round(loss, 9) for loss in pair] for index, pair in losses.items()}
        write_manifest(directory, source=source, recipe=stated["recipe"], result={**result, "loss": by_layer})
    shutil.rmtree(layers, ignore_errors=True)
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _claim(layers: Path, stated: dict[str, Any]) -> None:
    """Make the directory of finished layers, or take over one of the very same recipe."""
    layers.mkdir(parents=True, exist_ok=True)
    path = layers / RECIPE
    text = json.dumps(stated, indent=1, sort_keys=True) + "\n"
    if path.is_file() and path.read_text() != text:
        raise PluginError(f"{layers} holds layers of another recipe or model: remove it or choose another --out")
    if not path.is_file():
        partial = layers / f".{RECIPE}.partial"
        partial.write_text(text)
        partial.replace(path)


def _file(layers: Path, index: int) -> Path:
    return layers / f"layer-{index:05d}.safetensors"


def _keep(layers: Path, index: int, tensors: "dict[str, torch.Tensor]", losses: tuple[float, float]) -> None:
    """One finished layer, all of it or nothing."""
    from safetensors.torch import save_file

    path = _file(layers, index)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt", "losses": json.dumps(losses)})
    partial.replace(path)


def _run(
    model_directory: Path,
    names: dict[str, int],
    text: str,
    recipe: OptimizeRecipe,
    settings: "Settings",
    layers: Path,
    report: Report,
) -> dict[int, tuple[float, float]]:
    """Every layer that is not there yet; returns the losses before and after by layer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from paroquant_gfx1201 import fit, optimize, rotation
    from paroquant_gfx1201.formats.catalog import read_projection

    logging.disable_progress_bar()
    spec, device = recipe.spec, torch.device(recipe.device)
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    batches = _batches(tokenizer, text, recipe)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).eval().requires_grad_(False)
    blocks = _blocks(model)
    hidden, arguments = _capture(model, blocks, batches)
    taken = read_rotations(recipe.rotations, list(names), spec) if recipe.rotations else None
    held_out = max(1, len(hidden) // 8)
    if held_out == len(hidden):
        raise PluginError(
            f"{len(hidden)} batch of calibration: at least 2 are needed, one to train on and one to validate"
        )
    plain, prefix = hidden, hidden
    losses: dict[int, tuple[float, float]] = {}
    for index, block in enumerate(blocks):
        mine = {name: module for name, module in _linears(model, block) if name in names}
        block.to(device)
        forward = _forward(block, arguments[index], device)
        with torch.no_grad():
            targets = [forward(x.to(device)).to(torch.bfloat16).cpu() for x in plain]
        path = _file(layers, index)
        if mine and not path.is_file():
            modules = {}
            for name, linear in mine.items():
                pairs = rotation.greedy_pairs(linear.in_features, spec.group_size, spec.krot, recipe.seed + index)
                rotations: Rotation | None = taken(name) if taken else None
                modules[name] = optimize.PseudoQuantized(linear, pairs, spec, rotations)
                _replace(model, name, modules[name])
            found = optimize.optimize_layer(
                list(modules.values()),
                forward,
                optimize.Batches(prefix[held_out:], targets[held_out:]),
                optimize.Batches(prefix[:held_out], targets[:held_out]),
                settings,
                frozen=taken is not None,
            )
            tensors = {}
            for name, module in modules.items():
                tensors |= module.store().to_tensors(name)
            _keep(layers, index, tensors, found)
            for name, linear in mine.items():
                _replace(model, name, linear)
        if mine:
            stored = dict(read_tensors(read_header(path)))
            for name, linear in mine.items():
                weight = fit.effective_weight(read_projection(name, stored, spec))
                linear.weight.data.copy_(weight)
            losses[index] = _losses(path)
        with torch.no_grad():
            prefix = [forward(x.to(device)).to(torch.bfloat16).cpu() for x in prefix]
        plain = targets
        block.cpu()
        report.progress(index + 1, len(blocks), "optimize")
    return losses


def _losses(path: Path) -> tuple[float, float]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as shard:
        before, after = json.loads(shard.metadata()["losses"])
    return before, after


def _batches(tokenizer: Any, text: str, recipe: OptimizeRecipe) -> "list[torch.Tensor]":
    """Token ids [batch, sequence]; raises PluginError where the text is too short for two."""
    length, wanted = recipe.sequence_tokens, recipe.sequences * recipe.sequence_tokens
    tokens = tokenizer(text[: wanted * 16], return_tensors="pt").input_ids[0][:wanted]
    sequences = tokens[: len(tokens) // length * length].view(-1, length)
    whole = len(sequences) // recipe.batch * recipe.batch
    if whole < 2 * recipe.batch:
        needed = 2 * recipe.batch * length
        raise PluginError(f"the calibration text has {len(tokens)} tokens, at least {needed} are needed")
    return list(sequences[:whole].split(recipe.batch))


def _blocks(model: Any) -> Any:
    """The decoder layers."""
    inner = getattr(model.model, "language_model", model.model)
    return inner.layers


def _linears(model: Any, block: Any) -> "list[tuple[str, torch.nn.Linear]]":
    """Full names and linear modules inside one decoder layer."""
    import torch

    inside = set(block.modules())
    return [
        (name, module)
        for name, module in model.named_modules()
        if module in inside and isinstance(module, torch.nn.Linear)
    ]


def _replace(model: Any, name: str, module: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


class _Captured(Exception):
    """Ends the model's forward once the layers have been seen."""


def _capture(
    model: Any, blocks: Any, batches: "list[torch.Tensor]"
) -> "tuple[list[torch.Tensor], list[dict[str, Any]]]":
    """Inputs of the first layer for each batch, and each layer's other arguments, which all batches share."""
    import torch

    first: list[torch.Tensor] = []
    arguments: list[dict[str, Any]] = [{} for _ in blocks]

    def seen(index: int) -> Callable[..., None]:
        def hook(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            if index == 0:
                first.append((positional[0] if positional else named["hidden_states"]).to(torch.bfloat16))
            if not arguments[index]:
                dropped = ("hidden_states", "past_key_values", "past_key_value", "use_cache", "cache_position")
                arguments[index].update({key: value for key, value in named.items() if key not in dropped})
            elif index == 0:
                raise _Captured

        return hook

    handles = [block.register_forward_pre_hook(seen(index), with_kwargs=True) for index, block in enumerate(blocks)]
    with torch.no_grad():
        for tokens in batches:
            try:
                model.model(tokens, use_cache=False)
            except _Captured:
                continue
    for handle in handles:
        handle.remove()
    return first, arguments


def _forward(block: Any, arguments: dict[str, Any], device: "torch.device") -> "Callable[[torch.Tensor], torch.Tensor]":
    """The layer as a function of its hidden states alone."""
    import torch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, tuple | list):
            return type(value)(move(item) for item in value)
        return value

    moved = {key: move(value) for key, value in arguments.items()}

    def run(x: "torch.Tensor") -> "torch.Tensor":
        out = block(x, **moved)
        return out[0] if isinstance(out, tuple) else out

    return run
