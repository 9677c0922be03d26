"""A bf16 model directory to a ParoQuant checkpoint."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from paroquant_gfx1201.build.output import MANIFEST, atomic_directory, sha256, write_manifest
from paroquant_gfx1201.build.report import Report
from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.formats import nvfp4
from paroquant_gfx1201.formats.checkpoint import Entry, Spec, Writer, read_config, read_headers, read_tensors
from paroquant_gfx1201.formats.mxfp4 import Mxfp4Spec
from paroquant_gfx1201.formats.spec import FormatSpec

if TYPE_CHECKING:
    import torch

    from paroquant_gfx1201.fit import Fitted, Quantized

PROJECTIONS = re.compile(
    r"\.layers\.(?P<layer>\d+)\."
    r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))"
    r"\.weight$"
)
"""Weights that are quantized. Gates, shared experts, linear_attn.in_proj_a/b, vision towers,
embeddings and lm_head stay as they are, as in published checkpoints."""


FORMATS = ("paroquant-int4", "paroquant-int4-lloyd", "int5-bitplane", "mxfp4-paro", "nvfp4")
NVFP4_FLAVOUR: nvfp4.Flavour = "compressed-tensors"


def spec_of(name: str, group_size: int, krot: int, scale_rule: str) -> Spec | None:
    """The ParoQuant format of one of FORMATS; None for nvfp4, which has no rotations."""
    if name == "nvfp4":
        return None
    if name == "mxfp4-paro":
        return Mxfp4Spec(group_size, krot, scale_rule)
    return FormatSpec(5 if name == "int5-bitplane" else 4, group_size, krot, lloyd=name.endswith("lloyd"))


@dataclass(frozen=True)
class Recipe:
    """How to quantize.

    ``spec`` None rounds to NVFP4. ``calibration`` None means every input counts alike (H = identity).
    ``rotations``: a checkpoint whose rotations and channel scales are taken instead of being fitted.
    ``pow2``: scales of the uniform formats become powers of two.
    """

    spec: Spec | None
    seed: int
    steps: int
    calibration: Path | None
    rotations: Path | None = None
    pow2: bool = False

    def __post_init__(self) -> None:
        if self.pow2 and (not isinstance(self.spec, FormatSpec) or self.spec.lloyd):
            raise PluginError("--pow2 is for the uniform formats, paroquant-int4 and int5-bitplane")
        if self.rotations is not None and self.spec is None:
            raise PluginError("--rotations: nvfp4 has none")

    def to_json(self, calibration_sha256: str | None) -> dict[str, Any]:
        """The manifest's ``recipe``."""
        rotations = None
        if self.rotations is not None:
            rotations = {file.name: sha256(file) for file in sorted(self.rotations.glob("*.safetensors"))}
        return {
            "step": "quantize",
            **self.config(),
            "seed": self.seed,
            "steps": self.steps,
            "rounding": "nearest",
            "scales": "power of two" if self.pow2 else "float",
            "calibration_sha256": calibration_sha256,
            "rotations_of": rotations,
        }

    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` of the checkpoint."""
        return nvfp4.config_of(NVFP4_FLAVOUR) if self.spec is None else self.spec.to_config()


def projections(headers: dict[str, Entry], spec: Spec | None) -> dict[str, int]:
    """Module name to layer index of every projection to quantize, in file order.

    Raises PluginError for a model that is quantized already, has experts, or has a projection
    whose shape the format cannot hold.
    """
    done = next((name for name in headers if name.endswith((".qweight", ".weight_scale"))), None)
    if done:
        raise PluginError(f"the model is quantized already ({done})")
    experts = next((name for name in headers if ".experts." in name), None)
    if experts:
        raise PluginError(f"mixture-of-experts models are not supported ({experts})")
    found = {}
    for name, entry in headers.items():
        if match := PROJECTIONS.search(name):
            outputs, inputs = entry.shape
            if spec is None and inputs % nvfp4.BLOCK:
                raise PluginError(f"{name}: K={inputs} is not a multiple of the block size {nvfp4.BLOCK}")
            try:
                if spec is not None:
                    spec.shapes(inputs, outputs)
            except PluginError as error:
                raise PluginError(f"{name}: {error}") from None
            found[name.removesuffix(".weight")] = int(match["layer"])
    if not found:
        raise PluginError("the model has no projection this tool quantizes")
    return found


def source_of(model: Path, headers: dict[str, Entry]) -> dict[str, Any]:
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
            source=source_of(model, headers),
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

    from paroquant_gfx1201 import fit
    from paroquant_gfx1201.calibrate import input_grams

    grams = None
    if text is not None:
        grams = input_grams(model, text, list(names), lambda done, total: report.progress(done, total, "calibrate"))
    taken = None
    if recipe.rotations is not None:
        taken = read_rotations(recipe.rotations, list(names), recipe.spec)
    stopping = Event()

    def stop_if_asked() -> None:
        if stopping.is_set():
            raise CancelledError

    def one(name: str) -> "tuple[dict[str, torch.Tensor], float, float]":
        stop_if_asked()
        weight = load_tensor(headers, f"{name}.weight").float()
        bias = load_tensor(headers, f"{name}.bias") if f"{name}.bias" in headers else None
        gram = grams[name] if grams is not None else torch.eye(weight.shape[1])
        if recipe.spec is None:
            return _nvfp4(name, weight, bias, fit.regularized(gram))
        bias = None if bias is None else bias.half()
        if taken is not None:
            gram = fit.regularized(gram)
            stored = fit.quantize_rotated(weight, *taken(name), recipe.spec, bias, gram=gram, pow2=recipe.pow2)
            fitted = fit.measured(weight, stored, gram)
        else:
            fitted = _fitted(weight, gram, bias, recipe, recipe.seed + names[name], stop_if_asked)
        return fitted.projection.to_tensors(name), fitted.error, fitted.plain_error

    writer = Writer(directory)
    errors = {}
    # One projection per core: its tensors are too small for several cores to share.
    with ThreadPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            for done, (name, (tensors, *found)) in enumerate(zip(names, pool.map(one, names), strict=True)):
                writer.add(tensors)
                errors[name] = tuple(found)
                report.progress(done + 1, len(names), "quantize")
        finally:
            # A signal or a full disk must not wait for every queued projection.
            stopping.set()
            pool.shutdown(cancel_futures=True)
    write_rest(writer, model, headers, names, recipe.config())
    return errors


def load_tensor(headers: dict[str, Entry], name: str) -> "torch.Tensor":
    """One tensor of a checkpoint."""
    ((_, tensor),) = read_tensors({name: headers[name]})
    return tensor


def write_rest(
    writer: Writer, model: Path, headers: dict[str, Entry], names: Iterable[str], config: dict[str, Any]
) -> None:
    """Copy every tensor but those of the quantized ``names``, then close the writer."""
    quantized = {f"{name}.{suffix}" for name in names for suffix in ("weight", "bias")}
    for name, tensor in read_tensors({name: entry for name, entry in headers.items() if name not in quantized}):
        writer.add({name: tensor})
    writer.close(model, config)


def _fitted(
    weight: "torch.Tensor",
    gram: "torch.Tensor",
    bias: "torch.Tensor | None",
    recipe: Recipe,
    seed: int,
    before_step: Callable[[], None],
) -> "Fitted":
    from paroquant_gfx1201 import fit, rotation

    spec = recipe.spec
    pairs = rotation.greedy_pairs(weight.shape[1], spec.group_size, spec.krot, seed)
    return fit.fit_projection(weight, gram, pairs, spec, recipe.steps, seed, bias, before_step, recipe.pow2)


def _nvfp4(
    name: str, weight: "torch.Tensor", bias: "torch.Tensor | None", gram: "torch.Tensor"
) -> "tuple[dict[str, torch.Tensor], float, float]":
    from paroquant_gfx1201.fit import relative_output_error
    from paroquant_gfx1201.quantize_fp4 import to_nvfp4

    stored = to_nvfp4(weight, NVFP4_FLAVOUR, bias)
    error = relative_output_error(weight, stored.dequantize(), gram)
    return stored.to_tensors(name), error, error


def read_rotations(
    directory: Path, names: list[str], spec: Spec
) -> "Callable[[str], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]":
    """From a projection's name to the theta, channel_scales and pairs that another checkpoint has for it.

    Raises PluginError where that checkpoint lacks one of ``names`` or groups or rotates otherwise.
    """
    from paroquant_gfx1201.formats.catalog import read_projection, read_spec
    from paroquant_gfx1201.formats.checkpoint import check_headers

    headers = read_headers(directory)
    other = read_spec(read_config(directory).get("quantization_config", {}))
    if (other.group_size, other.krot) != (spec.group_size, spec.krot):
        raise PluginError(
            f"{directory} has group size {other.group_size} and krot {other.krot}, "
            f"asked for {spec.group_size} and {spec.krot}"
        )
    missing = sorted(set(names) - check_headers(headers, other))
    if missing:
        raise PluginError(f"{directory} has no rotation of {missing[0]}")

    def read(name: str) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        mine = {key: entry for key, entry in headers.items() if key.rpartition(".")[0] == name}
        found: Quantized = read_projection(name, dict(read_tensors(mine)), other)
        return found.theta, found.channel_scales, found.pairs

    return read
