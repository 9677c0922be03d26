"""One A/B that waits for a window, or what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

JobState = Literal["queued", "running", "paused", "done", "failed", "cancelled", "missed"]
STATES: tuple[str, ...] = get_args(JobState)
OPEN: tuple[str, ...] = ("queued", "running", "paused")  # the others are final
MAY_BECOME: dict[str, frozenset[str]] = {
    "queued": frozenset({"running", "failed", "cancelled", "missed"}),
    "running": frozenset({"queued", "paused", "done", "failed", "cancelled"}),
    "paused": frozenset({"running", "failed", "cancelled", "missed"}),
}


@dataclass(frozen=True)
class Job:
    """`done` has a verdict, whichever; `failed` could not get one; `missed` found no window that it fitted into.

    `paused` has boots on record and goes on with them; `queued` has none, or starts anew.
    """

    overrides: tuple[str, ...]  # of `ab`, the box among them: ("+experiment=zpe", "box=r9700x2")
    box: str  # kind of box, a name in conf/box
    schedule: str = "nightly"  # policy, a name in conf/schedule
    window: str = ""  # "01:00-06:30" instead of the policy's own
    zone: str = ""  # IANA name, "Europe/Berlin", instead of the policy's own
    priority: int = 0  # the highest first, then the oldest
    depends_on: tuple[str, ...] = ()  # ids of jobs that must be done; "17:PASS" with that verdict
    idempotency_key: str | None = None
    by: str = ""  # who submitted it
    id: int = 0  # given by the queue, counts from 1
    state: JobState = "queued"
    submitted_at_utc: str = ""
    started_at_utc: str = ""  # of its first boot
    ended_at_utc: str = ""  # where the state is final
    reason: str = ""  # of the state, in words
    run_id: str = ""  # the A/B's run in MLflow, as soon as it has one
    verdict: str = ""  # PASS, FAIL, INCONCLUSIVE, INVALID
    box_hours: float = 0.0  # for which it held its box, all nights together
    node: str = ""  # the machine that it runs on, or ran on last
    records: str = ""  # the machine that has its records, once there are any
    stack: str = ""  # fingerprint of the software that its boots ran on
    boot_s: float = 0.0  # expected seconds of one boot with its suite; 0: not known yet
    boots_left: int = 0  # at most
    faults: int = 0  # how often it ended without a verdict and without being asked to
    nights: int = 0  # windows that passed without it starting or going on
    not_before_utc: str = ""  # after a fault it is tried again from then on
    cancel_asked: bool = False  # it stops at its next boot boundary

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def expected_s(self) -> float | None:
        """Seconds that the boots to come take at most; None where it is not known."""
        return self.boot_s * self.boots_left if self.boot_s and self.boots_left else None


@dataclass(frozen=True)
class Event:
    """Something that happened, numbered without reuse. `job_id` is None for what is about no job."""

    seq: int
    at_utc: str
    job_id: int | None
    kind: str  # "submitted", a state, "boot", "cancel asked", "window opened", "window closed", ...
    data: dict
