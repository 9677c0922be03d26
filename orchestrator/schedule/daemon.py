"""The loop of `serve`: looks at the queue, the clocks and the fleet every so often, and acts on what it finds.

All it knows is in the queue, so that it may be killed anywhere: the next one finds what ran, and goes on from records.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from orchestrator import interrupts, lease
from orchestrator.errors import UsageError
from orchestrator.fleet import Fleet
from orchestrator.schedule import clock as clocks
from orchestrator.schedule import nights, summary
from orchestrator.schedule import policy as policies
from orchestrator.schedule.clock import Clock, Reading
from orchestrator.schedule.decide import Drop, Node, Start, Wait, decide
from orchestrator.schedule.job import Job
from orchestrator.schedule.nights import iso
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import Queue, dependency
from orchestrator.schedule.unit import Order, Outcome, Said
from orchestrator.schedule.window import Night

PERIOD_S = 20.0
LOCK = "scheduler.lock"
PULSE = "pulse"  # the note with the clocks of the last pass


@dataclass
class Scheduler:
    """One pass is `tick`; it returns the lines that are to be said."""

    queue: Queue
    fleet: Fleet
    clock: Clock
    state: Path
    load: Callable[[str, str, str], Policy] = policies.of
    _read: dict[tuple[str, str, str], Policy] = field(default_factory=dict, init=False)

    def tick(self) -> list[str]:
        """One pass: what the clocks say, what has ended, windows that open and close, what may start."""
        self._read.clear()  # conf may have changed since the last pass
        before = self.queue.note(PULSE)
        looked = datetime.fromtimestamp(before["wall_s"], UTC) if before else self.clock.now()
        lines = self._clocks(before)
        lines += [self.settle(job_id, outcome) for job_id, outcome in self.fleet.ended()]
        lines += self._orphans(looked)
        self._stops()
        waiting = [job for job in self.queue.open_jobs() if job.state != "running"]
        lines += self._start(waiting)
        return lines + self._windows(looked)

    def _clocks(self, before: dict | None) -> list[str]:
        now, lines = clocks.read(self.clock), []
        if before and (said := clocks.what_happened(Reading(**before), now)):
            self.queue.log("clock", said=said)
            lines.append(said)
        self.queue.set_note(PULSE, asdict(now))
        return lines

    def settle(self, job_id: int, outcome: Outcome) -> str:
        """The job in the state that follows from its unit's outcome."""
        job = self.queue.get(job_id)
        if outcome.state == "lost":  # it cannot say any more for how long it held its box
            outcome = replace(outcome, held_s=self._held_s(job, self.clock.now()))
        changes = {
            "reason": outcome.reason,
            "run_id": outcome.run_id or job.run_id,
            "records": job.node if outcome.run_id or (outcome.state == "lost" and not job.records) else job.records,
            "stack": outcome.stack or job.stack,
            "boot_s": outcome.boot_s or job.boot_s,
            "boots_left": outcome.boots_left or job.boots_left,
            "box_hours": job.box_hours + outcome.held_s / 3600,
        }
        self.queue.log("held", job_id, seconds=outcome.held_s)
        if outcome.state != "lost":
            self.queue.log("prod", job_id, node=job.node, lines=outcome.prod, ok=outcome.prod_ok)
        if outcome.state == "done":
            self.queue.move(job_id, "done", **changes | {"verdict": outcome.verdict, "boots_left": 0})
            return f"job {job_id}: {outcome.verdict} {outcome.reason}".rstrip()
        if job.cancel_asked:
            self.queue.move(job_id, "cancelled", **changes)
            return f"job {job_id}: cancelled"
        if outcome.state == "refused":
            self.queue.move(job_id, "failed", **changes)
            return f"job {job_id}: failed: {outcome.reason}"
        if outcome.state in ("fault", "busy", "lost"):
            return self._faulty(job, outcome, changes)
        self.queue.move(job_id, "paused", **changes)
        return f"job {job_id}: paused: {outcome.reason}"

    def _faulty(self, job: Job, outcome: Outcome, changes: dict) -> str:
        """It is tried again after a while; after too many faults it has failed."""
        faults = job.faults + (outcome.state == "fault")
        try:
            policy = self._policy(job)
        except UsageError as error:
            self.queue.move(job.id, "failed", **changes | {"reason": f"{outcome.reason}; {error}"})
            return f"job {job.id}: failed: {outcome.reason}; {error}"
        if faults >= policy.tries:
            self.queue.move(job.id, "failed", **changes | {"faults": faults})
            return f"job {job.id}: failed after {faults} tries: {outcome.reason}"
        later = iso(self.clock.now() + timedelta(minutes=policy.retry_min))
        state = "paused" if changes["records"] else "queued"
        self.queue.move(job.id, state, **changes | {"faults": faults, "not_before_utc": later})
        return f"job {job.id}: {outcome.reason}; it is tried again from {later} on"

    def _orphans(self, looked: datetime) -> list[str]:
        """Jobs that ran when the scheduler before this one ended, with its machine or without; they go on from their
        records. It counts as no fault: it was not theirs. They held their box until `looked`, as far as is known.
        """
        lines = []
        for job in self.queue.orphans():
            if job.id in self.fleet.running():
                continue
            held_s = self._held_s(job, looked)
            self.queue.log("held", job.id, seconds=held_s)
            reason, hours = "the scheduler ended while it ran", job.box_hours + held_s / 3600
            records = job.records or job.node
            self.queue.move(job.id, "paused", reason=reason, box_hours=hours, records=records)
            lines.append(f"job {job.id} was running when the scheduler ended; it goes on from its records")
        return lines

    def _held_s(self, job: Job, until: datetime) -> float:
        """Seconds from the job's last start."""
        began = self.queue.events(job_id=job.id, kind="running")[-1].at_utc
        return max(0.0, (until - datetime.fromisoformat(began)).total_seconds())

    def _stops(self) -> None:
        for job_id in self.fleet.running():
            if self.queue.get(job_id).cancel_asked:
                self.fleet.stop(job_id)

    def _policy(self, job: Job) -> Policy:
        """Read once in a pass: a file is parsed in milliseconds, and a thousand jobs share few."""
        asked = (job.schedule, job.window, job.zone)
        if asked not in self._read:
            self._read[asked] = self.load(*asked)
        return self._read[asked]

    def _start(self, waiting: list[Job]) -> list[str]:
        now, lines, known = self.clock.now(), [], {}
        for job in waiting:
            try:
                known[job.id] = self._policy(job)
            except UsageError as error:  # its schedule is gone from conf, or was changed to something that is none
                self.queue.move(job.id, "failed", reason=str(error))
                lines.append(f"job {job.id}: failed: {error}")
        waiting = [job for job in waiting if job.id in known]
        needed = {dependency(text)[0] for job in waiting for text in job.depends_on}
        ended = {number: self.queue.get(number) for number in needed}
        busy = [self.queue.get(job_id).node for job_id in self.fleet.running()]
        for decision in decide(now, waiting, known, ended, self.fleet.nodes(), busy):
            match decision:
                case Start(job, node, night, stop_by):
                    lines += self._begin(job, node, night, stop_by, known[job.id])
                case Drop(job, reason):
                    self.queue.move(job.id, "cancelled", reason=reason)
                    lines.append(f"job {job.id}: cancelled: {reason}")
                case Wait(job, reason, opens) if job.reason != reason and not (opens and job.reason):
                    self.queue.update(job.id, "waits", reason=reason)
        return lines

    def _begin(self, job: Job, node: Node, night: Night, stop_by: datetime, policy: Policy) -> list[str]:
        claimed = self.queue.claim(job.id, node.name, node.stack)
        if claimed is None:
            return []
        order = Order(
            job=f"{self._queue_id()}/{job.id}",
            overrides=job.overrides,
            stop_by_utc=iso(stop_by),
            closes_utc=iso(night.closes),
            margin=policy.margin,
            boot_deadline=policy.boot_deadline,
            boot_deadline_s=60 * policy.boot_deadline_min,
            ready_s=60 * policy.ready_min,
            moved=job.records not in ("", node.name),
        )
        self.fleet.start(job.id, order, node, lambda said: self._tell(job.id, node.name, said))
        return [f"job {job.id} starts on {node.name}, until {iso(stop_by)} at the latest"]

    def _tell(self, job_id: int, node: str, said: Said) -> None:
        """A boot begins; called from the thread that watches the unit."""
        changes = {"run_id": said.run_id, "boot_s": said.boot_s, "boots_left": said.boots_left}
        changes["records"] = node
        if said.stack:
            changes["stack"] = said.stack
        self.queue.update(job_id, "boot", **changes, reason=said.slot)

    def _queue_id(self) -> str:
        """Of this queue, so that a job's number means one job wherever its runs are kept."""
        if (found := self.queue.note("id")) is None:
            found = secrets.token_hex(4)
            self.queue.set_note("id", found)
        return found

    def _windows(self, looked: datetime) -> list[str]:
        """Windows that open and close; each that is over is summed up."""
        over, lines = nights.passed(self.queue, self._policy, self.clock.now(), looked)
        for night in over:
            found = summary.of(self.queue, night, self._opens)
            lines.append(f"{summary.keep(found, self.state)}: {found.headline}")
            try:
                policy = self.load(night.schedule, "", "")
            except UsageError as error:
                lines.append(f"the summary goes to no webhook: {error}")
                continue
            if policy.webhook and (failed := summary.send(found, policy.webhook, policy.webhook_timeout_s)):
                lines.append(failed)
        return lines

    def _opens(self, job: Job) -> str:
        """When the job's window opens next, or has opened; empty where its policy is gone while it runs."""
        try:
            return iso(self._policy(job).hours().at(self.clock.now()).opens)
        except UsageError:
            return ""


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Raises UsageError where another scheduler works on this queue."""
    path = state / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        if not lease.take(lock):
            raise UsageError(f"another scheduler works on the queue below {state}; stop it first")
        yield


def runs(state: Path) -> bool:
    """Whether a scheduler of this machine works on the queue at this moment."""
    return lease.is_locked(state / LOCK)


def loop(
    scheduler: Scheduler,
    say: Callable[[str], None],
    wake: threading.Event,
    stop: threading.Event,
    period_s: float = PERIOD_S,
) -> None:
    """Passes until `stop` is set; then what runs is ended, prod is back, and its jobs are paused.

    `wake` starts a pass at once: set it when a job was added. For the HTTP API: call this in a thread of its own.
    """
    with alone(scheduler.state):
        try:
            while not stop.is_set():
                wake.clear()
                for line in scheduler.tick():
                    say(line)
                scheduler.clock.wait(period_s, wake)
        finally:
            with interrupts.once(held=True):  # a second signal ends nothing sooner: prod has to come back first
                scheduler.fleet.close()
                for job_id, outcome in scheduler.fleet.ended():
                    say(scheduler.settle(job_id, outcome))
