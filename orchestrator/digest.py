"""Content hashes: of values, files and source trees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def of_value(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_tree(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 (hex) over each file's POSIX path relative to `root`, a NUL and its bytes, in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(root).as_posix() for path in files):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()
