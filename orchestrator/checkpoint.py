"""Which checkpoint a variant needs, named by everything that decides its bytes, before it exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import digest
from orchestrator.schema import Model, Weights

CALIBRATION = Path(__file__).parent / "corpora_data" / "prompts.yaml"  # no bench scores the model on this text


@dataclass(frozen=True)
class Checkpoint:
    """A model directory in the cache. `recipe` is what its manifest has to say; `recipe_id` its hash."""

    path: str
    recipe: Mapping[str, Any]
    recipe_id: str


def locate(model: Model, weights: Weights, cache: Path, quantizer_sha256: str, calibration_sha256: str) -> Checkpoint:
    """The checkpoint of `model` in the format of `weights`. Pure: looks at no file."""
    recipe: dict[str, Any] = {"source_sha256": model.source.sha256, "format": weights.format}
    if weights.quantized:
        recipe |= {
            "bits": weights.bits,
            "group_size": model.group_size,
            "krot": model.krot,
            "seed": model.quantize.seed,
            "steps": model.quantize.steps,
            "calibration_sha256": calibration_sha256,
            "quantizer_sha256": quantizer_sha256,
        }
    recipe_id = digest.of_value(recipe)[:12]
    return Checkpoint(str(cache / "models" / model.name / f"{weights.name}-{recipe_id}"), recipe, recipe_id)
