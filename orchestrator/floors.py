"""The floors of every box and stack, as they were measured: one JSON file each under the state directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator import catalog, labels
from orchestrator.errors import UsageError
from orchestrator.gate import BootResult
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.stats.floor import Floor


def load(state: Path, box: str, stack: str) -> dict[str, Floor]:
    """Metric -> floor of this box on this stack, as far as measured. Raises UsageError for a damaged file."""
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


def measured(results: Sequence[BootResult]) -> dict[str, Floor]:
    """The floors that boots of one and the same server show, for every metric that all of them have above zero.

    The variance between boots is pooled over the blocks, each about its own mean: what the same blocks of an A/B
    meet. With n boots in k blocks it has n - k degrees of freedom (one-way analysis of variance with block as the
    factor). Counts of errors and the like have no floor.
    """
    import numpy

    boots = [_metrics(result) for result in results]
    blocks = numpy.array([result.block for result in results])
    stack = results[0].plan["stack"]["fingerprint"]
    last = max(result.boot.started_at_utc for result in results)
    found = {}
    for name in boots[0]:
        values = [metrics.get(name, 0.0) for metrics in boots]
        if min(values) <= 0 or labels.is_count(name):
            continue
        logs = numpy.log(values)
        residuals = numpy.concatenate([logs[blocks == n] - logs[blocks == n].mean() for n in numpy.unique(blocks)])
        dof = len(logs) - len(numpy.unique(blocks))
        between = float(numpy.sqrt((residuals**2).sum() / dof))
        found[name] = Floor(name, results[0].plan["box"], stack, 0.0, between, float(dof), last, len(logs))
    return found


def _metrics(result: BootResult) -> dict[str, float]:
    of_boot = {"boot.kv_tokens": result.boot.kv_tokens, "boot.ready_s": result.boot.boot_s}
    found = {name: float(value) for name, value in of_boot.items() if value is not None}
    for measurement in result.measurements.values():
        found |= measurement.metrics
    return found
