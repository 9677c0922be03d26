"""The unit of the night: one A/B on the box that it was given, in a process of its own.

It asks before every boot whether it may go on, and says so in a file for whoever watches it (watch.py).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import config
from orchestrator.errors import InvalidMeasurement, OrchestratorError, UsageError
from orchestrator.progress import span
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.schedule.clock import Clock

if TYPE_CHECKING:
    from orchestrator.abtest.design import Design, Slot
    from orchestrator.recorded.catalog import Entry
    from orchestrator.schema import ABTest

JOB_TAG = "job"  # on the A/B's run: which job of which queue it is
SAID = "heartbeat.json"
OUTCOME = "outcome.json"
STOP = "stop"  # while this file is there, no further boot is begun


@dataclass(frozen=True)
class Order:
    """What a unit is told. Times are ISO 8601 in UTC."""

    job: str  # "QUEUE/NUMBER", the same in every night
    overrides: tuple[str, ...]
    stop_by_utc: str  # no boot is begun that would probably not end by then; one that runs still is cut off
    closes_utc: str  # prod is back by then
    margin: float
    boot_deadline: float
    boot_deadline_s: float
    ready_s: float
    moved: bool = False  # it began on another machine, whose records are on the tracking server

    @property
    def stop_by(self) -> datetime:
        return datetime.fromisoformat(self.stop_by_utc)


@dataclass(frozen=True)
class Outcome:
    """What came of it. `paused` may go on another night, `busy` found the box in somebody else's hands, `fault` ended
    without being asked to, `lost` went down with its machine, `refused` can never be."""

    state: str
    reason: str = ""
    run_id: str = ""
    verdict: str = ""
    stack: str = ""
    boot_s: float = 0.0
    boots_left: int = 0
    held_s: float = 0.0  # for which the box was taken
    prod: tuple[str, ...] = ()  # what is said of it afterwards
    prod_ok: bool = True


@dataclass(frozen=True)
class Said:
    """The A/B's process before a boot."""

    slot: str
    expected_s: float
    at_s: float  # by the steady clock
    ready_s: float = 0.0  # allowed besides, for what the first boot needs
    run_id: str = ""
    stack: str = ""
    boot_s: float = 0.0
    boots_left: int = 0


@dataclass
class Own:
    """The A/B's own process."""

    order: Order
    clock: Clock
    directory: Path
    _last: Said | None = field(default=None, init=False)

    def work(self) -> int:
        """Start the A/B, or go on with it; returns the exit status, and leaves the outcome in a file."""
        from orchestrator import lease
        from orchestrator.abtest.shift import Paused

        try:
            test = config.load_ab(self.order.overrides)
        except UsageError as error:
            return self._leave(Outcome("refused", str(error)), error.exit_code)
        tracking = Path(test.paths.tracking)
        state, reason = "done", ""
        try:
            code = self._conduct(test)
        except Paused as paused:
            code, state, reason = paused.exit_code, "paused", str(paused)
        except lease.Busy as busy:
            code, state, reason = busy.exit_code, "busy", str(busy)
        except InvalidMeasurement as error:  # the arms cannot be compared at all, tonight or ever
            code, state, reason = error.exit_code, "refused", str(error)
        except OrchestratorError as error:
            code, state, reason = error.exit_code, "fault", str(error)
        entry = run_here(tracking, self.order.job)
        if entry is None:
            return self._leave(Outcome(state, reason), code)
        if entry.status == "FINISHED":  # whatever went wrong afterwards, prod's return for one, the verdict stands
            reason = "; ".join(filter(None, [entry.tags.get("end_reason", ""), reason]))
            return self._leave(Outcome("done", reason, entry.run_id, entry.tags.get("verdict", "")), code)
        return self._leave(Outcome(state, reason, entry.run_id), code)

    def _conduct(self, test: ABTest) -> int:
        from orchestrator.abtest import ab_run, sweep
        from orchestrator.abtest.shift import Shift

        shift = Shift({JOB_TAG: self.order.job}, self._before_boot)
        begun = run_of(Path(test.paths.tracking), self.order, test.paths.tracking_server)
        kind = sweep if test.sweep else ab_run
        if begun is None:
            return kind.start(test, self.order.overrides, shift=shift)
        return kind.resume(begun, test.paths, self.order.overrides, shift=shift)

    def _leave(self, outcome: Outcome, code: int) -> int:
        if last := self._last:
            outcome = replace(outcome, stack=last.stack, boot_s=last.boot_s, boots_left=last.boots_left)
        write_json(self.directory / OUTCOME, to_jsonable(outcome))
        return code

    def _before_boot(self, design: Design, slots: Sequence[Slot]) -> None:
        from orchestrator.abtest.shift import Paused

        following, boot_s = slots[0], 3600 * design.hours.mean
        expected_s = 3600 * design.hours.of([following])
        plan = design.plans[following.arm]
        first = self._last is None
        entry = run_here(Path(design.test.paths.tracking), self.order.job)
        self._last = Said(
            str(following),
            expected_s,
            self.clock.steady_s(),
            self.order.ready_s if first else 0.0,
            entry.run_id if entry else "",
            plan.stack.fingerprint,
            boot_s,
            len(slots),
        )
        write_json(self.directory / SAID, to_jsonable(self._last))
        if (self.directory / STOP).exists():
            raise Paused(f"stopped before {following}, as asked")
        left_s = (self.order.stop_by - self.clock.now()).total_seconds()
        if self.order.margin * expected_s > left_s:
            raise Paused(
                f"the window ends before {following} would: it takes about {span(expected_s)}, {span(max(left_s, 0))} "
                "are left"
            )


def run_here(tracking: Path, job: str) -> Entry | None:
    """The run of the job in the local store, the sweep's rather than its A/Bs'; None where there is none."""
    from orchestrator.recorded import catalog

    found = [entry for entry in catalog.entries(tracking) if entry.tags.get(JOB_TAG) == job and not entry.parent]
    return found[0] if found else None


def run_of(tracking: Path, order: Order, server: str | None) -> Entry | None:
    """The job's run to go on with: in the local store, or fetched from the tracking server where it began elsewhere.

    None where it has none yet, or was ended before its first boot was planned. Raises UsageError where its records are
    out of reach.
    """
    from orchestrator.abtest.attempts import DESIGN
    from orchestrator.abtest.sweep import RECORD

    if order.moved:
        if not server:
            raise UsageError(
                "it began on another machine, and its records are only there; set paths.tracking_server, so that they "
                "can be had, or add the A/B again"
            )
        from orchestrator.abtest import retrieve

        retrieve.fetch(tracking, server, JOB_TAG, order.job)
    entry = run_here(tracking, order.job)
    if entry is None or not any((entry.artifacts / name).exists() for name in (DESIGN, RECORD)):
        return None
    return entry


def end_with_parent() -> None:
    """Let this process get a SIGTERM when the one that watches it is gone: then nobody would end it in time.

    Raises KeyboardInterrupt where that one is gone already.
    """
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of <linux/prctl.h>
    if os.getppid() == 1:
        raise KeyboardInterrupt


def read_order(path: Path) -> Order:
    """Raises UsageError for what is none."""
    try:
        return from_jsonable(Order, json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no order of the scheduler ({error})") from None
