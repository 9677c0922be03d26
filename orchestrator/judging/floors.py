"""The floors of every box and stack, as they were measured: one JSON file each under the state directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator import labels
from orchestrator.errors import UsageError
from orchestrator.judging.comparison import metrics_of
from orchestrator.judging.gate import BootResult
from orchestrator.recorded import catalog
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.stats.floor import Floor, estimate

ROUNDING = 1e-12  # a spread below it is of floating point, not of boots


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
    """Metric -> floor that boots of one and the same server show, for each metric that all of them have above zero.

    Counts of errors and the like have no floor.
    """
    boots = [metrics_of(result) for result in results]
    plan = results[0].plan
    last = max(result.boot.started_at_utc for result in results)
    found = {}
    for name in boots[0]:
        if "." not in name or labels.is_count(name) or not all(name in metrics for metrics in boots):
            continue
        floor = estimate(
            metric=name,
            box=plan["box"],
            stack=plan["stack"]["fingerprint"],
            blocks=[result.block for result in results],
            positions=[result.position for result in results],
            values=[metrics[name] for metrics in boots],
            repeats=[_repeats(name, result) for result in results],
            measured_at_utc=last,
        )
        if floor is not None:
            exact = floor.sd_between_log < ROUNDING
            found[name] = replace(floor, sd_between_log=0.0) if exact else floor
    return found


def _repeats(name: str, result: BootResult) -> list[float]:
    """What a boot's number was made of, in a unit whose relative spread is the same; empty where it is not one of
    repeated requests."""
    if not (
        place := re.fullmatch(r"(decode|prefill)\.(?:ms_per_step|tok_per_s|ttft_ms|prompt_tok_per_s)\.\w{3}(\d+)", name)
    ):
        return []
    bench, key = {"decode": ("decode_ctx", "context_tokens"), "prefill": ("prefill", "length_tokens")}[place[1]]
    samples = result.measurements[bench].samples if bench in result.measurements else ()
    taken = [
        sample["update_ms"]
        for sample in samples
        if sample.get(key) == int(place[2])
        and sample.get("update_ms")
        and not sample.get("error")
        and not sample.get("warmup")
    ]
    return [ms[0] if "ttft" in name or bench == "prefill" else ms[-1] - ms[0] for ms in taken]
