"""What an A/B would need to decide: boots and hours for each criterion, from the box's floors. No boot is made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.abtest import hours
from orchestrator.abtest.design import BOOTS_PER_BLOCK, Design
from orchestrator.judging.gate import Criterion
from orchestrator.stats import looks
from orchestrator.stats.floor import Floor

if TYPE_CHECKING:
    from rich.table import Table

POWER = 0.8


@dataclass(frozen=True)
class Need:
    """`distance` is the relative effect between what is true and what is claimed that is to be seen; `boots` are of
    both arms together, None where no affordable number does; `smallest` is the distance that all of the gate's blocks
    would see."""

    metric: str
    criterion: Criterion
    floor: Floor
    distance: float
    boots: int | None
    smallest: float


def needs(design: Design) -> Iterator[Need]:
    """One for each metric of the gate that has a floor and is decided by boots."""
    from orchestrator.stats.power import blocks_needed, detectable

    gate = design.test.gate
    level = looks.level(gate.alpha, gate.looks, gate.max_blocks, gate.spending)
    for criterion in gate.criteria.values():
        if (distance := claimed(criterion)) is None:
            continue
        pattern = ".*".join(map(re.escape, criterion.metric.split("*")))
        for metric, floor in design.floors.items():
            if re.fullmatch(pattern, metric) and floor.sd_between_log > 0:
                given = floor.sd_between_log, floor.dof
                blocks = (
                    blocks_needed(math.log1p(distance), *given, level, POWER, gate.min_blocks) if distance else None
                )
                boots = None if blocks is None else BOOTS_PER_BLOCK * blocks
                smallest = math.expm1(detectable(given[0], gate.max_blocks, given[1], level, POWER))
                yield Need(metric, criterion, floor, distance, boots, smallest)


def claimed(criterion: Criterion) -> float | None:
    """The distance of the likely truth from the claim's threshold: an equal B from its margin; a B that is twice as
    much better as it must be from the least effect. None for claims that more boots do not decide."""
    if criterion.claim in ("non_inferior", "equivalent"):
        return criterion.margin
    return criterion.min_effect if criterion.claim == "superior" else None


def table(design: Design) -> Table | None:
    """A row for each of the needs; None where there is no floor to tell them from."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("metric", "claim", "SD between boots", "dof", "to be seen", "boots", "hours", "all blocks see"):
        made.add_column(head, justify="left" if head in ("metric", "claim") else "right", no_wrap=True)
    for need in needs(design):
        time = "" if need.boots is None else hours.text(need.boots * design.hours.mean)
        boots = ("over 400" if need.distance else "") if need.boots is None else str(need.boots)
        made.add_row(
            *map(
                Text,
                (
                    need.metric,
                    need.criterion.claim.replace("_", " "),
                    f"{100 * need.floor.sd_between_log:.2f}%",
                    f"{need.floor.dof:.0f}",
                    f"{100 * need.distance:.2f}%" if need.distance else "any",
                    boots,
                    time,
                    f"{100 * need.smallest:.2f}%",
                ),
            )
        )
    return made if made.row_count else None


def notes(design: Design) -> list[str]:
    """What the table rests on, and what it leaves out."""
    gate = design.test.gate
    seen = {need.metric for need in needs(design)}
    without = [
        f"{c.metric} ({c.claim.replace('_', ' ')})"
        for c in gate.criteria.values()
        if claimed(c) is not None
        and not any(re.fullmatch(".*".join(map(re.escape, c.metric.split("*"))), m) for m in seen)
    ]
    by_items = [c.metric for c in gate.criteria.values() if claimed(c) is None]
    most = BOOTS_PER_BLOCK * gate.max_blocks
    lines = [
        f"boots of both arms together for a power of {POWER:.0%} at the last look of gate {gate.name} "
        f"(at most {most} boots); hours: {design.hours.basis}",
        "to be seen: how far an equal B is from its margin, or a B twice as good as claimed from the claim",
    ]
    if not seen:
        lines = [
            f"no table: gate {gate.name} has no criterion that boots decide and whose floor is known; the A/B makes at "
            f"most {most} boots, {hours.text(design.hours.of(design.order))} ({design.hours.basis})"
        ]
    if without:
        lines.append(f"no floor on this box and stack: {', '.join(without)}; measure them with kind=floor")
    if by_items:
        lines.append(f"decided by questions, documents or counts rather than by boots: {', '.join(by_items)}")
    return lines
