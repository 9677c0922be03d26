"""From an A/B to what its promotion would serve, and every reason not to: the verdict is computed again, the hashes
are read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import checkpoint, compile_cache, inputs
from orchestrator.abtest import attempts
from orchestrator.abtest.design import ARMS, Design
from orchestrator.errors import UsageError
from orchestrator.inputs import require_present
from orchestrator.judging import arms
from orchestrator.judging.gate import BootResult
from orchestrator.plan import ServePlan
from orchestrator.plugin_build import site_dir
from orchestrator.promoting import canary, promotions
from orchestrator.promoting.promotions import Target
from orchestrator.recorded.catalog import Entry
from orchestrator.records import to_jsonable
from orchestrator.schema import Box, Machine
from orchestrator.slot import Slot

ELSEWHERE = ("port", "argv --port", "plugin source")  # where it is served and installed, not what


@dataclass(frozen=True)
class Candidate:
    """`objections` are what stands against it, a line each; `notes` what a person should know."""

    target: Target
    objections: tuple[str, ...]
    notes: tuple[str, ...] = ()


def design_of(entry: Entry) -> Design:
    """The design of an A/B, which alone can be promoted. Raises UsageError for any other run."""
    if entry.tags.get("kind") == "sweep":
        raise UsageError(f"run {entry.run_id} is a sweep; promote one of its A/Bs: `python -m orchestrator list --all`")
    if entry.tags.get("kind") == "floor":
        raise UsageError(f"run {entry.run_id} is an A/A and has no winner; promote an A/B that passed")
    return attempts.read_design(entry)


def of_ab(directory: Path, entry: Entry, machine: Machine, current: Slot | None) -> Candidate:
    """Arm B of the A/B on prod's port. `directory` is MLflow's, `machine` has the box as it is now.

    Raises UsageError where no server could be started from it at all: no A/B, no checkpoint, a cold compile cache.
    """
    design = design_of(entry)
    box = _on_prod_port(design.test.box, machine, current)
    found = inputs.gather(replace(design.test.arm("b"), box=box, paths=machine.paths))
    plan = found.plan()
    _require_servable(plan)
    verdict = attempts.recomputed(directory, entry)
    read = attempts.read(directory, entry.run_id, design)
    boots_of = {
        arm: [attempt.result for attempt in read if attempt.state == "finished" and attempt.slot.arm == arm]
        for arm in ARMS
    }
    boots = boots_of["b"]
    objections = []
    if verdict.state != "PASS":
        said = entry.tags.get("verdict", "none")
        tagged = f" (its record says {said})" if said not in (verdict.state, "none") else ""
        why = f": {verdict.reasons[0]}" if verdict.reasons else ""
        objections.append(f"verdict: {verdict.state}, computed again from the records{tagged}{why}")
    if entry.tags.get("source") != "measured":
        objections.append(f"verdict: its numbers are {entry.tags.get('source', 'of no known source')}, not measured")
    if not boots:
        objections.append(f"verdict: no boot of {design.test.b.name} is recorded, so nothing is known of it")
    objections += _changed(boots, plan)
    if damage := _damage(plan):
        objections.append(f"checkpoint: {plan.checkpoint.path}: {damage}")
    numbers_of = {
        arm: canary.of_boots(design.test.suite, measured, design.floors, box.canary_margin)
        for arm, measured in boots_of.items()
    }
    numbers = numbers_of["b"]
    if numbers is None:
        objections.append("canary: the A/B measured neither decode_ctx nor prefill, so no number can be tried again")
    against = design.plans["a"]
    differing = changes(to_jsonable(against), current.plan) if current is not None else []
    serves_a = current is not None and not differing
    target = Target(
        plan=plan,
        engine=design.test.engine,
        box=box,
        run_id=entry.run_id,
        verdict=verdict.state,
        gate=verdict.gate,
        against=against.variant,
        canary=numbers,
        displaced=current.plan.fingerprint if serves_a else "",
        displaced_canary=numbers_of["a"] if serves_a else None,
    )
    notes = []
    if differing:
        notes.append(
            f"the verdict is against {against.variant}, and prod serves {current.plan.variant}, which differs from it "
            f"in {differing[0].partition(':')[0]}"
        )
    return Candidate(target, tuple(objections), tuple(notes))


def served_before(
    chosen: promotions.Entry, entries: Sequence[promotions.Entry], current: Slot | None, margin: float
) -> Candidate:
    """The target of an entry of the ledger, with a canary of this margin at least. Raises UsageError where it cannot be
    started any more."""
    target = promotions.with_numbers(chosen.target, entries)
    if target.canary is not None:
        target = replace(target, canary=canary.with_margin(target.canary, margin))
    _require_servable(target.plan)
    objections = [f"checkpoint: {target.plan.checkpoint.path}: {damage}"] if (damage := _damage(target.plan)) else []
    if current is not None and current.plan.port != target.plan.port:
        objections.append(f"port: it served on {target.plan.port}, prod's clients are on {current.plan.port}")
    return Candidate(target, tuple(objections))


def changes(judged: dict[str, Any], now: ServePlan) -> list[str]:
    """Field, value then and value now for each in which two servers differ; the port is none."""
    before, after = (arms.flat(json.loads(json.dumps(one, sort_keys=True))) for one in (judged, to_jsonable(now)))
    return [
        f"{name}: was {_shown(before.get(name))}, is {_shown(after.get(name))} now"
        for name in arms.differences(before, after)
        if name not in ELSEWHERE
    ]


def _changed(boots: list[BootResult], plan: ServePlan) -> list[str]:
    """Where the server that would be started is not the one that was judged; hashes first."""
    if not boots:
        return []
    found = changes(dict(boots[0].plan), plan)
    of_hashes = ("stack ", "plugin ", "checkpoint ", "drafter ")
    return sorted(found, key=lambda line: not line.startswith(of_hashes))


def _damage(plan: ServePlan) -> str:
    """What of the prepared checkpoint's bytes is not what its manifest says; a found one is named by its content."""
    if plan.checkpoint.recipe:
        return checkpoint.damage(Path(plan.checkpoint.path))
    now = checkpoint.content_id(Path(plan.checkpoint.path))
    return "" if now == plan.checkpoint.recipe_id else f"its content is {now or 'gone'}, the plan's is another"


def _require_servable(plan: ServePlan) -> None:
    require_present(plan)
    if not Path(plan.checkpoint.path).is_dir():
        raise UsageError(
            f"{plan.checkpoint.path}: the checkpoint is gone; make it again with "
            f"`python -m orchestrator prepare +variant={plan.variant}`"
        )
    cache_dir = Path(plan.cache_dir)
    compile_cache.require_own(cache_dir, plan.plugin.sha256)
    if compile_cache.state(cache_dir) == "cold":
        raise UsageError(
            f"{cache_dir}: the compile cache of {plan.variant} is cold, and prod boots warm only; warm it with "
            f"`python -m orchestrator +variant={plan.variant} suite=smoke box={plan.box}`"
        )
    site = site_dir(plan.plugin, cache_dir.parent.parent)
    if not site.is_dir():
        raise UsageError(f"{site}: the plugin's build {plan.plugin.sha256[:12]} is gone; any run makes the present one")


def _on_prod_port(judged: Box, machine: Machine, current: Slot | None) -> Box:
    """The box as it was judged, at the port where prod is or should be, with the patience and margin declared now."""
    if judged.name != machine.box.name:
        raise UsageError(f"the A/B is of box {judged.name}, this is {machine.box.name}; add box={judged.name}")
    port = current.plan.port if current else machine.box.prod_port or machine.box.port
    now = {"drain_timeout_s": machine.box.drain_timeout_s, "canary_margin": machine.box.canary_margin}
    return replace(judged, port=port, prod_port=port, **now)


def _shown(value: str | None) -> str:
    return "missing" if value is None else json.dumps(value if len(value) <= 60 else f"{value[:57]}...")
