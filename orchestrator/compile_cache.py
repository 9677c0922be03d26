"""The compile cache of one plan: cold until a warm-up boot ran through; proof that a warm boot wrote nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from orchestrator import owner
from orchestrator.errors import UsageError
from orchestrator.records import write_json

State = Literal["cold", "warm"]
WRITTEN_BY_SERVERS = ("inductor", "vllm", "triton", "aiter", "home")
COMPILED_SUFFIXES = frozenset({".so", ".cpp", ".o", ".py", ".hsaco", ".ptx", ".cubin", ".json"})


def state(cache_dir: Path) -> State:
    """ "warm" only where a warm-up ran to its end; one that was killed leaves the cache cold."""
    try:
        record = json.loads((cache_dir / "state.json").read_text())
    except (FileNotFoundError, ValueError):
        return "cold"
    return "warm" if isinstance(record, dict) and record.get("state") == "warm" else "cold"


def mark(cache_dir: Path, new: Literal["warming", "warm"], plugin_sha256: str) -> None:
    """Record the state, with who recorded it, and of which plugin build and key the compiled graphs are."""
    record = {"state": new, "owner": asdict(owner.current()), "key": cache_dir.name, "plugin_sha256": plugin_sha256}
    write_json(cache_dir / "state.json", record)


def require_own(cache_dir: Path, plugin_sha256: str) -> None:
    """Raises UsageError where the directory's graphs are those of another plugin build or key: copied or renamed.

    Nothing of it is used then: a graph of other code gives other numbers without a word.
    """
    try:
        record = json.loads((cache_dir / "state.json").read_text())
        theirs = str(record["plugin_sha256"]), str(record["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # without a readable state it is cold
    for what, own, found in zip(("plugin build", "cache key"), (plugin_sha256, cache_dir.name), theirs, strict=True):
        if own != found:
            raise UsageError(
                f"compile cache {cache_dir} belongs to {what} {found[:16]}, this plan's is {own[:16]}; it was copied "
                "or renamed: remove that directory, and the next run warms its own"
            )


def compiled(cache_dir: Path) -> dict[str, int]:
    """The compiled files in the cache, relative to it, and when each was written, in ns since the epoch."""
    found = {}
    for path in (path for name in WRITTEN_BY_SERVERS for path in (cache_dir / name).rglob("*")):
        if path.suffix in COMPILED_SUFFIXES and path.is_file():
            found[path.relative_to(cache_dir).as_posix()] = path.stat().st_mtime_ns
    return found


def compiled_since(cache_dir: Path, before: Mapping[str, int]) -> list[str]:
    """The compiled files that are new, or were written again, since `compiled` gave `before`; sorted."""
    return sorted(name for name, written in compiled(cache_dir).items() if before.get(name) != written)
