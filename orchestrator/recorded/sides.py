"""What a comparison puts side by side: named sides, each with the boots or the published result that it stands on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import labels
from orchestrator.abtest import arm_titles
from orchestrator.abtest.attempts import Attempt
from orchestrator.abtest.design import ARMS, Design
from orchestrator.judging.comparison import metrics_of
from orchestrator.recorded import catalog
from orchestrator.recorded.catalog import Entry
from orchestrator.records import Boot, Measurement
from orchestrator.stats import paired
from orchestrator.stats.floor import Floor

CONFIDENCE = 0.95
EVIDENCE_LINES, LINE_LENGTH = 40, 300
_TELLING = (  # lines of a server's log that say how it came up, besides those that the plan asks for
    r"KV cache size: [\d,]+ tokens",
    r"torch\.compile took",
    r"Directly load the compiled graph",
    r"[Gg]raph capturing finished",
    r"Maximum concurrency for",
    r"registered",
    r"falling back to",
    r"WARNING .*(?:paroquant|RADIANCE_)",
)


@dataclass(frozen=True)
class Sample:
    """One boot of a side, or a published result, which has metrics alone. `number` is its place in time, from 1."""

    run_id: str
    number: int
    label: str
    metrics: Mapping[str, float]
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    boot: Boot | None = None
    plan: Mapping[str, Any] | None = None
    evidence: tuple[str, ...] = ()
    block: int = 0
    position: int = 0


@dataclass(frozen=True)
class Side:
    """`key` is short ("A"), `name` what it is; `source` is "measured", "simulated" or "published"."""

    key: str
    name: str
    source: str
    samples: tuple[Sample, ...]

    @property
    def title(self) -> str:
        mark = "" if self.source == "measured" else f" ({self.source})"
        return f"{self.key}: {self.name}{mark}"

    @property
    def first(self) -> Sample:
        return self.samples[0]

    def values(self, metric: str) -> list[float]:
        """Of its samples that have the metric, in their order."""
        return [sample.metrics[metric] for sample in self.samples if metric in sample.metrics]

    def names(self) -> set[str]:
        return {name for sample in self.samples for name in sample.metrics}


@dataclass(frozen=True)
class Difference:
    """One metric over the sides: its mean on each, and each against the first as a share (0.01: 1% more).

    `interval` is the two-sided 95% one, and None where nothing says how much a boot varies; `basis`: what it rests on.
    """

    metric: str
    means: tuple[float | None, ...]
    shares: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...]
    basis: str


def of_ab(design: Design, found: Sequence[Attempt], source: str, artifacts: Mapping[str, Path]) -> list[Side]:
    """The two arms of an A/B, of its finished boots; `artifacts` by run id."""
    sides, titles = [], arm_titles.of(design.test)
    for arm in ARMS:
        samples = []
        for attempt in found:
            if attempt.state != "finished" or attempt.slot.arm != arm:
                continue
            result, slot = attempt.result, attempt.slot
            sample = Sample(
                run_id=attempt.run_id,
                number=design.order.index(slot) + 1,
                label=f"{slot.block + 1}.{slot.position + 1}",
                metrics=metrics_of(result),
                measurements=result.measurements,
                boot=result.boot,
                plan=result.plan,
                evidence=evidence(artifacts[attempt.run_id], result.boot, result.plan),
                block=slot.block,
                position=slot.position,
            )
            samples.append(sample)
        sides.append(Side(arm.upper(), titles[arm], source, tuple(samples)))
    return sides


def of_runs(entries: Sequence[Entry], measured: Sequence[Mapping[str, Measurement]]) -> list[Side]:
    """A side for each run, with the measurements that were read of it."""
    by_age = sorted(entries, key=lambda entry: entry.started_s)
    sides = []
    for key, entry, found in zip(_keys(), entries, measured, strict=False):
        boot = catalog.measured_boot(entry.artifacts)
        plan_path = entry.artifacts / "plan.json"
        plan = catalog.read_json(plan_path) if plan_path.exists() else None
        sample = Sample(
            run_id=entry.run_id,
            number=by_age.index(entry) + 1,
            label=entry.run_id[:8],
            metrics=entry.metrics,
            measurements=found,
            boot=boot,
            plan=plan,
            evidence=evidence(entry.artifacts, boot, plan or {}),
        )
        sides.append(Side(key, entry.name, entry.tags.get("source", "measured"), (sample,)))
    return sides


def _keys() -> Iterable[str]:
    """A, B, ... Z, then numbers."""
    yield from "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    number = 27
    while True:
        yield str(number)
        number += 1


def evidence(artifacts: Path, boot: Boot | None, plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The lines of the boot's log that its plan asks for, and others of how it came up; the first of each kind."""
    if boot is None:
        return ()
    log = artifacts / "boots" / f"{boot.nonce}-{boot.purpose}" / "server.log"
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    required = (plan.get("evidence") or {}).get("required", ())
    patterns = [re.compile(pattern) for pattern in (*(marker["pattern"] for marker in required), *_TELLING)]
    found: dict[int, str] = {}
    for pattern in patterns:
        number = next((n for n, line in enumerate(lines) if pattern.search(line)), None)
        if number is not None:
            found[number] = lines[number].strip()[:LINE_LENGTH]
    return tuple(found[number] for number in sorted(found))[:EVIDENCE_LINES]


def mean(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(mean, low, high): the geometric mean of positive values, else the arithmetic one, with the 95% t interval over
    boots; None for its ends where there are fewer than two."""
    if len(set(values)) == 1:  # exactly that, as no logarithm gives it
        return values[0], *((values[0],) * 2 if len(values) > 1 else (None, None))
    positive = all(value > 0 for value in values)
    scaled = [math.log(value) for value in values] if positive else list(values)
    back = math.exp if positive else (lambda value: value)
    centre = math.fsum(scaled) / len(scaled)
    if len(scaled) < 2:
        return back(centre), None, None
    spread = math.fsum((value - centre) ** 2 for value in scaled) / (len(scaled) - 1)
    half = paired.quantile(1 - (1 - CONFIDENCE) / 2, len(scaled) - 1) * (spread / len(scaled)) ** 0.5
    return back(centre), back(centre - half), back(centre + half)


def differences(sides: Sequence[Side], floors: Mapping[str, Floor], *, paired_up: bool = True) -> list[Difference]:
    """Each metric that any side has, against the first side; nothing here is a verdict. Without `paired_up` there are
    the means alone.

    Boots in blocks are paired as a gate pairs them, by `stats.paired`. Single boots have the interval that the box's
    floor gives: two boots of one build differ by t x SD x sqrt(2) in 95 of 100 cases.
    """
    names = sorted(set().union(*(side.names() for side in sides)), key=labels.by_number)
    return [_difference(name, sides, floors.get(name), paired_up) for name in names]


def _difference(name: str, sides: Sequence[Side], floor: Floor | None, paired_up: bool) -> Difference:
    values = [side.values(name) for side in sides]
    means = tuple(mean(found)[0] if found else None for found in values)
    shares: list[float | None] = [None]
    intervals: list[tuple[float, float] | None] = [None]
    bases: dict[str, None] = {}
    for side, found in zip(sides[1:], values[1:], strict=True):
        against = _against(name, sides[0], side, values[0], found, floor) if paired_up else (None, None, "")
        share, interval, basis = against
        shares.append(share)
        intervals.append(interval)
        if share is not None:
            bases[basis] = None
    return Difference(name, means, tuple(shares), tuple(intervals), "; ".join(bases))


def _against(
    name: str, first: Side, side: Side, was: Sequence[float], now: Sequence[float], floor: Floor | None
) -> tuple[float | None, tuple[float, float] | None, str]:
    if not was or not now or not all(math.isfinite(value) and value > 0 for value in (*was, *now)):
        return None, None, ""
    if len(was) == len(now) == 1:
        difference = math.log(now[0]) - math.log(was[0])
        if floor is None or floor.dof <= 0 or "published" in (first.source, side.source):
            return math.expm1(difference), None, "one boot each and no floor"
        half = paired.quantile(1 - (1 - CONFIDENCE) / 2, floor.dof) * floor.sd_between_log * 2**0.5
        ends = (math.expm1(difference - half), math.expm1(difference + half))
        return math.expm1(difference), ends, f"the box's floor, {100 * floor.sd_between_log:.2g}%"
    taken = [(arm, s) for arm, of in (("a", first), ("b", side)) for s in of.samples if name in s.metrics]
    where = paired.layout([a for a, _ in taken], [s.block for _, s in taken], [s.position for _, s in taken])
    logs = [math.log(sample.metrics[name]) for _, sample in taken]
    prior = (floor.sd_between_log, floor.dof) if floor else (None, 0.0)
    found = paired.estimate(logs, where, *prior) if where else None
    if found is None:
        return math.expm1(math.fsum(map(math.log, now)) / len(now) - math.fsum(map(math.log, was)) / len(was)), None, ""
    low, high = found.interval(CONFIDENCE)
    basis = "the boots and the box's floor" if found.borrowed else "the boots' own spread"
    return math.expm1(found.effect), (math.expm1(low), math.expm1(high)), basis
