"""The queue as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.progress import span
from orchestrator.schedule.job import Job

if TYPE_CHECKING:
    from rich.table import Table

HEADS = ("job", "state", "verdict", "what", "box", "window", "priority", "left", "box-hours", "why", "run")


def table(jobs: Sequence[Job]) -> Table:
    """One row a job, in the order given."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        made.add_column(head, no_wrap=head not in ("what", "why"), overflow="fold")
    for job in jobs:
        cells = (
            str(job.id),
            job.state + ("*" if job.cancel_asked and job.is_open else ""),
            job.verdict,
            " ".join(job.overrides),
            f"{job.box} ({job.node})" if job.node else job.box,
            " ".join(filter(None, (job.schedule, job.window, job.zone))),
            str(job.priority),
            "" if job.expected_s is None or not job.is_open else f"at most {span(job.expected_s)}",
            f"{job.box_hours:.1f}",
            job.reason,
            job.run_id[:12],
        )
        made.add_row(*map(Text, cells))
    return made
