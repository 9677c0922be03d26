"""The boots of an A/B as they are recorded, and what follows from them: the next boot to make, or the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.abtest import hours
from orchestrator.abtest.design import BOOTS_PER_BLOCK, Arm, Design, Hours, Slot
from orchestrator.errors import UsageError
from orchestrator.judging import gate
from orchestrator.judging.gate import BootResult
from orchestrator.judging.verdict import Verdict, judge
from orchestrator.plan import ServePlan
from orchestrator.recorded import catalog
from orchestrator.recorded.catalog import Entry
from orchestrator.records import Boot, from_jsonable, to_jsonable

TRIES = 2  # of a boot that is at fault; then the A/B is INVALID
DESIGN, VERDICT = "ab.json", "verdict.json"  # artifacts of the A/B's own run
NOT_READY = "not_ready"  # its tag where no boot could be made


@dataclass(frozen=True)
class Attempt:
    """One boot that was begun, as recorded. It is "finished" only where every part of it is there and usable."""

    slot: Slot
    run_id: str
    state: Literal["finished", "faulty", "cut off"]
    result: BootResult | None  # None where it was cut off
    took_s: float | None = None  # its whole run; None where it has not ended


def settled(design: Design, attempts: Sequence[Attempt], not_ready: str = "") -> Verdict | None:
    """The verdict, where no further boot is to be made; None where one is.

    The gate is asked after every whole block; PASS and FAIL end the A/B at its declared looks only, INVALID anywhere.
    A floor has all its blocks: what it measures is worth more with every boot.
    """
    gate = design.test.gate
    if not_ready:
        return Verdict("INVALID", (f"no boot could be made: {not_ready}",), (), gate.name, 0, None)
    finished = [found.result for found in attempts if found.state == "finished"]
    faults = [found for found in attempts if found.state == "faulty"]
    following = next_slot(design, attempts)
    spoiled = [found for found in faults if found.slot == following]
    if len(spoiled) >= TRIES:
        last = spoiled[-1]
        verdict = judge(gate, [*finished, last.result], design.floors, hours_per_boot=revised(design, attempts).mean)
        reason = f"{last.slot} was at fault {len(spoiled)} times: {fault_of(last.result)}"
        return replace(verdict, state="INVALID", reasons=(reason, *verdict.reasons))
    if not finished or len(finished) % BOOTS_PER_BLOCK:
        return None
    verdict = judge(gate, finished, design.floors, hours_per_boot=revised(design, attempts).mean)
    blocks = len(finished) // BOOTS_PER_BLOCK
    decided = verdict.state in ("PASS", "FAIL") and blocks in gate.looks and design.test.kind == "ab"
    return verdict if decided or verdict.state == "INVALID" or following is None else None


def recomputed(directory: Path, entry: Entry) -> Verdict:
    """The verdict of a recorded A/B, from its records alone; one that is not done is judged as far as it is."""
    design = read_design(entry)
    found = read(directory, entry.run_id, design)
    return settled(design, found, entry.tags.get(NOT_READY, "")) or so_far(design, found)


def so_far(design: Design, attempts: Sequence[Attempt]) -> Verdict:
    """What the gate says of the whole blocks of an A/B that is not done: never more than INCONCLUSIVE."""
    finished = [found.result for found in attempts if found.state == "finished"]
    whole = finished[: len(finished) - len(finished) % BOOTS_PER_BLOCK]
    reason = f"not done: {len(finished)} of at most {len(design.order)} boots are there"
    if not whole:
        return Verdict("INCONCLUSIVE", (reason,), (), design.test.gate.name, 0, None, design.test.gate.looks[0])
    verdict = judge(design.test.gate, whole, design.floors, hours_per_boot=revised(design, attempts).mean)
    state = verdict.state if verdict.state == "INVALID" else "INCONCLUSIVE"
    return replace(verdict, state=state, reasons=(reason, *verdict.reasons))


def revised(design: Design, attempts: Sequence[Attempt]) -> Hours:
    """What a boot takes, by those of this A/B that are finished."""
    taken: dict[Arm, list[float]] = {}
    for found in attempts:
        if found.state == "finished" and found.took_s:
            taken.setdefault(found.slot.arm, []).append(found.took_s / 3600)
    return hours.revised(design.hours, taken)


def next_slot(design: Design, attempts: Sequence[Attempt]) -> Slot | None:
    """The first boot of the order that is not finished."""
    return next(iter(pending(design, attempts)), None)


def pending(design: Design, attempts: Sequence[Attempt]) -> list[Slot]:
    """The boots of the order that are not finished: as many are made at most."""
    done = {found.slot for found in attempts if found.state == "finished"}
    return [slot for slot in design.order if slot not in done]


def fault_of(result: BootResult) -> str:
    """Why a faulty boot may not be used."""
    reasons = [*result.boot.reasons, *(m.reason for m in result.measurements.values() if m.status != "ok")]
    return reasons[0] if reasons else "it ended without a usable record"


def read(directory: Path, run_id: str, design: Design, known: Mapping[str, Attempt] | None = None) -> list[Attempt]:
    """The boots of the A/B as recorded, oldest first. `known` are those that need not be read again."""
    found = []
    for entry in reversed(catalog.entries(directory, parent=run_id)):
        if entry.tags.get("kind") == "boot":
            earlier = (known or {}).get(entry.run_id)
            found.append(earlier if earlier and earlier.state == _state(entry) else of_entry(entry, design))
    return found


def read_design(entry: Entry) -> Design:
    """The design of an A/B. Raises UsageError where the run is none, or was killed before it had one."""
    if not entry.is_ab:
        raise UsageError(f"run {entry.run_id} is no A/B; `python -m orchestrator list` shows which are")
    if not (entry.artifacts / DESIGN).exists():
        raise UsageError(f"run {entry.run_id} was ended before its first boot was planned; start the A/B again")
    try:
        made = from_jsonable(Design, catalog.read_json(entry.artifacts / DESIGN))
        gate.check(made.test.gate, "gate")
    except (ValueError, UsageError) as error:
        raise UsageError(f"{entry.artifacts / DESIGN}: not the design of an A/B of this version: {error}") from None
    return made


def _state(entry: Entry) -> Literal["finished", "faulty", "cut off"]:
    """MLflow's FINISHED is set last and at once, so that it can stand for a whole record."""
    if entry.status == "FINISHED":
        return "finished" if entry.tags.get("verdict") == "OK" else "faulty"
    return "faulty" if entry.tags.get("ab.attempt") == "faulty" else "cut off"


def of_entry(entry: Entry, design: Design) -> Attempt:
    """The boot in a nested run. Raises UsageError, naming the file, where its record is damaged."""
    tags, state = entry.tags, _state(entry)
    try:
        slot = Slot(int(tags["ab.block"]), int(tags["ab.position"]), tags["ab.arm"])
    except (KeyError, ValueError):
        raise UsageError(
            f"run {entry.run_id}: its tags ab.block, ab.position and ab.arm do not say which boot it is; restore them"
        ) from None
    if state == "cut off":
        return Attempt(slot, entry.run_id, state, None)
    plan_path = entry.artifacts / "plan.json"
    boot = catalog.measured_boot(entry.artifacts)
    if state == "finished":
        plan = _plan(plan_path)
        if boot is None:
            raise UsageError(f"{entry.artifacts}: the record of the boot is gone; restore it, or start the A/B again")
    else:
        plan = _plan(plan_path) if plan_path.exists() else to_jsonable(design.plans[slot.arm])
        boot = boot or _never_up(entry, design.plans[slot.arm].fingerprint)
    measured = catalog.measurements(entry.artifacts)
    result = BootResult(slot.arm, slot.block, slot.position, entry.run_id, plan, boot, measured)
    took_s = None if entry.ended_s is None else entry.ended_s - entry.started_s
    return Attempt(slot, entry.run_id, state, result, took_s)


def _plan(path: Path) -> Mapping[str, Any]:
    """`to_jsonable(ServePlan)`, as it was recorded. Raises UsageError where the file holds no plan."""
    data = catalog.read_json(path)
    try:
        from_jsonable(ServePlan, data)
    except ValueError as error:
        raise UsageError(f"{path}: the record is damaged: {error}") from None
    return data


def _never_up(entry: Entry, plan_fingerprint: str) -> Boot:
    """The boot of a server that did not come up, of which there is no more than the reason."""
    return Boot(
        nonce="",
        purpose="measured",
        plan_fingerprint=plan_fingerprint,
        cache_state="warm",
        started_at_utc="",
        status="invalid",
        reasons=(entry.tags.get("end_reason", "the server did not come up"),),
    )
