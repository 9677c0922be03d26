"""Which checkpoint a variant needs: one that is prepared here, or one that is found in the box's models directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import digest
from orchestrator.errors import UsageError
from orchestrator.schema import Model, Weights

CALIBRATION = Path(__file__).parent / "corpora_data" / "prompts.yaml"  # no bench scores the model on this text

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True)
class Checkpoint:
    """A model directory. `recipe_id` names its content: the hash of its recipe, or `content_id` of a found one.

    `recipe` is what the manifest of a prepared one has to say; empty for a found one. `recipe_id` is empty for one
    that was to be found and is not there.
    """

    path: str
    recipe: Mapping[str, Any]
    recipe_id: str


def locate(model: Model, weights: Weights, cache: Path, builder_sha256: str, calibration_sha256: str) -> Checkpoint:
    """The checkpoint of `model` in the format of `weights`, named before it exists. Pure: looks at no file."""
    recipe: dict[str, Any] = {
        "source_sha256": model.source.sha256,
        "format": weights.format,
        "builder_sha256": builder_sha256,
    }
    if weights.quantized:
        recipe |= {
            "bits": weights.bits,
            "group_size": model.group_size,
            "krot": model.krot,
            "seed": model.quantize.seed,
            "steps": model.quantize.steps,
            "calibration_sha256": calibration_sha256,
        }
    recipe_id = digest.of_value(recipe)[:12]
    return Checkpoint(str(cache / "models" / model.name / f"{weights.name}-{recipe_id}"), recipe, recipe_id)


def damage(directory: Path) -> str:
    """What differs between a prepared directory's files and its manifest, or an empty string. Reads every byte."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is missing or unreadable"
    files.pop(RECIPE_FILE, None)  # ours, written last and compared by content; a builder may have copied an older one
    for name, (size, sha256) in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or digest.of_file(path) != sha256:
            return f"{name} is not what its manifest says"
    return "" if files else "manifest.json names no file"


def find(model: Model, weights: Weights, models_dir: str | None) -> Checkpoint:
    """The checkpoint that the box's models directory has under the model's name for `weights`.

    Raises UsageError where the model has no name for them.
    """
    if weights.name not in model.checkpoints:
        known = ", ".join(model.checkpoints) or "none"
        raise UsageError(
            f"box.model.checkpoints: {model.name} has no {weights.name} checkpoint (it has: {known}); "
            f"add +box.model.checkpoints.{weights.name}=DIRECTORY"
        )
    return _found(model.checkpoints[weights.name], models_dir)


def find_drafter(model: Model, drafter: str | None, models_dir: str | None) -> Checkpoint:
    """The drafter of that name, or the model's own. Raises UsageError where neither is named."""
    name = drafter or model.drafter
    if name is None:
        raise UsageError(
            f"box.model.drafter: model {model.name} has no drafter; set variant.speculation.drafter=DIRECTORY, "
            "or choose speculation@variant.speculation=ngram5 or none"
        )
    return _found(name, models_dir)


def _found(name: str, models_dir: str | None) -> Checkpoint:
    if models_dir is None and not Path(name).is_absolute():
        raise UsageError(f"box.models_dir: not set, and {name} is no absolute path; set box.models_dir=DIRECTORY")
    path = Path(models_dir or "/").expanduser().absolute() / name  # a server runs in a directory of its own
    return Checkpoint(str(path), {}, content_id(path))


def vocabulary(directory: Path) -> int | None:
    """How many tokens the model's logits are over; None where its config.json is not there or does not say."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found = (config.get("text_config") or config).get("vocab_size")
    return found if isinstance(found, int) else None


def content_id(directory: Path) -> str:
    """What the directory holds, in 12 hexadecimal digits; empty where it holds no model.

    Covers the small JSON files by content, and the weights by name, size and time of change: a fine-tune that is
    written over another has the size of the other, and reading 20 GB for each plan would take a minute.
    """
    if not (directory / "config.json").is_file():
        return ""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json":
            files[path.name] = digest.of_file(path)
        elif path.suffix == ".safetensors":
            files[path.name] = [path.stat().st_size, path.stat().st_mtime_ns]
    return digest.of_value(files)[:12]
