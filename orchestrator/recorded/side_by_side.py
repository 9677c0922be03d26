"""Recorded runs side by side, as a table and as sides of a page; what cannot be paired gets no differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator import labels
from orchestrator.errors import UsageError
from orchestrator.foreign_load import TELLING, percent
from orchestrator.recorded import catalog
from orchestrator.recorded.catalog import Entry
from orchestrator.records import Measurement

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.recorded.sides import Difference, Side

SHORT = 8  # characters of a run's id that are shown


@dataclass(frozen=True)
class Column:
    """One run of a comparison."""

    entry: Entry
    measurements: Mapping[str, Measurement]


def read(entries: Sequence[Entry]) -> list[Column]:
    """The runs with their records."""
    return [Column(entry, catalog.measurements(entry.artifacts)) for entry in entries]


def require_paired(columns: Sequence[Column]) -> None:
    """Raises UsageError where the runs cannot be paired, with all the reasons."""
    if why := why_not(columns):
        others = [*why[1:], "`compare --unpaired` shows their numbers without differences"]
        raise UsageError(f"these runs cannot be compared: {why[0]}", "\n".join(others))


def why_not(columns: Sequence[Column]) -> list[str]:
    """Why the runs cannot be paired, each with the field; empty where they can."""
    first, found = columns[0], []
    for column in columns:
        entry = column.entry
        if entry.is_ab:
            found.append(
                f"kind: {_name(entry)} is an A/B; compare two of its boots, or it alone: compare {entry.run_id}"
            )
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
        for bench in sorted(first.measurements.keys() & column.measurements.keys()):
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


def notes(columns: Sequence[Column]) -> list[str]:
    """What one has to know: which runs were disturbed; where published results are from, and what nobody wrote down."""
    found = [
        f"{_name(c.entry)}: other programs used {percent(share)} of the processors while it was measured: "
        "its times may be longer than they are alone"
        for c in columns
        if (share := c.entry.metrics.get("boot.other_cpu_share", 0.0)) >= TELLING
    ]
    published = [
        f"{_name(c.entry)}: {c.entry.tags.get('ledger.file', 'unknown file')}, lines "
        f"{c.entry.tags.get('ledger.lines', 'unknown')}, {c.entry.tags.get('ledger.date', 'no date')}; "
        f"{c.entry.tags.get('end_reason', '')}"
        for c in columns
        if c.entry.is_published
    ]
    if published:
        published.append(
            "of published results neither prompts, nor boots, nor the software stack are known to be the same"
        )
    return found + published


def no_interval(differences: Sequence[Difference]) -> list[str]:
    """Why a column of intervals is empty."""
    paired = [found for found in differences if any(share is not None for share in found.shares)]
    if not paired or any(interval is not None for found in paired for interval in found.intervals):
        return []
    return [
        "no interval: single boots have one only from the noise of their box and stack, which `ab kind=floor` measures"
    ]


def table(shown: Sequence[Side], differences: Sequence[Difference]) -> Table:
    """A row for each metric that any run has: the values, and each against the first with its 95% interval."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("metric", no_wrap=True)
    paired = any(share is not None for difference in differences for share in difference.shares)
    for number, side in enumerate(shown):
        mark = "" if side.source == "measured" else f"\n{side.source}"
        made.add_column(Text(f"{side.name}\n{side.first.run_id[:SHORT]}{mark}"), justify="right")
        if number and paired:
            made.add_column("against\nthe first", justify="right")
            made.add_column("95% interval", justify="right")
    for found in differences:
        cells = [found.metric]
        for number, value in enumerate(found.means):
            cells.append(labels.text(value))
            if number and paired:
                share, interval = found.shares[number], found.intervals[number]
                cells.append("" if share is None else f"{100 * share:+.2f}%")
                cells.append("" if interval is None else f"{100 * interval[0]:+.2f}% to {100 * interval[1]:+.2f}%")
        made.add_row(*map(Text, cells))
    return made


def _name(entry: Entry) -> str:
    return f"{entry.run_id[:SHORT]} ({entry.name})"
