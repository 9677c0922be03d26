"""The morning's summary of a window: what was decided, what was not and why, what it cost, what comes next."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.errors import UsageError
from orchestrator.pages import page
from orchestrator.records import from_jsonable, to_jsonable, write_bytes, write_json
from orchestrator.schedule.job import Job
from orchestrator.schedule.nights import Passed
from orchestrator.schedule.queue import Queue

if TYPE_CHECKING:
    from rich.table import Table

DIRECTORY = "summaries"  # below the state directory


@dataclass(frozen=True)
class Row:
    """One job. `hours` are those that it held its box in this window."""

    job_id: int
    what: str
    box: str
    node: str
    state: str
    verdict: str
    reason: str
    hours: float
    run_id: str


@dataclass(frozen=True)
class Summary:
    """One window. `prod` are the guard's last words on each box, with whether all was well; `next` is what waits, with
    when its window opens."""

    window: str
    opens_utc: str
    closes_utc: str
    seen: bool
    decided: tuple[Row, ...]
    undecided: tuple[Row, ...]
    box_hours: float
    prod: tuple[str, ...]
    prod_ok: bool
    clock: tuple[str, ...]  # reboots and clocks that were set
    next: tuple[tuple[str, ...], ...]  # job, what, opens (UTC), why not before

    @property
    def headline(self) -> str:
        verdicts = [row.verdict for row in self.decided]
        counts = [f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts)]
        decided = ", ".join(counts) or "nothing decided"
        prod = "" if self.prod_ok else "; PROD IS NOT AS IT SHOULD BE"
        return f"{decided}; {len(self.undecided)} not decided; {self.box_hours:.1f} box-hours{prod}"


def of(queue: Queue, night: Passed, opens: Callable[[Job], str]) -> Summary:
    """From the queue's events of that window; `opens` says when a job's window opens next, or has opened."""
    events = queue.events(night.first_seq) if night.seen else []
    hours: dict[int, float] = {}
    prod: dict[str, tuple[tuple[str, ...], bool]] = {}
    for event in events:
        if event.kind == "held":
            hours[event.job_id] = hours.get(event.job_id, 0.0) + event.data["seconds"] / 3600
        if event.kind == "prod":
            prod[event.data["node"]] = tuple(event.data["lines"]), event.data["ok"]
    touched = [queue.get(job_id) for job_id in dict.fromkeys(e.job_id for e in events if e.job_id is not None)]
    ended = {event.job_id for event in events if event.kind in ("done", "failed", "cancelled", "missed")}
    waiting = queue.open_jobs()
    decided = [job for job in touched if job.state == "done" and job.id in ended]
    lost = [job for job in touched if job.state in ("failed", "cancelled", "missed") and job.id in ended]
    return Summary(
        window=night.window,
        opens_utc=night.opens_utc,
        closes_utc=night.closes_utc,
        seen=night.seen,
        decided=tuple(_row(job, hours) for job in decided),
        undecided=tuple(_row(job, hours) for job in [*lost, *waiting]),
        box_hours=sum(hours.values()),
        prod=tuple(f"{node}: {line}" for node, (lines, _) in sorted(prod.items()) for line in lines),
        prod_ok=all(ok for _, ok in prod.values()),
        clock=tuple(event.data["said"] for event in events if event.kind == "clock"),
        next=tuple((str(job.id), " ".join(job.overrides), opens(job), job.reason) for job in waiting),
    )


def _row(job: Job, hours: dict[int, float]) -> Row:
    what = " ".join(job.overrides)
    spent = hours.get(job.id, 0.0)
    return Row(job.id, what, job.box, job.node, job.state, job.verdict, job.reason, spent, job.run_id)


def keep(summary: Summary, state: Path) -> Path:
    """Write it as JSON and as a page below the state directory; returns the page's path."""
    stem = f"{summary.closes_utc[:10]}-{summary.window.replace(' ', '-').replace('/', '-').replace(':', '')}"
    directory = state / DIRECTORY
    write_json(directory / f"{stem}.json", to_jsonable(summary))
    write_bytes(directory / f"{stem}.html", as_html(summary).encode())
    return directory / f"{stem}.html"


def last(state: Path) -> Summary:
    """The newest that was kept. Raises UsageError where there is none, or where it is damaged."""
    found = sorted((state / DIRECTORY).glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError("no window has closed yet; `python -m orchestrator schedule list` shows what waits")
    try:
        return from_jsonable(Summary, json.loads(found[-1].read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{found[-1]}: the summary is damaged ({error}); remove it") from None


HEADS = ("job", "what", "box", "state", "verdict", "box-hours", "why", "run")
NEXT = ("job", "what", "window opens (UTC)", "why not before")


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            str(row.job_id),
            row.what,
            f"{row.box} ({row.node})" if row.node else row.box,
            row.state,
            row.verdict,
            f"{row.hours:.1f}",
            row.reason,
            row.run_id[:12],
        )
        for row in rows
    ]


def tables(summary: Summary) -> list[Table]:
    """What was decided, what was not, what comes next, for the terminal."""
    return [
        _table("decided", HEADS, _cells(summary.decided)),
        _table("not decided", HEADS, _cells(summary.undecided)),
        _table("next", NEXT, summary.next),
    ]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for head in heads:
        made.add_column(head, no_wrap=head in ("job", "verdict", "run"), overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def as_html(summary: Summary) -> str:
    """One file that needs no network; everything in it is escaped."""
    good = summary.prod_ok and summary.seen
    return page.render(
        "night.html.j2",
        heading=f"{summary.window}, {summary.opens_utc} to {summary.closes_utc}",
        verdict=summary.headline if summary.seen else "no scheduler was up in this window",
        state="pass" if good else "fail",
        reasons=summary.clock,
        tables=[
            page.Table("decided", HEADS, tuple(_cells(summary.decided)), texts=True),
            page.Table("not decided", HEADS, tuple(_cells(summary.undecided)), texts=True),
            page.Table("next", NEXT, summary.next, texts=True),
        ],
        prod=summary.prod,
        version=__version__,
    )


def send(summary: Summary, url: str, timeout_s: float) -> str:
    """POST it as JSON; returns a line where that failed, and never takes longer than `timeout_s`."""
    failed: list[str] = [f"no answer within {timeout_s:g} s"]

    def post() -> None:
        body = json.dumps({**to_jsonable(summary), "headline": summary.headline}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):
                failed.clear()
        except TimeoutError:
            return
        except (OSError, ValueError) as error:
            failed[0] = str(error)

    poster = threading.Thread(target=post, daemon=True)  # a name server that hangs must not hold up the queue
    poster.start()
    poster.join(timeout_s)
    return f"the summary could not be sent to the webhook: {failed[0]}" if failed else ""
