"""The recorded runs and A/Bs, and the floors, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orchestrator import labels
from orchestrator.progress import span
from orchestrator.recorded.catalog import Entry
from orchestrator.stats.floor import Floor

if TYPE_CHECKING:
    from rich.table import Table


def runs(entries: Sequence[Entry], every: bool) -> Table:
    """Newest first. Boots of an A/B are counted with it; they and published results are shown only with `every`."""
    boots: dict[str, int] = {}
    for entry in entries:
        if entry.parent and entry.tags.get("kind") == "boot" and entry.status == "FINISHED":
            boots[entry.parent] = boots.get(entry.parent, 0) + 1
    rows = []
    for entry in entries:
        if (entry.tags.get("kind") in ("boot", "promotion") or entry.is_published) and not every:
            continue
        kind = "published" if entry.is_published else entry.tags.get("kind", "run")
        count = f", {labels.counted(boots[entry.run_id], 'boot')}" if entry.run_id in boots else ""
        took = "" if entry.ended_s is None or entry.is_published else span(entry.ended_s - entry.started_s)
        state = "" if entry.is_published else entry.tags.get("verdict") or _without_verdict(entry)
        what = [entry.tags.get("gate", ""), entry.tags.get("suite", "")]
        rows.append(
            (
                entry.run_id,
                _when(entry.started_s),
                kind,
                entry.name + count,
                entry.tags.get("box", ""),
                state,
                " ".join(filter(None, what)),
                took,
            )
        )
    return _table(("run", "started (UTC)", "kind", "what", "box", "verdict", "gate, suite", "took"), rows)


def floors(found: Sequence[Floor], now: datetime) -> Table:
    """One row for each box, stack and metric."""
    rows = [
        (
            floor.box,
            floor.stack,
            floor.metric,
            f"{100 * floor.sd_between_log:.2f}%",
            f"{100 * floor.sd_within_log:.2f}%" if floor.sd_within_log else "",
            labels.text(floor.dof),
            str(floor.boots),
            f"{floor.age_days(now.isoformat()):.0f} days",
        )
        for floor in found
    ]
    return _table(("box", "stack", "metric", "SD between boots", "SD within a boot", "dof", "boots", "age"), rows)


def _without_verdict(entry: Entry) -> str:
    """MLflow knows one word for a run that somebody stopped and for one that was killed."""
    stopped = entry.status == "KILLED" and entry.tags.get("end_reason") == "interrupted"
    return "INTERRUPTED" if stopped else entry.status


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(
            head, no_wrap=head != "what", justify="right" if head.startswith(("SD", "dof", "boots")) else "left"
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made
