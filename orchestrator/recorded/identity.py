"""What a run is filed under: its flat configuration and the tags that runs are searched by."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator import compile_cache, digest, knobs
from orchestrator.inputs import Inputs
from orchestrator.plan import ServePlan
from orchestrator.records import to_jsonable
from orchestrator.schema import Suite


def params(inputs: Inputs) -> dict[str, str]:
    """The flat configuration of the run, for comparing runs side by side."""
    names = ("variant", "box", "engine", "suite")
    return flat({name: to_jsonable(getattr(inputs.experiment, name)) for name in names})


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested mappings as one: {"a": {"b": 1}} is {"a.b": "1"}."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            found[prefix] = str(value)

    walk("", dict(values))
    return found


def tags(inputs: Inputs, plan: ServePlan, box_detected: bool) -> dict[str, str]:
    """What runs are searched by."""
    variant = inputs.experiment.variant
    return {
        "variant": variant.name,
        "weights": variant.weights.name,
        "activation": knobs.activation_title(variant),
        "spec": str(variant.speculation.tokens),
        "drafter": Path(plan.drafter.path).name if plan.drafter else "none",
        "image": plan.image,
        "box": plan.box,
        "box_chosen_by": "auto" if box_detected else "command line",
        "engine": plan.engine,
        "suite": inputs.experiment.suite.name,
        "suite_digest": suite_digest(inputs.experiment.suite),
        "stack": inputs.stack.fingerprint,
        "plan": plan.fingerprint,
        "plugin": plan.plugin.sha256[:16],
        "checkpoint": plan.checkpoint.recipe_id,
        "source": "measured",
        "git": git_commit(),
        "cache_at_start": compile_cache.state(Path(plan.cache_dir)),
    }


def suite_digest(suite: Suite) -> str:
    """What two runs share that measured the same things, whatever the suite is called."""
    return digest.of_value(to_jsonable(suite.benches) | {"seed": suite.seed})[:16]


def git_commit() -> str:
    """The commit of the checkout this runs from, with "-dirty" for changes; "none" for an installed package, also where
    it is installed inside another project's checkout."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
