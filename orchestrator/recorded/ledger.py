"""The ledger: results that others published, as data with where each of them is from.

In MLflow they are an experiment of their own and tagged as published, so that the UI can show them beside measured runs
and nothing takes them for one.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator import digest
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog, identity
from orchestrator.records import from_jsonable, to_jsonable

if TYPE_CHECKING:
    from orchestrator.recorded.tracking import Tracker

EXPERIMENT = "published"
PERCENT = "_percent"
WHOLE_K = (2, 4, 8, 16, 32, 64)  # thousands that are powers of two, as people write them


@dataclass(frozen=True)
class Result:
    """One published result. `lines` are the first and last line of it in the source, `rounded` the metrics that the
    source gives in thousands only; `metrics` are as the source has them: a value, or values by place.
    """

    id: str
    date: str
    section: str
    lines: tuple[int, ...]
    what: str
    variant: str | None  # the nearest one of conf/variant
    metrics: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """One file of the ledger: what it quotes, and the box that the results are from."""

    file: str
    box: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Imported:
    """Ids of results that an import added, found unchanged, and replaced because the ledger had changed."""

    added: tuple[str, ...]
    unchanged: tuple[str, ...]
    replaced: tuple[str, ...]


def read(directory: Path) -> list[Source]:
    """Every file of the ledger. Raises UsageError, naming file and key, for what is no ledger."""
    sources, seen = [], {}
    for path in sorted(directory.glob("*.yaml")):
        try:
            data = _plain(yaml.safe_load(path.read_text("utf-8")))
            source = from_jsonable(Source, data)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
            raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
        for result in source.results:
            if result.id in seen:
                raise UsageError(f"{path}: {result.id} is also in {seen[result.id]}; give one of them another id")
            seen[result.id] = path
            numbers(result, str(path))
        sources.append(source)
    if not sources:
        raise UsageError(f"{directory}: there is no ledger")
    return sources


def numbers(result: Result, where: str = "ledger") -> dict[str, float]:
    """The metrics by the names that measured ones have: `x: {len2k: 1}` is `x.len2048`, `*_percent` becomes a share."""
    flat: dict[str, float] = {}
    for name, value in result.metrics.items():
        for place, number in value.items() if isinstance(value, Mapping) else (("", value),):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise UsageError(f"{where}: {result.id}: {name}: {number!r} is no number")
            share = name.endswith(PERCENT)
            full = f"{name.removesuffix(PERCENT)}.{_place(place)}" if place else name.removesuffix(PERCENT)
            flat[full] = number / 100 if share else float(number)
    return flat


def import_all(sources: list[Source], tracker: Tracker) -> Imported:
    """Bring MLflow's copy in line with the ledger; what is there already is left alone."""
    there: dict[str, list[catalog.Entry]] = {}
    for entry in catalog.entries(tracker.directory):
        if entry.is_published and "ledger.id" in entry.tags:
            there.setdefault(entry.tags["ledger.id"], []).append(entry)
    added, unchanged, replaced = [], [], []
    for source in sources:
        for result in source.results:
            content = digest.of_value([source.file, source.box, to_jsonable(result)])[:16]
            old = there.get(result.id, [])
            if any(entry.tags.get("ledger.digest") == content and entry.status == "FINISHED" for entry in old):
                unchanged.append(result.id)
                continue
            for entry in old:  # of an earlier ledger, or of an import that was cut off
                tracker.remove(entry.run_id)
            _record(source, result, content, tracker)
            (replaced if old else added).append(result.id)
    return Imported(tuple(added), tuple(unchanged), tuple(replaced))


def _record(source: Source, result: Result, content: str, tracker: Tracker) -> None:
    tags = {
        "source": "published",
        "kind": "published",
        "ledger.id": result.id,
        "ledger.digest": content,
        "ledger.file": source.file,
        "ledger.date": result.date,
        "ledger.section": result.section,
        "ledger.lines": "-".join(map(str, result.lines)),
        "ledger.rounded": ", ".join(result.rounded),
        "box": source.box,
        "variant": result.variant or "none",
    }
    settings = identity.flat({"settings": dict(result.settings), "what": result.what})
    log = tracker.start(f"published {result.id}", settings, tags)
    log.log_metrics(numbers(result))
    log.finish("FINISHED", result.what)


def _place(place: str) -> str:
    """`len2k` is len2048, `ctx33k` is ctx33000: places are nominal."""
    found = re.fullmatch(r"([a-z]+)(\d+)k", place)
    if found is None:
        return place
    thousands = int(found[2])
    return f"{found[1]}{thousands * (1024 if thousands in WHOLE_K else 1000)}"


def _plain(value: Any) -> Any:
    """YAML's dates as text."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date) else value
