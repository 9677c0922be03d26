"""A bf16 model directory to a ParoQuant checkpoint."""

import hashlib
import os
import re
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from paroquant_gfx1201.build.output import MANIFEST, atomic_directory, sha256, write_manifest
from paroquant_gfx1201.build.report import Report
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats.checkpoint import Entry, Writer, read_config, read_headers, read_tensors
from paroquant_gfx1201.formats.spec import FormatSpec

PROJECTIONS = re.compile(
    r"\.layers\.(?P<layer>\d+)\."
    r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))"
    r"\.weight$"
)
"""Weights that are quantized. Gates, shared experts, linear_attn.in_proj_a/b, vision towers,
embeddings and lm_head stay as they are, as in published checkpoints."""


@dataclass(frozen=True)
class Recipe:
    """How to quantize. ``calibration`` None means every input counts alike (H = identity)."""

    spec: FormatSpec
    seed: int
    steps: int
    calibration: Path | None

    def to_json(self, calibration_sha256: str | None) -> dict[str, Any]:
        """The manifest's ``recipe``."""
        return {
            "step": "quantize",
            **self.spec.to_config(),
            "seed": self.seed,
            "steps": self.steps,
            "rounding": "nearest",
            "calibration_sha256": calibration_sha256,
        }


def projections(headers: dict[str, Entry], spec: FormatSpec) -> dict[str, int]:
    """Module name to layer index of every projection to quantize, in file order.

    Raises PluginError for a model that is quantized already, has experts, or has a projection
    whose shape the format cannot hold.
    """
    if any(name.endswith(".qweight") for name in headers):
        raise PluginError("the model is quantized already (it has qweight tensors)")
    experts = next((name for name in headers if ".experts." in name), None)
    if experts:
        raise PluginError(f"mixture-of-experts models are not supported ({experts})")
    found = {}
    for name, entry in headers.items():
        if match := PROJECTIONS.search(name):
            outputs, inputs = entry.shape
            try:
                spec.shapes(inputs, outputs)
            except PluginError as error:
                raise PluginError(f"{name}: {error}") from None
            found[name.removesuffix(".weight")] = int(match["layer"])
    if not found:
        raise PluginError("the model has no projection this tool quantizes")
    return found


def _source(model: Path, headers: dict[str, Entry]) -> dict[str, Any]:
    """The model's weights by hash, and its own manifest's hash where it has one."""
    files = sorted({entry.file for entry in headers.values()})
    source: dict[str, Any] = {"files": {file.name: sha256(file) for file in files}}
    if (model / MANIFEST).is_file():
        source["manifest_sha256"] = sha256(model / MANIFEST)
    return source


def quantize_model(model: Path, out: Path, recipe: Recipe, report: Report) -> dict[str, float]:
    """Quantize the model directory ``model`` into the new directory ``out``.

    Returns the mean relative output errors and the seconds taken, which the manifest also holds.
    """
    started = time.monotonic()
    if not model.is_dir():
        raise PluginError(f"{model} is not a model directory")
    read_config(model)
    headers = read_headers(model)
    names = projections(headers, recipe.spec)
    text = None
    if recipe.calibration is not None:
        try:
            text = recipe.calibration.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PluginError(f"{recipe.calibration} cannot be read: {error}") from None
    with atomic_directory(out) as directory:
        errors = _write(model, headers, names, text, recipe, directory, report)
        count = len(errors)
        result = {
            "projections": count,
            "mean_output_error": round(sum(error for error, _ in errors.values()) / count, 6),
            "mean_unrotated_output_error": round(sum(plain for _, plain in errors.values()) / count, 6),
        }
        write_manifest(
            directory,
            source=_source(model, headers),
            recipe=recipe.to_json(text and hashlib.sha256(text.encode()).hexdigest()),
            result={
                **result,
                "output_error": {name: round(error, 6) for name, (error, _) in errors.items()},
            },
        )
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _write(
    model: Path,
    headers: dict[str, Entry],
    names: dict[str, int],
    text: str | None,
    recipe: Recipe,
    directory: Path,
    report: Report,
) -> dict[str, tuple[float, float]]:
    """Calibrate, fit and write; returns (error, unrotated error) by projection."""
    import torch
    from safetensors import safe_open

    from paroquant_gfx1201 import fit, rotation
    from paroquant_gfx1201.calibrate import input_grams

    spec = recipe.spec
    grams = None
    if text is not None:
        grams = input_grams(model, text, list(names), lambda done, total: report.progress(done, total, "calibrate"))

    def load(name: str) -> torch.Tensor:
        with safe_open(headers[name].file, framework="pt") as shard:
            return shard.get_tensor(name)

    stopping = Event()

    def stop_if_asked() -> None:
        if stopping.is_set():
            raise CancelledError

    def one(name: str) -> fit.Fitted:
        weight = load(f"{name}.weight")
        bias = load(f"{name}.bias").half() if f"{name}.bias" in headers else None
        inputs = weight.shape[1]
        gram = grams[name] if grams is not None else torch.eye(inputs)
        seed = recipe.seed + names[name]
        pairs = rotation.greedy_pairs(inputs, spec.group_size, spec.krot, seed)
        return fit.fit_projection(weight, gram, pairs, spec, recipe.steps, seed, bias, before_step=stop_if_asked)

    writer = Writer(directory)
    errors = {}
    # One projection per core: its tensors are too small for several cores to share.
    with ThreadPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            for done, (name, fitted) in enumerate(zip(names, pool.map(one, names), strict=True)):
                writer.add(fitted.projection.to_tensors(name))
                errors[name] = (fitted.error, fitted.plain_error)
                report.progress(done + 1, len(names), "quantize")
        finally:
            # A signal or a full disk must not wait for every queued projection.
            stopping.set()
            pool.shutdown(cancel_futures=True)
    quantized = {f"{name}.{suffix}" for name in names for suffix in ("weight", "bias")}
    kept = {name: entry for name, entry in headers.items() if name not in quantized}
    for name, tensor in read_tensors(kept):
        writer.add({name: tensor})
    writer.close(model, spec)
    return errors
