"""Windows as they pass: opened, closed, or gone by while nothing looked; and the jobs that waited in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.errors import UsageError
from orchestrator.schedule.job import Job
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import Queue

NOTE = "windows"  # of the queue: those that are open


@dataclass(frozen=True)
class Passed:
    """A window that is over. `first_seq` is the last event before it opened; `seen` is False where no scheduler was up
    in it."""

    window: str
    opens_utc: str
    closes_utc: str
    schedule: str
    first_seq: int
    seen: bool = True


def iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def passed(
    queue: Queue, policy_of: Callable[[Job], Policy], now: datetime, looked: datetime
) -> tuple[list[Passed], list[str]]:
    """Note what has opened and closed since the pass before, at `looked`; returns the windows that are over, oldest
    first, and the lines that say so. A clock that is set back opens no window a second time."""
    noted: dict[str, dict] = queue.note(NOTE) or {}
    over, lines, still = [], [], {}
    for name, record in noted.items():
        if now < datetime.fromisoformat(record["closes_utc"]):
            still[name] = record
        else:
            over.append(Passed(name, **record))
    looked_at = set()
    for job, policy in _open(queue, policy_of):
        hours = policy.hours()
        name = str(hours)
        if (name, hours.days) in looked_at:  # many jobs share a window
            continue
        looked_at.add((name, hours.days))
        known = {found.opens_utc for found in over if found.window == name}
        for night in hours.nights(looked):
            if night.closes <= now and night.opens > looked and iso(night.opens) not in known:
                known.add(iso(night.opens))
                over.append(Passed(name, iso(night.opens), iso(night.closes), job.schedule, queue.last_seq(), False))
            elif night.holds(now) and name not in still:
                record = {
                    "opens_utc": iso(night.opens),
                    "closes_utc": iso(night.closes),
                    "schedule": job.schedule,
                    "first_seq": queue.last_seq(),
                }
                still[name] = record
                queue.log("window opened", window=name, opens=record["opens_utc"], closes=record["closes_utc"])
                lines.append(f"window {name} is open until {record['closes_utc']}")
    over.sort(key=lambda found: found.closes_utc)
    for found in over:
        how = "closed" if found.seen else "missed"
        queue.log(f"window {how}", window=found.window, opens=found.opens_utc, closes=found.closes_utc)
        lines.append(f"window {found.window} is closed" if found.seen else f"window {found.window} was missed")
        lines += _count(queue, policy_of, found)
    if still != noted:
        queue.set_note(NOTE, still)
    return over, lines


def _open(queue: Queue, policy_of: Callable[[Job], Policy]) -> Iterator[tuple[Job, Policy]]:
    """The open jobs with their policies, but for those whose policy is gone: they run still, and end as they will."""
    for job in queue.open_jobs():
        with suppress(UsageError):
            yield job, policy_of(job)


def _count(queue: Queue, policy_of: Callable[[Job], Policy], night: Passed) -> list[str]:
    """Count the night for every job that waited through it in vain; one that has waited for too many is missed."""
    began = {event.job_id for event in queue.events(night.first_seq, kind="running")} if night.seen else set()
    lines = []
    for job, policy in _open(queue, policy_of):
        if job.state == "running" or job.id in began or str(policy.hours()) != night.window:
            continue
        if datetime.fromisoformat(job.submitted_at_utc) >= datetime.fromisoformat(night.opens_utc):
            continue
        nights = job.nights + 1
        if nights < policy.nights:
            queue.update(job.id, "night passed", nights=nights)
            continue
        reason = f"{nights} windows went by without it: {job.reason or 'no scheduler was up'}"
        queue.move(job.id, "missed", nights=nights, reason=reason)
        lines.append(f"job {job.id} is missed: {reason}")
    return lines
