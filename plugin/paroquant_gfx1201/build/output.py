"""A directory that appears complete or not at all, and its manifest."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paroquant_gfx1201 import __version__
from paroquant_gfx1201.errors import PluginError

MANIFEST = "manifest.json"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_abandoned(final: Path) -> None:
    """Delete partial directories whose builder was killed before it could."""
    for path in final.parent.glob(f".{final.name}.partial-*"):
        owner = path.name.rpartition("-")[2]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """A temporary sibling of ``final`` that is renamed to it on success and deleted on failure.

    The rename happens after every file is on disk, so a reader never meets a half-written model.
    Raises PluginError if ``final`` exists.
    """
    final = final.absolute()
    if final.exists():
        raise PluginError(f"{final} exists already: remove it or choose another --out")
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    partial = final.parent / f".{final.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            # Libraries write weights 0600; a server in a container runs as another user.
            path.chmod(0o644)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        partial.chmod(0o755)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_manifest(directory: Path, source: dict[str, Any], recipe: dict[str, Any], result: dict[str, Any]) -> None:
    """manifest.json: what was made from what, how, by which version, with each file's SHA-256."""
    manifest = {
        "schema": 1,
        "tool": {"name": "paroquant-gfx1201", "version": __version__},
        "source": source,
        "recipe": recipe,
        "result": result,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(directory.iterdir())
            if path.is_file() and path.name != MANIFEST
        },
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
