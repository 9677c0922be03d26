"""An A/B on a box: checked and planned, started or gone on with, its boots made for real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import config, console, measured_boot, owner, plan_text, prod
from orchestrator.abtest import arm_titles, attempts, design_text, hours
from orchestrator.abtest import design as designs
from orchestrator.abtest.ab import AB, EXIT
from orchestrator.abtest.design import ARMS, Arm, Design
from orchestrator.abtest.executor import Executor, OnTheBox
from orchestrator.abtest.shift import UNBOUND, Shift
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.inputs import Inputs, gather
from orchestrator.judging import arms, floors, verdict_text
from orchestrator.judging.gate import BootResult, Gate
from orchestrator.judging.verdict import Verdict
from orchestrator.labels import WORDS
from orchestrator.plan import ServePlan
from orchestrator.progress import Progress
from orchestrator.recorded import catalog, identity
from orchestrator.recorded.catalog import Entry
from orchestrator.records import Boot, to_jsonable
from orchestrator.schema import ABTest, Paths, Suite

if TYPE_CHECKING:
    from orchestrator.recorded.tracking import RunLog, Tracker

BENCH_OF = {  # the first word of a metric -> the bench that measures it
    "decode": "decode_ctx",
    "prefill": "prefill",
    "betterbench": "betterbench",
    "word_problems": "gsm8k",
    "gsm8k": "gsm8k",
    "kl": "kld",
    "acceptance": "acceptance",
    "greedy": "greedy",
    "battery": "battery",
}
OF_NO_BENCH = ("boot", "*")


@dataclass
class Site:
    """The box of an A/B, held, with prod to come back at its end."""

    tracker: Tracker
    progress: Progress
    prod_down: ExitStack
    overrides: Sequence[str]
    shift: Shift = UNBOUND


def start(test: ABTest, overrides: Sequence[str], quiet: bool = False, shift: Shift = UNBOUND) -> int:
    """Conduct the A/B; returns the exit status of its verdict.

    Raises UsageError before anything starts for what cannot be, and what `checked` raises.
    """
    inputs = checked(test)
    with site(test, inputs["a"], overrides, quiet, shift) as place:
        return EXIT[one(test, inputs, place).state]


def checked(test: ABTest) -> dict[Arm, Inputs]:
    """What both arms are made of, where they can be compared at all.

    Raises InvalidMeasurement for arms that differ in nothing, or in what the gate does not declare; it is found again
    in the records, but this costs no boot.
    """
    require_sound(test)
    inputs = {arm: measured_boot.checked(test.arm(arm)) for arm in ARMS}
    require_comparable(test, inputs)
    return inputs


def require_comparable(test: ABTest, inputs: Mapping[Arm, Inputs]) -> None:
    """Raises InvalidMeasurement where the plans may not be compared."""
    if found := plan_faults(test.gate, inputs):
        hint = "; to measure the box's noise say kind=floor" if found[0].startswith("plan:") else ""
        raise InvalidMeasurement(
            f"{test.a.name} and {test.b.name} cannot be compared: {found[0]}{hint}", "\n".join(found[1:])
        )


def require_sound(test: ABTest) -> None:
    """Raises UsageError for a gate that cannot judge this kind of A/B, or asks for what its suite does not measure."""
    if (test.gate.kind == "aa") != (test.kind == "floor"):
        raise UsageError(f"gate={test.gate.name} does not judge kind={test.kind}; choose another gate, or another kind")
    if test.gate.boots_per_block not in (None, designs.BOOTS_PER_BLOCK):
        raise UsageError(
            f"gate.boots_per_block: {test.gate.boots_per_block}; an A/B boots in blocks of {designs.BOOTS_PER_BLOCK}"
        )
    require_benches(test.gate, test.suite)


def gathered(test: ABTest) -> dict[Arm, Inputs]:
    """What both arms would be made of, compared or not, and whether or not all of it is here."""
    return {arm: gather(test.arm(arm)) for arm in ARMS}


def plan_faults(gate: Gate, inputs: Mapping[Arm, Inputs]) -> list[str]:
    """Why the plans may not be compared; what the plugin attests comes with the boots."""
    never_booted = Boot("", "measured", "", "warm", "")
    results = [
        BootResult(arm, 0, n, "", to_jsonable(inputs[arm].plan()), never_booted, {}) for n, arm in enumerate(ARMS)
    ]
    return [line for line in arms.faults(gate, results) if not line.startswith("attestation")]


def require_benches(gate: Gate, suite: Suite) -> None:
    """Raises UsageError where the suite does not measure what the gate must have."""
    for name, criterion in gate.criteria.items():
        first, *what = criterion.metric.split(".")
        bench = BENCH_OF.get(first)
        if bench is None and first not in OF_NO_BENCH:
            raise UsageError(
                f"{_metric_key(gate, name)}: {first} measures nothing; write {', '.join(BENCH_OF)} or boot"
            )
        if bench is not None and what and not any(".".join(what[: n + 1]) in WORDS for n in range(len(what))):
            raise UsageError(
                f"{_metric_key(gate, name)}: {criterion.metric} is no metric; docs/methodology.md names them"
            )
        if criterion.required and bench is not None and bench not in suite.benches:
            raise UsageError(
                f"gate={gate.name}: criterion {name} needs the bench {bench}, which suite {suite.name} has not; "
                "choose another suite"
            )


def _metric_key(gate: Gate, criterion: str) -> str:
    return f"gate={gate.name}: criteria.{criterion}.metric"


@contextmanager
def site(test: ABTest, inputs: Inputs, overrides: Sequence[str], quiet: bool, shift: Shift = UNBOUND) -> Iterator[Site]:
    """Hold the box, for as many A/Bs as the block has; prod comes back at its end."""
    progress = Progress(quiet=quiet)
    titles = arm_titles.of(test)
    purpose = f"A/B of {titles['a']} and {titles['b']}"
    boots = designs.BOOTS_PER_BLOCK * test.gate.looks[-1]
    expected_s = boots * measured_boot.warm_boot_s(test.suite)
    with measured_boot.on_the_box(inputs, purpose, overrides, progress, expected_s), ExitStack() as prod_down:
        from orchestrator.recorded.tracking import Tracker

        prod.require_port(inputs.plan(), inputs.state)
        tracker = Tracker(Path(test.paths.tracking), test.box.name, test.paths.tracking_server, progress.note)
        for run_id in tracker.reap():
            progress.note(f"run {run_id} was killed; its record says KILLED now")
        yield Site(tracker, progress, prod_down, overrides, shift)


def one(test: ABTest, inputs: Mapping[Arm, Inputs], place: Site, parent: str | None = None) -> Verdict:
    """A new A/B, from its design to its verdict; `parent` is the run of the sweep that it belongs to."""
    made = plan(test, inputs)
    with console.to_a_reader_that_may_leave():
        print(design_text.as_text(made, datetime.now(UTC)), flush=True)
    executor = _executor(made, inputs, place)
    tags = _tags(made, {arm: executor.tags(arm) for arm in ARMS}, place.overrides) | dict(place.shift.tags)
    log = place.tracker.start(" | ".join(arm_titles.of(test).values()), _params(made), tags, parent)
    log.log_json(attempts.DESIGN, to_jsonable(made))
    log.publish()  # with its design there, another box can go on with it
    return _conduct(made, executor, place, log, inputs["a"].state)


def plan(test: ABTest, inputs: Mapping[Arm, Inputs]) -> Design:
    """All that is decided before the first boot."""
    plans = {arm: found.plan() for arm, found in inputs.items()}
    seed = designs.draw_seed() if test.seed is None else test.seed
    return Design(
        test=test,
        seed=seed,
        order=designs.order(seed, test.gate.max_blocks),
        plans=plans,
        floors=floors.load(inputs["a"].state, test.box.name, inputs["a"].stack.fingerprint),
        hours=hours.expected(Path(test.paths.tracking), plans, test.suite),
    )


def resume(entry: Entry, paths: Paths, overrides: Sequence[str], quiet: bool = False, shift: Shift = UNBOUND) -> int:
    """Go on with an A/B that ended before its verdict; one that has its verdict shows it.

    Raises UsageError where it still runs, or where its servers would not be those that it began with.
    """
    made = attempts.read_design(entry)
    if entry.status == "FINISHED":
        verdict = attempts.recomputed(Path(paths.tracking), entry)
        verdict_text.show(verdict, made, entry.run_id)
        return EXIT[verdict.state]
    require_ended(entry)
    made = replace(made, test=replace(made.test, paths=paths))
    inputs = checked(made.test)
    _require_same(made, {arm: found.plan() for arm, found in inputs.items()})
    with site(made.test, inputs["a"], overrides, quiet, shift) as place:
        return EXIT[go_on(entry, made, inputs, place).state]


def go_on(entry: Entry, made: Design, inputs: Mapping[Arm, Inputs], place: Site) -> Verdict:
    """The rest of an A/B. What was cut off keeps its record, marked as such, and is done again."""
    log = place.tracker.resume(entry.run_id)
    found = attempts.read(place.tracker.directory, entry.run_id, made)
    status = {boot.run_id: boot.status for boot in catalog.entries(place.tracker.directory, parent=entry.run_id)}
    for attempt in found:
        if attempt.state == "cut off":
            cut = place.tracker.log(attempt.run_id)
            cut.set_tag("ab.attempt", "cut off")
            if status[attempt.run_id] == "RUNNING":
                cut.finish("KILLED")
    finished = sum(attempt.state == "finished" for attempt in found)
    place.progress.note(f"A/B {entry.run_id} goes on: {finished} of at most {len(made.order)} boots are there")
    return _conduct(made, _executor(made, inputs, place), place, log, inputs["a"].state)


def require_ended(entry: Entry) -> None:
    """Raises UsageError where the process of the run is alive."""
    holder = owner.from_tags(entry.tags)
    if entry.status == "RUNNING" and holder is not None and holder.alive():
        raise UsageError(f"run {entry.run_id} is still at work in process {holder.pid} on {holder.host}; wait for it")


def _executor(made: Design, inputs: Mapping[Arm, Inputs], place: Site) -> Executor:
    detected = config.box_was_detected(place.overrides)
    return OnTheBox(inputs, made.plans, place.progress, detected, place.prod_down, arm_titles.of(made.test))


def _conduct(made: Design, executor: Executor, place: Site, log: RunLog, state: Path) -> Verdict:
    verdict = AB(made, place.tracker, log, executor, place.progress, state, place.shift).conduct()
    verdict_text.show(verdict, made, log.run_id)
    return verdict


def _require_same(made: Design, now: Mapping[Arm, ServePlan]) -> None:
    for arm in ARMS:
        if now[arm].fingerprint != made.plans[arm].fingerprint:
            changed = plan_text.differences(made.plans[arm], now[arm])
            (field_name, (was, is_now)) = next(iter(changed.items()))
            raise UsageError(
                f"arm {arm} is not the server that this A/B began with: {field_name} was {was}, and is {is_now} now; "
                "undo the change, or start a new A/B"
            )


def _params(made: Design) -> dict[str, str]:
    test = made.test
    parts = {"a": test.a, "b": test.b, "gate": test.gate, "suite": test.suite, "box": test.box, "engine": test.engine}
    return identity.flat({name: to_jsonable(part) for name, part in parts.items()})


def _tags(made: Design, of_boots: Mapping[Arm, Mapping[str, str]], overrides: Sequence[str]) -> dict[str, str]:
    """What A/Bs are searched by; `of_boots` are the tags of a boot of each arm."""
    test = made.test
    shared = ("box", "box_chosen_by", "engine", "suite", "suite_digest", "stack", "plugin", "source", "git")
    of_a, of_b = of_boots["a"], of_boots["b"]
    own = ("weights", "activation", "spec", "drafter", "image")  # one value, or "A | B"
    return {
        **{name: of_a[name] for name in shared if name in of_a},
        **{name: " | ".join(dict.fromkeys((of_a[name], of_b[name]))) for name in own if name in of_a and name in of_b},
        "kind": test.kind,
        "gate": test.gate.name,
        "about": test.about,
        "seed": str(made.seed),
        "order": "".join(slot.arm for slot in made.order),
        "variant_a": test.a.name,
        "variant_b": test.b.name,
        "overrides": " ".join(overrides),
    }
