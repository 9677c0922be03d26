"""One run: prepare, reference, warm boot, suite, record. It keeps the order and the books, and judges no number."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator import (
    bench,
    compile_cache,
    config,
    devices,
    identity,
    interrupts,
    journal,
    labels,
    lease,
    plugin_build,
    prepare,
    prod,
    reference,
)
from orchestrator.bench import betterbench_file, kld
from orchestrator.bench.context import BenchContext
from orchestrator.bench.warm import warm
from orchestrator.boot import Running, serving
from orchestrator.errors import BootError, InvalidMeasurement, OrchestratorError, UsageError
from orchestrator.expectation import announced, known
from orchestrator.inputs import Inputs, gather, require_present
from orchestrator.plan import ServePlan
from orchestrator.progress import Progress
from orchestrator.records import Boot, Measurement, to_jsonable
from orchestrator.reference import Reference
from orchestrator.schema import Experiment

OK, FAILED, INVALID = 0, 1, 3
EXIT = {"ok": OK, "failed": FAILED, "invalid": INVALID}  # by what `report.verdict` says
EXPECTED_BOOT_S = {"cold": 75.0, "warm": 30.0}


@dataclass
class Run:
    """What a run has so far."""

    inputs: Inputs
    plan: ServePlan
    progress: Progress
    log: Any  # tracking.RunLog
    boots: list[Boot] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def suite(self):
        return self.inputs.experiment.suite

    def context(self, advance=None, kl_reference: Reference | None = None) -> BenchContext:
        base = replace(
            known(self.inputs),
            reference=kl_reference,
            stack=self.inputs.stack.fingerprint,
            unfinished=self.inputs.state / "unfinished" / self.plan.fingerprint,
        )
        return replace(base, advance=advance) if advance else base


def run(experiment: Experiment, overrides: Sequence[str], quiet: bool = False) -> int:
    """Measure one variant; returns the exit status. Raises OrchestratorError for what stopped it."""
    return _run(_checked(experiment), overrides, quiet)


def run_all(jobs: Sequence[tuple[Experiment, Sequence[str]]], quiet: bool = False) -> int:
    """Measure each (experiment, its overrides); returns the worst exit status.

    All of them are checked before the first starts, which raises UsageError. One that fails after that is said on
    stderr and does not stop the others; an interrupt does.
    """
    checked = [(_checked(experiment), overrides) for experiment, overrides in jobs]
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


def _checked(experiment: Experiment) -> Inputs:
    """What the run is made of. Raises UsageError for all that can be known to be wrong before anything starts."""
    inputs = gather(experiment)
    require_present(inputs.plan())
    if not experiment.suite.benches:
        raise UsageError(
            f"suite.benches: suite {experiment.suite.name} has no bench left, so nothing would be measured"
        )
    bench.require_suite(experiment.suite.benches, known(inputs))
    return inputs


def _run(inputs: Inputs, overrides: Sequence[str], quiet: bool) -> int:
    experiment, plan = inputs.experiment, inputs.plan()
    progress = Progress(quiet=quiet)
    with _on_the_box(inputs, plan, overrides, progress, _expected_s(inputs)), ExitStack() as prod_down:
        from orchestrator.tracking import Tracker

        prod.require_port(plan, inputs.state)
        tracker = Tracker(Path(experiment.paths.tracking), experiment.box.name)
        for run_id in tracker.reap():
            progress.note(f"run {run_id} was killed; its record says KILLED now")
        tags = identity.tags(inputs, plan, box_detected=config.box_was_detected(overrides))
        this = Run(inputs, plan, progress, tracker.start(plan.variant, identity.params(inputs), tags))
        with _recorded(this):
            this.log.log_json("plan.json", to_jsonable(plan))
            _prepare(inputs, progress)
            prod_down.enter_context(prod.displaced(inputs, progress))  # ends after the record: NotBack is no failed run
            _measure(this)
            record, code = _conclude(this)
        _show(record, tracker)
    return code


def _expected_s(inputs: Inputs) -> float:
    """About how long a run holds its box: the measured boot, a warm-up where the cache is cold, and the benches."""
    cold = compile_cache.state(Path(inputs.plan().cache_dir)) == "cold"
    boots_s = EXPECTED_BOOT_S["warm"] + (EXPECTED_BOOT_S["cold"] if cold else 0)
    return boots_s + sum(bench.expected_s(name, raw) for name, raw in inputs.experiment.suite.benches.items())


def prepare_only(experiment: Experiment, overrides: Sequence[str], quiet: bool = False) -> int:
    """Make the checkpoints of the variant and of its reference."""
    inputs = gather(experiment)
    progress = Progress(quiet=quiet)
    require_present(inputs.plan())
    with _on_the_box(inputs, inputs.plan(), overrides, progress):
        prod.owed(inputs.state, experiment.box.name, progress)
        made = _prepare(inputs, progress)
    print(f"prepared: {', '.join(made)}" if made else f"nothing to prepare: {inputs.plan().checkpoint.path} is there")
    return OK


@contextmanager
def _on_the_box(
    inputs: Inputs, plan: ServePlan, overrides: Sequence[str], progress: Progress, expected_s: float | None = None
) -> Iterator[None]:
    """Hold the box, with what an earlier kill left behind ended, and room on its disk."""
    box = inputs.experiment.box
    if config.box_was_detected(overrides):
        progress.note(f"box=auto: this machine is taken as {box.name}")
    with lease.hold(box.name, plan.variant, inputs.state, expected_s):
        for line in journal.reap(inputs.state):
            progress.note(line)
        inputs.cache.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(inputs.cache).free / 2**30
        if free_gib < box.disk_free_gib:
            raise UsageError(
                f"paths.cache: {inputs.cache} has {free_gib:.1f} GiB free, box {box.name} wants {box.disk_free_gib:g}; "
                "free some space, or set paths.cache or box.disk_free_gib"
            )
        yield


@contextmanager
def _recorded(this: Run) -> Iterator[None]:
    """Whatever ends the run is in its record."""
    try:
        yield
    except KeyboardInterrupt:
        with interrupts.once(held=True):
            this.log.finish("KILLED", "interrupted")
        raise
    except BaseException as error:
        if isinstance(error, BootError) and error.log_path:
            this.log.log_file(error.log_path, f"boots/{error.log_path.parent.name}-failed/server.log")
        this.log.set_tag("verdict", "INVALID" if isinstance(error, InvalidMeasurement) else "FAILED")
        this.log.finish("FAILED", str(error))
        raise


def _prepare(inputs: Inputs, progress: Progress) -> list[str]:
    plugin_build.materialize(inputs.plugin, inputs.cache)
    wanted = inputs.checkpoint(inputs.experiment.variant.weights)
    return prepare.ensure(inputs.experiment, inputs.checkpoint(inputs.reference_variant().weights), wanted, progress)


def _measure(this: Run) -> None:
    kl_reference = _reference(this) if "kld" in this.suite.benches else None
    with _warm_serving(this, this.plan, "measured") as running:
        expected_s = announced(this.suite, this.plan.variant, running.target, this.context(), this.progress, this.log)
        for name in (name for name in bench.REGISTRY if name in this.suite.benches):
            raw = this.suite.benches[name]
            label = f"{labels.bench_name(name, raw)} on {this.plan.variant}"
            with this.progress.stage(label, expected_s[name]) as stage:
                context = this.context(stage.advance, kl_reference)
                measurement = bench.run(bench.measure_one(name, running.target, raw, context))
            this.measurements.append(measurement)
            # The samples are safe at once; numbers follow when the boot has ended and is known to be valid.
            this.log.log_measurement(replace(measurement, metrics={}))


def _reference(this: Run) -> Reference:
    """The KL reference of this stack: the stored one, or one made now on a boot of its own."""
    params = bench.params_of("kld", this.suite.benches["kld"])
    key = kld.reference_key(params, this.context())
    fingerprint = this.inputs.stack.fingerprint
    found = reference.load(this.inputs.cache, fingerprint, key)
    if found is not None:
        this.log.set_tag("kl_reference", "reused")
        return found
    require_present(this.inputs.reference_plan())
    this.progress.note(f"no KL reference for stack {fingerprint} and these corpora yet: making it on a bf16 boot")
    expected_s = 2 * bench.expected_s("kld", this.suite.benches["kld"])
    with (
        _warm_serving(this, this.inputs.reference_plan(), "reference") as running,
        this.progress.stage("score the KL reference, twice", expected_s) as stage,
    ):
        made = bench.run(kld.collect(running.target, params, this.context(stage.advance)))
    _require_usable(this.boots[-1])
    reference.save(this.inputs.cache, fingerprint, key, made)
    this.log.set_tag("kl_reference", "made")
    return made


@contextmanager
def _warm_serving(this: Run, plan: ServePlan, purpose: str) -> Iterator[Running]:
    """A boot on a warm compile cache; where the cache is cold, a warm-up boot of the suite's shapes comes first."""
    cache_dir = Path(plan.cache_dir)
    if compile_cache.state(cache_dir) == "cold":
        compile_cache.mark(cache_dir, "warming", plan.plugin.sha256)
        with _boot(this, plan, "warmup"):
            pass
        _require_usable(this.boots[-1])  # one that died did not compile all
        compile_cache.mark(cache_dir, "warm", plan.plugin.sha256)
    with _boot(this, plan, purpose) as running:
        yield running


@contextmanager
def _boot(this: Run, plan: ServePlan, purpose: str) -> Iterator[Running]:
    """One boot with the suite's shapes exercised; its record and log are kept, and a faulty one stops the run."""
    expected_s = EXPECTED_BOOT_S[compile_cache.state(Path(plan.cache_dir))]
    running: Running | None = None
    try:
        with ExitStack() as server:
            server.enter_context(devices.clear(this.inputs.experiment.box))
            with this.progress.stage(f"{purpose} boot of {plan.variant}", expected_s):
                running = server.enter_context(serving(plan, this.inputs.experiment.engine, purpose, this.inputs.state))
            _require_usable(running.boot)
            with this.progress.stage(f"exercise the suite's shapes on {plan.variant}") as stage:
                bench.run(warm(running.target, this.suite.benches, this.context(stage.advance)))
            yield running
    finally:
        if running is not None:
            this.boots.append(running.boot)
            this.log.log_file(Path(running.boot.log_path), f"boots/{running.boot.nonce}-{purpose}/server.log")
            this.log.log_json(f"boots/{running.boot.nonce}-{purpose}/boot.json", to_jsonable(running.boot))


def _require_usable(boot: Boot) -> None:
    if boot.status != "ok":
        raise InvalidMeasurement(f"boot {boot.nonce} is INVALID: {boot.reasons[0]}", "\n".join(boot.reasons[1:]))


def _conclude(this: Run) -> tuple[dict[str, Any], int]:
    """Judge, record and end the run; returns its record and the exit status: both say what the report says."""
    from orchestrator import report

    boot = this.boots[-1]
    if boot.status == "ok":
        this.log.log_metrics(_boot_metrics(boot))
    else:
        this.measurements = [_unusable(found, boot) for found in this.measurements]
    for found in this.measurements:
        this.log.log_measurement(found)
    by_bench = {found.bench: found for found in this.measurements}
    if "betterbench" in by_bench:
        shaped = betterbench_file.results(by_bench["betterbench"], by_bench.get("prefill"), this.plan.served_model)
        this.log.log_json("files/betterbench/results.json", shaped)
    record = {
        "run_id": this.log.run_id,
        "plan": to_jsonable(this.plan),
        "boots": this.boots,
        "measurements": this.measurements,
    }
    state, reasons = report.verdict(record)
    this.log.log_text("report.html", report.render(record))
    this.log.set_tag("verdict", report.VERDICTS[state])
    this.log.finish("FINISHED", "; ".join(reasons))
    return record, EXIT[state]


def _unusable(measurement: Measurement, boot: Boot) -> Measurement:
    """The measurement of an invalid boot: no numbers, whatever it found."""
    reasons = [f"boot {boot.nonce}: {boot.reasons[0]}", *([measurement.reason] if measurement.reason else [])]
    return replace(measurement, status="invalid", reason="; ".join(reasons), metrics={})


def _show(record: dict[str, Any], tracker: Any) -> None:
    """Print the result. A reader that left, as in `| true`, changes nothing about the run."""
    from orchestrator import table
    from orchestrator.tracking import ui_command

    try:
        table.show(record)
        print(f"MLflow run {record['run_id']}; open the UI with:\n  {ui_command(tracker.directory)}", flush=True)
    except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails when it flushes at its end


def _boot_metrics(boot: Boot) -> dict[str, float]:
    found = {
        "boot.ready_s": boot.boot_s,
        "boot.kv_tokens": boot.kv_tokens,
        "boot.rss_peak_bytes": boot.rss_peak_bytes,
        "boot.compiled_files": boot.compiled_files,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
