"""From what a person or a client asks for to a job that can be queued: checked, and with how long it is to take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from orchestrator import config, owner
from orchestrator.abtest.design import ARMS, BOOTS_PER_BLOCK
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.progress import span
from orchestrator.schedule import policy
from orchestrator.schedule.job import Job
from orchestrator.schedule.queue import dependency
from orchestrator.schema import ABTest

OWN = ("window", "zone", "schedule", "priority", "after", "key")  # words of the queue, beside those of `ab`


def job(words: Sequence[str], by: str = "") -> Job:
    """The job of words such as `+experiment=zpe box=r9700x2 window="01:00-06:30" priority=2 after=17:PASS`.

    Raises UsageError for all that can be known to be wrong now, the A/B's own configuration included. Nothing is
    started, and no file but the configuration is read.
    """
    return _checked(words, by)[0]


def timed(words: Sequence[str], by: str = "", differing: bool = False) -> tuple[Job, str]:
    """`with_duration` of `job`, whose configuration is composed once for both; with `differing`, `require_differing`
    too."""
    made, test = _checked(words, by)
    if differing:
        require_differing(test)
    return _timed(made, test)


def _checked(words: Sequence[str], by: str) -> tuple[Job, ABTest]:
    own = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.partition("=")[0] in OWN}
    rest = tuple(word for word in words if word.partition("=")[0] not in OWN)
    test = config.load_ab(rest)
    if not any(word.startswith("box=") for word in rest):
        rest = (*rest, f"box={test.box.name}")
    if not Path(test.paths.tracking).is_absolute():  # the scheduler works in another directory
        kept = (word for word in rest if not word.startswith("paths.tracking="))
        rest = (*kept, f"paths.tracking={Path(test.paths.tracking).resolve()}")
    name = own.get("schedule", "nightly")
    policy.of(name, own.get("window", ""), own.get("zone", "")).hours()
    try:
        priority = int(own.get("priority", "0"))
    except ValueError:
        raise UsageError(f"priority={own['priority']}: write a whole number; the highest runs first") from None
    if not -(2**31) <= priority < 2**31:
        raise UsageError(f"priority={priority}: write a smaller number")
    needed = tuple(filter(None, own.get("after", "").split(",")))
    for text in needed:
        dependency(text)
    made = Job(
        overrides=rest,
        box=test.box.name,
        schedule=name,
        window=own.get("window", ""),
        zone=own.get("zone", ""),
        priority=priority,
        depends_on=needed,
        idempotency_key=own.get("key") or None,
        by=by or owner.user(),
    )
    return made, test


def require_comparable(asked: Job) -> None:
    """Raises InvalidMeasurement for arms that differ in nothing, or in what their gate does not declare.

    As far as this machine can tell: one that lacks what a plan is made of leaves it to the box.
    """
    from orchestrator.abtest import ab_run

    test = config.load_ab(asked.overrides)
    if test.sweep:
        return
    with suppress(UsageError):
        ab_run.require_comparable(test, ab_run.gathered(test))


def require_differing(test: ABTest) -> None:
    """Raises UsageError for arms that differ in nothing, or in what their gate does not declare, by the declaration
    alone: both are planned for one made-up machine, and nothing of this one is looked at."""
    from orchestrator.abtest import ab_run, sweep
    from orchestrator.inputs import Inputs
    from orchestrator.plugin_build import PluginBuild
    from orchestrator.stack import Stack

    build, stack, nowhere = PluginBuild("0", "0" * 64, "0" * 64, "/nowhere"), Stack({}, ""), Path("/nowhere")
    pairs = [sweep.pair(test, test.sweep.values[0], value) for value in test.sweep.values[1:]] if test.sweep else [test]
    for pair in pairs:
        arms = {name: Inputs(pair.arm(name), nowhere, nowhere, build, stack, "") for name in ARMS}
        try:
            ab_run.require_comparable(pair, arms)
        except InvalidMeasurement as error:
            raise UsageError(str(error)) from None


def with_duration(asked: Job) -> tuple[Job, str]:
    """The job with what its boots are expected to take, and where that is known from."""
    return _timed(asked, config.load_ab(asked.overrides))


def _timed(asked: Job, test: ABTest) -> tuple[Job, str]:
    from orchestrator.abtest import hours, sweep

    if test.sweep:
        sweep.pair(test, *test.sweep.values[:2])  # raises for a key that the variant has not
    seconds, basis = hours.on_box(Path(test.paths.tracking), test.box.name, test.suite)
    pairs = len(test.sweep.values) - 1 if test.sweep else 1
    boots = pairs * BOOTS_PER_BLOCK * test.gate.looks[-1]
    made = replace(asked, boot_s=seconds, boots_left=boots)
    _require_fit(made, basis)
    return made, basis


def _require_fit(made: Job, basis: str) -> None:
    """Raises UsageError for a job of which no boot would ever be started: not even one ends inside its window."""
    rules = policy.of(made.schedule, made.window, made.zone)
    usable_s = rules.usable_s(rules.hours().at(datetime.now(UTC)))
    if rules.margin * made.boot_s > usable_s:
        raise UsageError(
            f"window: {rules.hours()} has {span(max(0.0, usable_s))} for boots, as prod comes back "
            f"{rules.return_min:g} min before its end, and one takes about {span(made.boot_s)}, times {rules.margin:g} "
            f"({basis}); choose a longer window"
        )
