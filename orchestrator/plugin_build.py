"""The bundled vLLM plugin as a directory that any server can take on its PYTHONPATH.

The directory holds the package and a dist-info with its entry point, so the server needs no installer, no network
and no compiler at boot. It is named by the content hash, which is also part of every plan.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from orchestrator import digest
from orchestrator.errors import UsageError

PACKAGE = "paroquant_gfx1201"
# What decides a checkpoint's bytes; a change elsewhere in the plugin leaves prepared checkpoints valid.
QUANTIZER = (
    "formats",
    "rotation.py",
    "quantize.py",
    "quantize_fp4.py",
    "lloyd.py",
    "fit.py",
    "calibrate.py",
    "optimize.py",
    "build",
)


@dataclass(frozen=True)
class PluginBuild:
    """`sha256` covers the package's files; `builder_sha256` those that decide a checkpoint's bytes."""

    version: str
    sha256: str
    builder_sha256: str
    source: str  # directory of the package


def find() -> PluginBuild:
    """The plugin of this installation, found without importing it. Raises UsageError where it is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"the vLLM plugin {PACKAGE} is not installed here; run `make install` (or pip install ./plugin)"
        )
    source = Path(spec.submodule_search_locations[0])
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    quantizer = [path for path in files if path.relative_to(source).parts[0] in QUANTIZER]
    version = _version((source / "__init__.py").read_text())
    return PluginBuild(version, digest.of_tree(source, files), digest.of_tree(source, quantizer), str(source))


def site_dir(build: PluginBuild, cache: Path) -> Path:
    """Where `materialize` puts the build."""
    return cache / "plugins" / build.sha256[:16]


def materialize(build: PluginBuild, cache: Path) -> Path:
    """Write the build's directory once, atomically; returns it."""
    target = site_dir(build, cache)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=".staging-"))
    try:
        shutil.copytree(build.source, staging / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        info = staging / f"{PACKAGE}-{build.version}.dist-info"
        info.mkdir()
        name = PACKAGE.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {build.version}\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}:register\n")
        staging.chmod(0o755)
        staging.rename(target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and target.is_dir():  # another process was first
            return target
        raise
    return target


def _version(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("__version__"):
            return line.split("=")[1].strip().strip("\"'")
    raise UsageError(f"{PACKAGE}/__init__.py has no __version__ line")
