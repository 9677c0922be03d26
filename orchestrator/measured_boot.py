"""One measured boot and all that it needs: checkpoint, KL reference, warm cache, suite, record. It judges no number."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator import (
    bench,
    box_load,
    compile_cache,
    config,
    devices,
    foreign_load,
    interrupts,
    journal,
    labels,
    lease,
    plugin_build,
    prepare,
    reference,
)
from orchestrator.bench import betterbench_file, kld
from orchestrator.bench.context import BenchContext
from orchestrator.bench.warm import warm
from orchestrator.boot import Running, serving
from orchestrator.errors import BootError, InvalidMeasurement, UsageError
from orchestrator.expectation import announced, known
from orchestrator.inputs import Inputs, gather, require_present
from orchestrator.plan import ServePlan
from orchestrator.progress import Progress
from orchestrator.records import Boot, Measurement, to_jsonable
from orchestrator.reference import Reference
from orchestrator.schema import Experiment, Suite

EXPECTED_BOOT_S = {"cold": 90.0, "warm": 55.0}  # of a small CPU box, until the server is ready
EXPECTED_STOP_S = 15.0


@dataclass
class Session:
    """What one measured boot, and the boots that it needs, have so far."""

    inputs: Inputs
    plan: ServePlan
    progress: Progress
    log: Any  # tracking.RunLog
    called: str = ""  # what tells it from others of its variant; the variant's name where nothing has to
    boots: list[Boot] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.called or self.plan.variant

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


def checked(experiment: Experiment) -> Inputs:
    """What the run is made of. Raises UsageError for all that can be known to be wrong before anything starts."""
    inputs = gather(experiment)
    require_present(inputs.plan())
    if not experiment.suite.benches:
        raise UsageError(
            f"suite.benches: suite {experiment.suite.name} has no bench left, so nothing would be measured"
        )
    bench.require_suite(experiment.suite.benches, known(inputs))
    return inputs


def expected_s(inputs: Inputs) -> float:
    """About how long a run takes: a warm-up where the cache is cold, and the measured boot."""
    cold = compile_cache.state(Path(inputs.plan().cache_dir)) == "cold"
    return warm_boot_s(inputs.experiment.suite) + (EXPECTED_BOOT_S["cold"] if cold else 0)


def warm_boot_s(suite: Suite) -> float:
    """About how long a warm boot takes with its suite, as the benches expect of a small CPU box."""
    benches_s = sum(bench.expected_s(name, raw) for name, raw in suite.benches.items())
    return EXPECTED_BOOT_S["warm"] + benches_s + EXPECTED_STOP_S


@contextmanager
def on_the_box(
    inputs: Inputs, purpose: str, overrides: Sequence[str], progress: Progress, expected_s: float | None = None
) -> Iterator[None]:
    """Hold the box for `purpose` and about `expected_s`, what an earlier kill left ended, and room on its disk."""
    box = inputs.experiment.box
    if config.box_was_detected(overrides):
        progress.note(f"box=auto: this machine is taken as {box.name}")
    with lease.hold(box.name, purpose, inputs.state, expected_s):
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
def recorded(session: Session) -> Iterator[None]:
    """Whatever ends the run is in its record."""
    try:
        yield
    except KeyboardInterrupt:
        with interrupts.once(held=True):
            session.log.finish("KILLED", "interrupted")
        raise
    except BaseException as error:
        keep_log(session.log, error)
        session.log.set_tag("verdict", "INVALID" if isinstance(error, InvalidMeasurement) else "FAILED")
        session.log.finish("FAILED", str(error))
        raise


def keep_log(log: Any, error: BaseException) -> None:
    """The log of a server that did not come up, in the run `log`."""
    if isinstance(error, BootError) and error.log_path:
        log.log_file(error.log_path, f"boots/{error.log_path.parent.name}-failed/server.log")


def make_checkpoints(inputs: Inputs, progress: Progress) -> list[str]:
    """The checkpoints of the variant and of its reference, and the plugin; returns the names of what was made."""
    plugin_build.materialize(inputs.plugin, inputs.cache)
    wanted = inputs.checkpoint(inputs.experiment.variant.weights)
    return prepare.ensure(inputs.experiment, inputs.checkpoint(inputs.reference_variant().weights), wanted, progress)


def make_ready(session: Session) -> None:
    """All that a measured boot needs: the KL reference, and a warm compile cache. Nothing is measured."""
    if "kld" in session.suite.benches:
        _reference(session)
        if _made_reference(session):  # the other arm of an A/B finds it there, and has the same record
            session.log.set_tag("kl_reference", "made")
    _warm_up(session, session.plan)


def measure(session: Session) -> None:
    """Boot the plan on a warm cache and run the suite. Raises BootError, or InvalidMeasurement for an unusable boot."""
    kl_reference = None
    if "kld" in session.suite.benches:
        kl_reference = _reference(session)
        session.log.set_tag("kl_reference", "made" if _made_reference(session) else "reused")
    with box_load.sampled(session.log.log_box_load), _warm_serving(session, session.plan, "measured") as running:
        watch = foreign_load.Watch((os.getpid(), running.pid) if running.pid else ())
        expected = announced(
            session.suite, session.title, running.target, session.context(), session.progress, session.log
        )
        for name in (name for name in bench.REGISTRY if name in session.suite.benches):
            raw = session.suite.benches[name]
            label = f"{labels.bench_name(name, raw)} on {session.title}"
            with session.progress.stage(label, expected[name]) as stage, watch.during(name):
                context = session.context(stage.advance, kl_reference)
                measurement = bench.run(bench.measure_one(name, running.target, raw, context))
            session.measurements.append(measurement)
            # The samples are safe at once; numbers follow when the boot has ended and is known to be valid.
            session.log.log_measurement(replace(measurement, metrics={}))
        running.boot = replace(running.boot, other_cpu_share=watch.share)
        if line := watch.note(session.title):
            session.progress.note(line)


def _reference(session: Session) -> Reference:
    """The KL reference of this stack: the stored one, or one made now on a boot of its own."""
    params = bench.params_of("kld", session.suite.benches["kld"])
    key = kld.reference_key(params, session.context())
    fingerprint = session.inputs.stack.fingerprint
    found = reference.load(session.inputs.cache, fingerprint, key)
    if found is not None:
        return found
    require_present(session.inputs.reference_plan())
    session.progress.note(f"no KL reference for stack {fingerprint} and these corpora yet: making it on a bf16 boot")
    expected_s = 2 * bench.expected_s("kld", session.suite.benches["kld"])
    with (
        _warm_serving(session, session.inputs.reference_plan(), "reference") as running,
        session.progress.stage("score the KL reference, twice", expected_s) as stage,
    ):
        made = bench.run(kld.collect(running.target, params, session.context(stage.advance)))
    _require_usable(session.boots[-1])
    reference.save(session.inputs.cache, fingerprint, key, made)
    return made


def _made_reference(session: Session) -> bool:
    return any(boot.purpose == "reference" for boot in session.boots)


@contextmanager
def _warm_serving(session: Session, plan: ServePlan, purpose: str) -> Iterator[Running]:
    _warm_up(session, plan)
    with _boot(session, plan, purpose) as running:
        yield running


def _warm_up(session: Session, plan: ServePlan) -> None:
    """Where the plan's compile cache is cold, a boot that exercises the suite's shapes and is never measured."""
    cache_dir = Path(plan.cache_dir)
    if compile_cache.state(cache_dir) == "warm":
        return
    compile_cache.mark(cache_dir, "warming", plan.plugin.sha256)
    with _boot(session, plan, "warmup"):
        pass
    _require_usable(session.boots[-1])  # one that died did not compile all
    compile_cache.mark(cache_dir, "warm", plan.plugin.sha256)


@contextmanager
def _boot(session: Session, plan: ServePlan, purpose: str) -> Iterator[Running]:
    """One boot with the suite's shapes exercised; its record and log are kept, and a faulty one stops the run."""
    expected_s = EXPECTED_BOOT_S[compile_cache.state(Path(plan.cache_dir))]
    running: Running | None = None
    title = session.title if plan == session.plan else plan.variant
    try:
        with ExitStack() as server:
            server.enter_context(devices.clear(session.inputs.experiment.box))
            with session.progress.stage(f"{purpose} boot of {title}", expected_s):
                running = server.enter_context(
                    serving(plan, session.inputs.experiment.engine, purpose, session.inputs.state)
                )
            _require_usable(running.boot)
            with session.progress.stage(f"exercise the suite's shapes on {title}") as stage:
                bench.run(warm(running.target, session.suite.benches, session.context(stage.advance)))
            yield running
    finally:
        if running is not None:
            session.boots.append(running.boot)
            session.log.log_file(Path(running.boot.log_path), f"boots/{running.boot.nonce}-{purpose}/server.log")
            session.log.log_json(f"boots/{running.boot.nonce}-{purpose}/boot.json", to_jsonable(running.boot))


def _require_usable(boot: Boot) -> None:
    if boot.status != "ok":
        raise InvalidMeasurement(f"boot {boot.nonce} is INVALID: {boot.reasons[0]}", "\n".join(boot.reasons[1:]))


def conclude(session: Session) -> tuple[dict[str, Any], str]:
    """Judge, record and end the run; returns its record, and what `report.verdict` says of it."""
    from orchestrator.pages import report

    boot = session.boots[-1]
    if boot.status == "ok":
        session.log.log_metrics(_boot_metrics(boot))
    else:
        session.measurements = [_unusable(found, boot) for found in session.measurements]
    for found in session.measurements:
        session.log.log_measurement(found)
    by_bench = {found.bench: found for found in session.measurements}
    if "betterbench" in by_bench:
        shaped = betterbench_file.results(by_bench["betterbench"], by_bench.get("prefill"), session.plan.served_model)
        session.log.log_json("files/betterbench/results.json", shaped)
    record = {
        "run_id": session.log.run_id,
        "plan": to_jsonable(session.plan),
        "boots": session.boots,
        "measurements": session.measurements,
    }
    state, reasons = report.verdict(record)
    session.log.log_text("report.html", report.render(record))
    session.log.set_tag("verdict", report.VERDICTS[state])
    session.log.finish("FINISHED", "; ".join(reasons))
    return record, state


def _unusable(measurement: Measurement, boot: Boot) -> Measurement:
    """The measurement of an invalid boot: no numbers, whatever it found."""
    reasons = [f"boot {boot.nonce}: {boot.reasons[0]}", *([measurement.reason] if measurement.reason else [])]
    return replace(measurement, status="invalid", reason="; ".join(reasons), metrics={})


def _boot_metrics(boot: Boot) -> dict[str, float]:
    found = {
        "boot.ready_s": boot.boot_s,
        "boot.kv_tokens": boot.kv_tokens,
        "boot.rss_peak_bytes": boot.rss_peak_bytes,
        "boot.compiled_files": boot.compiled_files,
        "boot.other_cpu_share": boot.other_cpu_share,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
