"""Recorded runs side by side, as a table; runs that measured different things are not put there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import catalog, labels
from orchestrator.catalog import Entry
from orchestrator.errors import UsageError
from orchestrator.records import Measurement

if TYPE_CHECKING:
    from rich.table import Table

SHORT = 8  # characters of a run's id that are shown


@dataclass(frozen=True)
class Column:
    """One run of a comparison."""

    entry: Entry
    measurements: Mapping[str, Measurement]


def read(entries: Sequence[Entry]) -> list[Column]:
    """The runs with their records. Raises UsageError where they cannot be paired, with all the reasons."""
    columns = [Column(entry, catalog.measurements(entry.artifacts)) for entry in entries]
    if why := why_not(columns):
        raise UsageError(f"these runs cannot be compared: {why[0]}", "\n".join(why[1:]))
    return columns


def why_not(columns: Sequence[Column]) -> list[str]:
    """Why the runs cannot be paired, each with the field; empty where they can."""
    first, found = columns[0], []
    for column in columns:
        entry = column.entry
        if entry.is_ab:
            found.append(f"kind: {_name(entry)} is an A/B; compare two of its boots, or read `verdict {entry.run_id}`")
        elif entry.tags.get("verdict") not in ("OK", None):
            found.append(f"verdict: {_name(entry)} is {entry.tags['verdict']} ({entry.tags.get('end_reason', '')})")
        elif entry.status != "FINISHED":
            found.append(f"status: {_name(entry)} is {entry.status}, so that its record is not whole")
    for column in columns[1:]:
        pair = f"{_name(first.entry)} and {_name(column.entry)}"
        for tag in ("source", "box", "stack"):
            left, right = (c.entry.tags.get(tag, "unknown") for c in (first, column))
            if left != right:
                found.append(f"{tag}: {left} and {right} of {pair}")
        for bench in first.measurements.keys() & column.measurements.keys():
            left, right = first.measurements[bench], column.measurements[bench]
            for what in ("config", "corpora"):
                a, b = getattr(left, what), getattr(right, what)
                found += [
                    f"{bench}.{what}.{key}: {a.get(key)} and {b.get(key)} of {pair}"
                    for key in sorted({**a, **b})
                    if a.get(key) != b.get(key)
                ]
    shared = set.intersection(*(set(column.entry.metrics) for column in columns))
    if not found and not shared:
        found.append("metrics: there is none that all of them have")
    return found


def table(columns: Sequence[Column]) -> Table:
    """A row for each metric that any run has: the values, and how far each is from the first run's, in percent."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("metric", no_wrap=True)
    for number, column in enumerate(columns):
        made.add_column(Text(f"{column.entry.name}\n{column.entry.run_id[:SHORT]}"), justify="right")
        if number:
            made.add_column("against the first", justify="right")
    names = dict.fromkeys(name for column in columns for name in column.entry.metrics)
    for name in sorted(names):
        base = columns[0].entry.metrics.get(name)
        cells = [name]
        for number, column in enumerate(columns):
            value = column.entry.metrics.get(name)
            cells.append(labels.text(value))
            if number:
                cells.append("" if not base or value is None else f"{100 * (value / base - 1):+.2f}%")
        made.add_row(*map(Text, cells))
    return made


def _name(entry: Entry) -> str:
    return f"{entry.run_id[:SHORT]} ({entry.name})"
