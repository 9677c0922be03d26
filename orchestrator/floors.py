"""The floors of every box and stack, as they were measured: one JSON file each under the state directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator import catalog
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.stats.floor import Floor


def load(state: Path, box: str, stack: str) -> dict[str, Floor]:
    """Metric -> floor of this box on this stack; empty where none was measured. Raises UsageError for a damaged file."""
    path = _path(state, box, stack)
    return _read(path) if path.exists() else {}


def save(state: Path, found: Mapping[str, Floor]) -> list[Path]:
    """Store the floors, in place of those of the same metric, box and stack; returns the files."""
    places = {(floor.box, floor.stack) for floor in found.values()}
    written = []
    for box, stack in sorted(places):
        here = {metric: floor for metric, floor in found.items() if (floor.box, floor.stack) == (box, stack)}
        path = _path(state, box, stack)
        write_json(path, {metric: to_jsonable(floor) for metric, floor in (load(state, box, stack) | here).items()})
        written.append(path)
    return written


def every(state: Path) -> list[Floor]:
    """All floors, by box, stack and metric."""
    files = sorted((state / "floors").glob("*/*.json"))
    return [floor for path in files for _, floor in sorted(_read(path).items())]


def _path(state: Path, box: str, stack: str) -> Path:
    return state / "floors" / box / f"{stack}.json"


def _read(path: Path) -> dict[str, Floor]:
    data = catalog.read_json(path)
    try:
        return {metric: from_jsonable(Floor, floor) for metric, floor in data.items()}
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path}: no floors ({error}); remove it, and measure them with kind=floor") from None
