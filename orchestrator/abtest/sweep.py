"""A sweep: values of one key of a variant, each of them an A/B against the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator import console, interrupts
from orchestrator.abtest import ab_run, attempts
from orchestrator.abtest.ab import EXIT
from orchestrator.abtest.shift import UNBOUND, Shift
from orchestrator.abtest.standing import resume_hint
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog, identity
from orchestrator.recorded.catalog import Entry
from orchestrator.records import from_jsonable, to_jsonable
from orchestrator.schema import ABTest, Paths, Variant

RECORD = "sweep.json"


def pair(test: ABTest, best: Any, value: Any) -> ABTest:
    """The A/B of one value against the best one. Every pair has its share of the gate's alpha (Bonferroni), so that
    the gate's alpha holds for the whole sweep. Raises UsageError for a key that the variant has not.
    """
    key, values = test.sweep.key, test.sweep.values
    return replace(
        test,
        a=_with(test.a, key, best),
        b=_with(test.b, key, value),
        gate=replace(test.gate, alpha=test.gate.alpha / (len(values) - 1)),
        about=f"{key}: is {value} better than {best}?",
        sweep=None,
    )


def checked(test: ABTest) -> None:
    """Raises UsageError for a sweep that is none, and whatever is wrong with any pair of its values."""
    values = test.sweep.values
    if len(values) < 2 or len(set(map(repr, values))) != len(values):
        raise UsageError(f"sweep.values: {list(values)}; write two values or more, each of them once")
    if test.kind != "ab":
        raise UsageError("sweep: a floor has one variant; leave the sweep out")
    for value in values[1:]:
        ab_run.checked(pair(test, values[0], value))


def start(test: ABTest, overrides: Sequence[str], quiet: bool = False, shift: Shift = UNBOUND) -> int:
    """Conduct the sweep; returns its exit status (see `outcome`)."""
    checked(test)
    first = ab_run.checked(pair(test, *test.sweep.values[:2]))["a"]
    with ab_run.site(test, first, overrides, quiet, shift) as place:
        tags = {
            **shift.tags,
            "kind": "sweep",
            "gate": test.gate.name,
            "about": test.about,
            "box": test.box.name,
            "source": "measured",
            "overrides": " ".join(overrides),
        }
        name = f"{test.a.name} {test.sweep.key} {', '.join(map(str, test.sweep.values))}"
        log = place.tracker.start(name, identity.flat({"sweep": to_jsonable(test.sweep)}), tags)
        log.log_json(RECORD, to_jsonable(test))
        log.publish()
        return _conduct(test, place, log)


def resume(entry: Entry, paths: Paths, overrides: Sequence[str], quiet: bool = False, shift: Shift = UNBOUND) -> int:
    """Go on with a sweep: its finished A/Bs stand, the one that was cut off goes on, the others follow."""
    if not (entry.artifacts / RECORD).exists():
        raise UsageError(f"run {entry.run_id} was ended before its first A/B was planned; start the sweep again")
    test = replace(from_jsonable(ABTest, catalog.read_json(entry.artifacts / RECORD)), paths=paths)
    if entry.status == "FINISHED":
        return _said(test, entry.tags["verdict"], entry.tags["best"], entry.run_id)
    ab_run.require_ended(entry)
    first = ab_run.checked(pair(test, *test.sweep.values[:2]))["a"]
    with ab_run.site(test, first, overrides, quiet, shift) as place:
        return _conduct(test, place, place.tracker.resume(entry.run_id))


def outcome(states: Sequence[str]) -> str:
    """The sweep's state by those of its A/Bs: INVALID where one is; PASS where a value beat the first one; FAIL where
    every other value was refuted; else INCONCLUSIVE."""
    if "INVALID" in states:
        return "INVALID"
    if "PASS" in states:
        return "PASS"
    return "FAIL" if set(states) == {"FAIL"} else "INCONCLUSIVE"


def _conduct(test: ABTest, place: ab_run.Site, log: Any) -> int:
    best, states = test.sweep.values[0], []
    try:
        for value in test.sweep.values[1:]:
            contest = pair(test, best, value)
            inputs = ab_run.checked(contest)
            if begun := _begun(place, log.run_id, contest):
                made = attempts.read_design(begun)
                verdict = (
                    attempts.recomputed(place.tracker.directory, begun)
                    if begun.status == "FINISHED"
                    else ab_run.go_on(begun, replace(made, test=contest), inputs, place)
                )
            else:
                verdict = ab_run.one(contest, inputs, place, parent=log.run_id)
            states.append(verdict.state)
            if verdict.state == "PASS":
                best = value
            if verdict.state == "INVALID":
                break
    except KeyboardInterrupt:
        with interrupts.once(held=True):
            log.finish("KILLED", "interrupted")
        place.progress.note(f"the whole sweep: {resume_hint(log.run_id)}")
        raise
    except BaseException as error:
        log.finish("FAILED", str(error))
        raise
    state = outcome(states)
    log.set_tag("verdict", state)
    log.set_tag("best", str(best))
    log.finish("FINISHED", f"the best {test.sweep.key} is {best}")
    return _said(test, state, str(best), log.run_id)


def _said(test: ABTest, state: str, best: str, run_id: str) -> int:
    values = ", ".join(map(str, test.sweep.values))
    with console.to_a_reader_that_may_leave():
        print(f"{state}  {test.sweep.key} = {best} is the best of {values} (run {run_id})", flush=True)
    return EXIT[state]


def _begun(place: ab_run.Site, run_id: str, contest: ABTest) -> Entry | None:
    """The A/B of this pair that an earlier process has begun, with its design recorded."""
    for entry in catalog.entries(place.tracker.directory, parent=run_id):
        if entry.tags.get("about") == contest.about and (entry.artifacts / attempts.DESIGN).exists():
            return entry
    return None


def _with(variant: Variant, key: str, value: Any) -> Variant:
    """The variant with the value at a dotted key, and named after it."""
    data = to_jsonable(variant)
    *above, last = key.split(".")
    inner = data
    for name in above:
        inner = inner.get(name) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or (last not in inner and above[:1] != ["knobs"]):
        raise UsageError(f"sweep.key: a variant has no {key}; write one such as speculation.tokens")
    inner[last] = value
    data["name"] = f"{variant.name}_{last}{value}"
    try:
        return from_jsonable(Variant, data)
    except ValueError as error:
        raise UsageError(f"sweep.values: {value!r}: {error}") from None
