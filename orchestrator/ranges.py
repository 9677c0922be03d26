"""What numbers and words of the configuration may be, beyond their types."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import UsageError
from orchestrator.schema import Variant

T = TypeVar("T")
BITS = {"bf16": 16, "paroquant-int4": 4, "paroquant-int4-lloyd": 4, "int5-bitplane": 5, "mxfp4-paro": 4, "nvfp4": 4}
PORT = (1, 65535)
ABOVE_ZERO = (math.ulp(0.0), math.inf)
# What a number may be, by its key; null, where the key allows it, is not looked at.
RANGES: Mapping[str, tuple[float, float]] = {
    "box.port": PORT,
    "box.prod_port": PORT,
    "box.disk_free_gib": (0, math.inf),
    "box.vram_clear_mib": (0, math.inf),
    "box.drain_timeout_s": ABOVE_ZERO,
    "box.canary_margin": (0, math.inf),
    "box.clear_timeout_s": ABOVE_ZERO,
    "box.detect.count": (1, math.inf),
    "box.model.group_size": (1, math.inf),
    "box.model.krot": (0, math.inf),
    "box.model.quantize.steps": (0, math.inf),
    "box.container.shm_size_mib": (0, math.inf),
    "box.container.memory_gib": ABOVE_ZERO,
    "engine.ready_timeout_s": ABOVE_ZERO,
    "engine.stop_grace_s": (0, math.inf),
    "suite.seed": (0, math.inf),
}
NEVER_EMPTY = ("box.host", "box.name", "box.models_dir", "engine.python", "engine.socket")
NEVER_EMPTY += (
    "box.container.image",
    "box.container.python",
    "box.container.path",
    "paths.cache",
    "paths.state",
    "paths.tracking",
    "paths.tracking_server",
    "variant.name",
    "suite.name",
)


def check_bits(variant: Variant, where: str) -> None:
    weights = variant.weights
    if weights.bits != BITS[weights.format]:
        raise UsageError(
            f"{where}.weights.bits: {weights.format} has {BITS[weights.format]} bits, not {weights.bits}; "
            f"choose weights@{where}.weights=NAME"
        )


def in_range(declared: T) -> T:
    """Raises UsageError for the first number that is out of its range, or text that is empty."""
    for key, (low, high) in RANGES.items():
        value = _at(declared, key)
        if value is not None and not low <= value <= high:
            if high < math.inf:
                wanted = f"from {low} to {high}"
            else:
                wanted = "above 0" if low == ABOVE_ZERO[0] else f"of at least {low}"
            raise UsageError(f"{key}: {value} is out of range; write a number {wanted}")
    for key in NEVER_EMPTY:
        value = _at(declared, key)
        if value is not None and (not value.strip() or "\0" in value):
            raise UsageError(f"{key}: it is empty or no plain text; write a value, or leave it out")
    if re.search(r"[\s/:]", _at(declared, "box.host")):
        raise UsageError(f"box.host: {_at(declared, 'box.host')!r} is no host; write a name or an IPv4 address")
    python = declared.engine.python
    if found := python and shutil.which(str(Path(python).expanduser().absolute()) if "/" in python else python):
        # From here and on this PATH: the server has a directory and a PATH of its own. Links of a venv stay.
        return replace(declared, engine=replace(declared.engine, python=str(Path(found).absolute())))
    return declared


def _at(declared: Any, key: str) -> Any:
    """The value at a dotted key; None where a part of it is not there."""
    for name in key.split("."):
        declared = getattr(declared, name, None)
    return declared
