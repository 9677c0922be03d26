"""The plan of an A/B for people, before its first boot: what is compared, in which order, how long, on which floors."""

from __future__ import annotations

from datetime import datetime

from orchestrator.abtest import arm_titles, hours
from orchestrator.abtest.design import BOOTS_PER_BLOCK, Design


def as_text(design: Design, now: datetime) -> str:
    """Lines for the terminal; hours that are no measurement are called estimated."""
    test, gate = design.test, design.test.gate
    titles = arm_titles.of(test)
    heading = f"A/A of {test.a.name}" if test.kind == "floor" else f"A/B of {titles['a']} (a) and {titles['b']} (b)"
    seed = f"seed {design.seed}" + (" (drawn)" if test.seed is None else "")
    lines = [f"{heading} on box {test.box.name}, gate {gate.name}, suite {test.suite.name}, {seed}"]
    if test.about:
        lines.append(f"  {test.about}")
    for block in range(gate.max_blocks):
        arms = " ".join(slot.arm for slot in design.order if slot.block == block)
        done = block + 1
        made = design.order[: BOOTS_PER_BLOCK * done]
        look = f"   look {gate.looks.index(done) + 1}: {len(made)} boots, " if done in gate.looks else ""
        lines.append(f"  block {done}  {arms}{look}{hours.text(design.hours.of(made)) if look else ''}".rstrip())
    lines.append(
        f"  at most {len(design.order)} boots, about {hours.text(design.hours.of(design.order))} "
        f"({design.hours.basis}; warm-up boots and checkpoints that are missing come on top)"
    )
    if test.kind == "ab":
        lines += [f"  {line}" for line in floor_lines(design, now)]
    return "\n".join(lines)


def floor_lines(design: Design, now: datetime) -> list[str]:
    """Which floors the gate has, and what of them is missing or old."""
    box, gate = design.test.box.name, design.test.gate
    remeasure = f"ab +variant@a=NAME +variant@b=NAME kind=floor box={box}"
    if not design.floors:
        return [
            f"floors: none of box {box} on this stack, so that only the boots of this A/B tell its noise, "
            f"and more of them are needed; to measure them: {remeasure}"
        ]
    ages = {name: floor.age_days(now.isoformat()) for name, floor in design.floors.items()}
    stale = sorted(name for name, age in ages.items() if age > gate.floor_max_age_days)
    lines = [f"floors: {len(ages) - len(stale)} metrics, the oldest of {max(ages.values()):.0f} days ago"]
    if stale:
        lines.append(
            f"floors of {len(stale)} metrics are older than {gate.floor_max_age_days:g} days and count for nothing, "
            f"for example {stale[0]}; to measure them again: {remeasure}"
        )
    return lines
