"""Criteria on metrics with one number a boot: superior, non_inferior and equivalent by the moderated paired t."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.judging.comparison import (
    BOOTS_PER_BLOCK,
    POWER,
    Compared,
    CriterionResult,
    Look,
    benefit_state,
    percent,
    relative,
    said_interval,
    settled_by,
    signed,
    would_settle,
)
from orchestrator.stats import paired
from orchestrator.stats.floor import Floor
from orchestrator.stats.power import blocks_needed


def numbers(compared: Compared, look: Look) -> CriterionResult:
    """superior, non_inferior and equivalent, of a metric with one number above zero on each boot."""
    criterion = compared.criterion
    values = compared.values()
    if bad := [(v, b) for v, b in zip(values, compared.boots, strict=True) if not (math.isfinite(v) and v > 0)]:
        value, boot = bad[0]
        return compared.result(
            "INVALID", "relative", f"{value:g} on boot {boot.run_id}, where only numbers above 0 count"
        )
    floor, note = floor_for(compared, look)
    where = compared.layout()
    if where is None:
        return _undecided(compared, look, "no block has boots of both arms", note)
    found = paired.estimate(
        [math.log(value) for value in values],
        where,
        floor.sd_between_log if floor else None,
        floor.dof if floor else 0.0,
    )
    if found is None:
        said = "one boot an arm and no floor, so nothing says how much a boot varies"
        return _undecided(compared, look, said, note)
    if found.contradicts:
        note = (
            f"the boots spread by {percent(found.own_sd)}, the floor's by {percent(floor.sd_between_log)}: "
            "the floor is left aside"
        )
    low, high = found.interval(look.confidence)
    state, distance, wanted = benefit_state(criterion, found.effect, (low, high))
    result = compared.result(
        state,
        "relative",
        "",
        effect=relative(found.effect),
        interval=(relative(low), relative(high)),
        confidence=look.confidence,
        floor_used=found.borrowed,
        floor_note=note,
    )
    if state == "INCONCLUSIVE":
        blocks = len({boot.block for boot in compared.boots})
        prior = floor.dof if floor and found.borrowed else 0.0
        needed = blocks_needed(distance, found.sd, prior, look.last_level, POWER, blocks + 1)
        result = settled_by(result, needed, blocks, look)
        result = replace(result, missing=would_settle(result))
    return replace(result, sentence=_sentence(result, wanted, found))


NEWER_DAYS = 1.0  # by which a floor may seem newer than the boots that it is used for


def floor_for(compared: Compared, look: Look) -> tuple[Floor | None, str]:
    """(the floor that may be used, or None; which it is, or why none)."""
    floor = look.floors.get(compared.metric)
    if floor is None:
        return None, "no floor was measured, so the boots' own spread alone counts"
    plan = compared.boots[0].plan
    for field, have, want in (("box", floor.box, plan["box"]), ("stack", floor.stack, plan["stack"]["fingerprint"])):
        if have != want:
            return None, f"the floor is of {field} {have}, the boots of {want}: left aside"
    if floor.dof <= 0:
        return None, "the floor has no degrees of freedom: left aside"
    age = floor.age_days(max(boot.boot.started_at_utc for boot in compared.boots))
    if not -NEWER_DAYS <= age <= look.gate.floor_max_age_days:
        limit = look.gate.floor_max_age_days
        if age < 0:
            return None, f"the floor is {-age:.0f} days newer than the boots: left aside, look at the clock"
        return None, f"the floor is {age:.0f} days old, the gate takes {limit:g}: left aside, measure it again"
    return floor, f"floor {percent(floor.sd_between_log)} ({floor.dof:g} dof)"


def _undecided(compared: Compared, look: Look, why: str, note: str) -> CriterionResult:
    boots = look.gate.boots_per_block or BOOTS_PER_BLOCK
    hours = None if look.hours_per_boot is None else boots * look.hours_per_boot
    missing = f"measure a floor, or make another block of {boots} boots"
    return compared.result(
        "INCONCLUSIVE", "relative", f"{why}; {note}; {missing}", floor_note=note, more_boots=boots, more_hours=hours,
        missing=missing,
    )  # fmt: skip


def _sentence(result: CriterionResult, wanted: str, found: paired.Estimate) -> str:
    interval = said_interval(result.confidence or 0.0, result.interval or (0.0, 0.0), signed, "boots")
    said = (
        f"{result.metric}: B is {signed(result.effect or 0.0)} against A ({interval}; "
        f"{result.boots_a} + {result.boots_b} boots; "
        f"boot SD {percent(found.sd)} on {found.dof:g} dof; {result.floor_note}); {wanted}"
    )
    return said if result.state != "INCONCLUSIVE" else f"{said}; {result.missing}"
