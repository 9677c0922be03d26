"""The compile cache of one plan: cold until a warm-up boot ran through; proof that a warm boot wrote nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from orchestrator import owner
from orchestrator.records import write_json

State = Literal["cold", "warm"]
COMPILED_SUFFIXES = frozenset({".so", ".cpp", ".o", ".py", ".hsaco", ".ptx", ".cubin", ".json"})


def state(cache_dir: Path) -> State:
    """ "warm" only where a warm-up ran to its end; one that was killed leaves the cache cold."""
    try:
        record = json.loads((cache_dir / "state.json").read_text())
    except (FileNotFoundError, ValueError):
        return "cold"
    return "warm" if isinstance(record, dict) and record.get("state") == "warm" else "cold"


def mark(cache_dir: Path, new: Literal["warming", "warm"]) -> None:
    """Record the state, with who recorded it."""
    write_json(cache_dir / "state.json", {"state": new, "owner": asdict(owner.current())})


def compiled(cache_dir: Path) -> frozenset[str]:
    """The compiled files in the cache, relative to it."""
    roots = [cache_dir / name for name in ("inductor", "vllm", "triton")]
    return frozenset(
        path.relative_to(cache_dir).as_posix()
        for root in roots
        for path in root.rglob("*")
        if path.suffix in COMPILED_SUFFIXES and path.is_file()
    )
