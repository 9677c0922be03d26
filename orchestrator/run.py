"""One run: a variant measured on one boot, recorded and shown."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from orchestrator import config, console, measured_boot, prod
from orchestrator.errors import OrchestratorError
from orchestrator.inputs import Inputs, gather, require_present
from orchestrator.measured_boot import Session
from orchestrator.progress import Progress
from orchestrator.recorded import identity
from orchestrator.records import to_jsonable
from orchestrator.schema import Experiment

OK, FAILED, INVALID = 0, 1, 3
EXIT = {"ok": OK, "failed": FAILED, "invalid": INVALID}  # by what `report.verdict` says


def run(experiment: Experiment, overrides: Sequence[str], quiet: bool = False) -> int:
    """Measure one variant; returns the exit status. Raises OrchestratorError for what stopped it."""
    return _run(measured_boot.checked(experiment), overrides, quiet)


def run_all(jobs: Sequence[tuple[Experiment, Sequence[str]]], quiet: bool = False) -> int:
    """Measure each (experiment, its overrides); returns the worst exit status.

    All of them are checked before the first starts, which raises UsageError. One that fails after that is said on
    stderr and does not stop the others; an interrupt does.
    """
    checked = [(measured_boot.checked(experiment), overrides) for experiment, overrides in jobs]
    return max([_outcome(inputs, overrides, quiet) for inputs, overrides in checked], default=OK)


def _outcome(inputs: Inputs, overrides: Sequence[str], quiet: bool) -> int:
    code, said = FAILED, ""
    try:
        code = _run(inputs, overrides, quiet)
        said = "" if code == OK else f"exit status {code}"
    except OrchestratorError as error:
        code, said = error.exit_code, "\n".join(part for part in (str(error), error.detail) if part)
    except Exception:  # a defect, which keeps its traceback
        said = traceback.format_exc()
    if said:
        with suppress(OSError):
            print(f"orchestrator: job {' '.join(overrides)}: {said}", file=sys.stderr)
    return code


def _run(inputs: Inputs, overrides: Sequence[str], quiet: bool) -> int:
    experiment, plan = inputs.experiment, inputs.plan()
    progress = Progress(quiet=quiet)
    expected_s = measured_boot.expected_s(inputs)
    with measured_boot.on_the_box(inputs, plan.variant, overrides, progress, expected_s), ExitStack() as prod_down:
        from orchestrator.recorded.tracking import Tracker

        prod.require_port(plan, inputs.state)
        tracker = Tracker(
            Path(experiment.paths.tracking), experiment.box.name, experiment.paths.tracking_server, progress.note
        )
        for run_id in tracker.reap():
            progress.note(f"run {run_id} was killed; its record says KILLED now")
        tags = identity.tags(inputs, plan, box_detected=config.box_was_detected(overrides))
        session = Session(inputs, plan, progress, tracker.start(plan.variant, identity.params(inputs), tags))
        with measured_boot.recorded(session):
            session.log.log_json("plan.json", to_jsonable(plan))
            measured_boot.make_checkpoints(inputs, progress)
            prod_down.enter_context(prod.displaced(inputs, progress))  # ends after the record: NotBack is no failed run
            measured_boot.measure(session)
            record, state = measured_boot.conclude(session)
        _show(record, tracker)
    return EXIT[state]


def prepare_only(experiment: Experiment, overrides: Sequence[str], quiet: bool = False) -> int:
    """Make the checkpoints of the variant and of its reference."""
    inputs = gather(experiment)
    progress = Progress(quiet=quiet)
    require_present(inputs.plan())
    with measured_boot.on_the_box(inputs, experiment.variant.name, overrides, progress):
        prod.owed(inputs.state, experiment.box.name, progress)
        made = measured_boot.make_checkpoints(inputs, progress)
    print(f"prepared: {', '.join(made)}" if made else f"nothing to prepare: {inputs.plan().checkpoint.path} is there")
    return OK


def _show(record: dict[str, Any], tracker: Any) -> None:
    """Print the result. A reader that left, as in `| true`, changes nothing about the run."""
    from orchestrator import ui
    from orchestrator.recorded import table

    with console.to_a_reader_that_may_leave():
        table.show(record)
        report = tracker.directory.resolve() / "artifacts" / record["run_id"] / "artifacts" / "report.html"
        print(
            f"report: {report}\nMLflow run {record['run_id']}; open the UI with:\n  {ui.how(tracker.directory)}",
            flush=True,
        )
