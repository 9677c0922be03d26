"""An A/B as a process: boots in the order of its design until the gate has decided, each of them a record.

What has happened is read from the records and from nothing else, so an A/B that was killed goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import interrupts, measured_boot
from orchestrator.abtest import arm_titles, attempts, standing
from orchestrator.abtest.attempts import NOT_READY, TRIES, Attempt
from orchestrator.abtest.design import Design, Slot
from orchestrator.abtest.executor import Executor
from orchestrator.abtest.shift import UNBOUND, Paused, Shift
from orchestrator.errors import BootError, InvalidMeasurement
from orchestrator.judging import floors, verdict_text
from orchestrator.judging.verdict import Verdict
from orchestrator.pages import paired_report
from orchestrator.progress import Progress
from orchestrator.recorded import catalog
from orchestrator.records import to_jsonable

if TYPE_CHECKING:
    from orchestrator.recorded.tracking import RunLog, Tracker

DESCRIPTION = "mlflow.note.content"  # the tag that MLflow's UI shows as a run's description
EXIT = {"PASS": 0, "FAIL": 1, "INVALID": 3, "INCONCLUSIVE": 4}


@dataclass
class AB:
    """One A/B and its run in MLflow."""

    design: Design
    tracker: Tracker
    log: RunLog
    executor: Executor
    progress: Progress
    state: Path  # where floors are kept
    shift: Shift = UNBOUND
    _read: dict[str, Attempt] = field(default_factory=dict, init=False)

    def conduct(self) -> Verdict:
        """Make boots until the verdict is settled, and record it.

        Raises UsageError for what is wrong with the machine, and Paused where its shift ends; `ab --resume` can go on
        from both.
        """
        with self._recorded():
            verdict, ready = self._settled(), False
            if verdict is None:
                self._describe(self._attempts())
            while verdict is None:
                self.shift.before_boot(self.design, attempts.pending(self.design, self._attempts()))
                ready = ready or self._make_ready()
                if ready:
                    self._boot(attempts.next_slot(self.design, self._attempts()))
                    self._say_where()
                verdict = self._settled()
            if self.design.test.kind == "floor" and verdict.state != "INVALID":
                self._store_floors()
            self.log.log_json(attempts.VERDICT, to_jsonable(verdict))
            self.log.log_metrics(_effects(verdict))
            self._draw(verdict)
            self.log.set_tag(DESCRIPTION, verdict_text.as_markdown(verdict, self.design))
            self.log.set_tag("verdict", verdict.state)
            self.log.finish("FINISHED", "; ".join(verdict.reasons))
        return verdict

    def _settled(self) -> Verdict | None:
        return attempts.settled(self.design, self._attempts(), self._own().tags.get(NOT_READY, ""))

    def _own(self) -> catalog.Entry:
        return catalog.find(self.tracker.directory, self.log.run_id)

    def _attempts(self) -> list[Attempt]:
        found = attempts.read(self.tracker.directory, self.log.run_id, self.design, self._read)
        self._read.update({attempt.run_id: attempt for attempt in found})
        return found

    def _store_floors(self) -> None:
        finished = [found.result for found in self._attempts() if found.state == "finished"]
        found = floors.measured(finished)
        self.log.log_json("floors.json", to_jsonable(found))
        self.log.log_metrics({f"floor.{name}.sd_between_log": floor.sd_between_log for name, floor in found.items()})
        for path in floors.save(self.state, found):
            self.progress.note(f"floors of {len(found)} metrics are in {path}")

    def _draw(self, verdict: Verdict) -> None:
        """The page. One that cannot be drawn is said, and costs nobody the verdict of a night."""
        try:
            page = paired_report.of_ab(self.tracker.directory, self._own(), verdict)
        except Exception as error:
            again = f"`python -m orchestrator compare {self.log.run_id}` draws it again"
            self.progress.note(f"report.html: {type(error).__name__}: {error}; the verdict stands, {again}")
            return
        self.log.log_text("report.html", page)

    def _say_where(self) -> None:
        """After a boot: in the run too, so that it stands there whatever ends the process."""
        found = self._attempts()
        self.progress.note(standing.left(self.design, found))
        self._describe(found)

    def _describe(self, found: list[Attempt]) -> None:
        self.log.set_tag(DESCRIPTION, standing.as_markdown(self.design, found, self.log.run_id))

    def _leave(self, why: str) -> None:
        """What there is so far, for who finds the run without its verdict. A store that refuses must not hide why."""
        with suppress(Exception):
            found = self._attempts()
            text = standing.as_markdown(self.design, found, self.log.run_id, why)
            self.log.set_tag(DESCRIPTION, text)
            if any(attempt.state == "finished" for attempt in found):
                self._draw(attempts.so_far(self.design, found))

    def _make_ready(self) -> bool:
        for left in reversed(range(TRIES)):
            try:
                self.executor.make_ready(self.log)
                return True
            except (BootError, InvalidMeasurement) as error:
                measured_boot.keep_log(self.log, error)
                self._note_fault("a boot before the first block", str(error), again=bool(left))
                fault = str(error)
        self.log.set_tag(NOT_READY, fault)
        return False

    def _boot(self, slot: Slot) -> None:
        number, total = self.design.order.index(slot) + 1, len(self.design.order)
        title = arm_titles.of(self.design.test)[slot.arm]
        name = f"{slot.block + 1}.{slot.position + 1} {slot.arm} {title}"
        tags = {"kind": "boot", "ab.block": slot.block, "ab.position": slot.position, "ab.arm": slot.arm}
        log = self.tracker.start(
            name,
            self.executor.params(slot.arm),
            {**self.executor.tags(slot.arm), **{key: str(value) for key, value in tags.items()}},
            parent=self.log.run_id,
        )
        expected_s = 3600 * attempts.revised(self.design, self._attempts()).per_boot[slot.arm]
        with self.progress.stage(f"boot {number} of at most {total}: {slot}, {title}", expected_s):
            try:
                self.executor.boot(slot, log)
            except (BootError, InvalidMeasurement) as error:
                log.set_tag("ab.attempt", "faulty")
                self._note_fault(str(slot), str(error), again=len(self._faulty(slot)) < TRIES)
            else:
                faulty = self._faulty(slot)
                if faulty and faulty[-1].run_id == log.run_id:  # it came up, and may not be used
                    self._note_fault(str(slot), attempts.fault_of(faulty[-1].result), again=len(faulty) < TRIES)

    def _faulty(self, slot: Slot) -> list[Attempt]:
        return [found for found in self._attempts() if found.slot == slot and found.state == "faulty"]

    def _note_fault(self, what: str, why: str, again: bool) -> None:
        self.progress.note(f"{what}: {why}" + ("; it is tried once more" if again else ""))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Whatever stops the A/B is in its record, and `--resume` finds it there."""
        try:
            yield
        except KeyboardInterrupt:
            with interrupts.once(held=True):
                self._leave("interrupted")
                self.log.finish("KILLED", "interrupted")
            self.progress.note(standing.resume_hint(self.log.run_id))
            raise
        except Paused as paused:
            self._leave(str(paused))
            self.log.finish("KILLED", str(paused))
            raise
        except BaseException as error:
            self._leave(str(error))
            self.log.finish("FAILED", str(error))
            self.progress.note(standing.resume_hint(self.log.run_id))
            raise


def _effects(verdict: Verdict) -> dict[str, float]:
    """The criteria's effects as metrics, to be charted over A/Bs."""
    found: dict[str, float] = {}
    for criterion in verdict.criteria:
        if criterion.effect is not None:
            found[f"effect.{criterion.metric}"] = criterion.effect
        if criterion.interval is not None:
            found[f"effect.{criterion.metric}.low"], found[f"effect.{criterion.metric}.high"] = criterion.interval
    return found
