"""Which jobs start now, and why the others do not: a pure function of the queue, the nodes and the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.progress import span
from orchestrator.schedule.job import Job
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import dependency
from orchestrator.schedule.window import Night


@dataclass(frozen=True)
class Node:
    """A machine that can run one A/B at a time. No `kinds`: whatever kind of box its owner names.

    `stack` is the fingerprint of its software, empty where it is not known beforehand.
    """

    name: str
    kinds: tuple[str, ...] = ()
    stack: str = ""

    def serves(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


@dataclass(frozen=True)
class Start:
    """The job runs on this node until `stop_by` at the latest; from `closes` on nothing of it may be left."""

    job: Job
    node: Node
    night: Night
    stop_by: datetime


@dataclass(frozen=True)
class Wait:
    """The job stays as it is. `opens` is when its window opens next, where it is for that."""

    job: Job
    reason: str
    opens: datetime | None = None


@dataclass(frozen=True)
class Drop:
    """The job can never start."""

    job: Job
    reason: str


def decide(
    now: datetime,
    waiting: Sequence[Job],
    policies: Mapping[int, Policy],
    ended: Mapping[int, Job],
    nodes: Sequence[Node],
    busy: Sequence[str],
) -> list[Start | Wait | Drop]:
    """One decision for each job of `waiting`, which is in the order in which they are to run.

    `policies` are by job id, with the job's own window in them; `ended` are the jobs that others depend on, by id;
    `busy` are the names of nodes that run something.

    A job starts where it can end within the window; one that has begun, or is too long for any whole window, where its
    next boot can. A job may pass one before it that does not fit into what is left: that one could not have started.
    """
    taken, found = set(busy), []
    for job in waiting:
        decision = _one(now, job, policies[job.id], ended, [node for node in nodes if node.name not in taken], nodes)
        if isinstance(decision, Start):
            taken.add(decision.node.name)
        found.append(decision)
    return found


def _one(
    now: datetime, job: Job, policy: Policy, ended: Mapping[int, Job], free: Sequence[Node], nodes: Sequence[Node]
) -> Start | Wait | Drop:
    for text in job.depends_on:
        number, verdict = dependency(text)
        needed = ended[number]
        if needed.is_open:
            return Wait(job, f"waits for job {number}")
        if needed.state != "done" or (verdict and needed.verdict != verdict):
            return Drop(job, f"job {number}, which it depends on, is {needed.state} {needed.verdict}".rstrip())
    if job.not_before_utc and now < datetime.fromisoformat(job.not_before_utc):
        return Wait(job, job.reason)  # what went wrong
    night = policy.hours().at(now)
    if not night.holds(now):
        return Wait(job, "its window is closed", night.opens)
    if isinstance(node := _node(job, free, nodes), str):
        return Wait(job, node)
    stop_by = night.closes - timedelta(minutes=policy.return_min)
    left_s = (stop_by - now).total_seconds()
    needed_s, least_s = durations(job, policy)
    whole_s = policy.usable_s(night)
    begun = bool(job.records) or needed_s > whole_s
    if needed_s <= left_s or (begun and least_s <= left_s):
        return Start(job, node, night, stop_by)
    if begun:
        return Wait(job, f"its next boot takes about {span(least_s)}, more than is left of the window")
    return Wait(job, f"takes at most {span(needed_s)}, more than is left of the window; it fits into a whole one")


def durations(job: Job, policy: Policy) -> tuple[float, float]:
    """Seconds, margin included, of all boots that the job may need, and of the least that is worth a start: one boot.

    A job of unknown length needs a whole window to itself.
    """
    if job.expected_s is None:
        return float("inf"), 0.0
    return policy.margin * job.expected_s, policy.margin * job.boot_s


def _node(job: Job, free: Sequence[Node], nodes: Sequence[Node]) -> Node | str:
    """Where the job may run, or why nowhere. One that has begun goes on where its records are, or, where that machine
    is gone, on another with the same software; never half on one stack and half on another."""
    fit = [node for node in nodes if node.serves(job.box)]
    if job.records:
        own = [node for node in fit if node.name == job.records]
        alike = [node for node in fit if job.stack and node.stack == job.stack]
        if not own and not alike:
            wanted = f"no other box {job.box} has its stack {job.stack or '(unknown)'}"
            return f"its machine {job.records} is gone, and {wanted}"
        fit = own or alike
    if not fit:
        return f"there is no box {job.box}"
    names = {node.name for node in free}
    return next((node for node in fit if node.name in names), f"box {job.box} is taken")
