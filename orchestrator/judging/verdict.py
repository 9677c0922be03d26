"""The verdict on an A/B: a pure function of the recorded boots, the gate and the box's floors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.judging import criteria, disturbed, validity
from orchestrator.judging.comparison import CriterionResult, Look, State
from orchestrator.judging.gate import BootResult, Gate
from orchestrator.labels import counted
from orchestrator.stats import looks
from orchestrator.stats.floor import Floor

__all__ = ["CriterionResult", "State", "Verdict", "judge"]


@dataclass(frozen=True)
class Verdict:
    """`look` is the number of complete blocks judged; `next_look` the one that may still settle it."""

    state: State
    reasons: tuple[str, ...]
    criteria: tuple[CriterionResult, ...]
    gate: str
    look: int
    alpha_at_look: float | None  # one-sided, spent at this look; None: no verdict is declared here
    next_look: int | None = None


def judge(
    gate: Gate,
    results: Sequence[BootResult],
    floors: Mapping[str, Floor],
    *,
    hours_per_boot: float | None = None,
) -> Verdict:
    """The verdict of `gate` on these boots, whatever their order. `floors` by metric.

    PASS where every criterion passes, FAIL where one fails, INVALID where something may not be judged at all. At a
    number of complete blocks that is no declared look, nothing passes or fails.
    """
    ordered = sorted(results, key=lambda result: (result.block, result.position, result.run_id))
    invalid = validity.faults(gate, ordered)
    judged = _complete(gate, ordered)
    blocks = len({result.block for result in judged})
    if blocks > gate.max_blocks:
        invalid.append(f"looks: {blocks} blocks are complete, the last look that was declared is at {gate.max_blocks}")
    if invalid:
        return Verdict("INVALID", tuple(invalid), (), gate.name, blocks, None)
    later = min((look for look in gate.looks if look > blocks), default=None)
    if not judged:
        return Verdict("INCONCLUSIVE", ("no block is complete yet",), (), gate.name, 0, None, later)
    declared = blocks in gate.looks
    at = blocks if declared else later
    look = Look(
        gate=gate,
        level=looks.level(gate.alpha, gate.looks, at, gate.spending),
        last_level=looks.level(gate.alpha, gate.looks, gate.max_blocks, gate.spending),
        floors=floors,
        hours_per_boot=hours_per_boot,
    )
    found = criteria.evaluate(look, judged)
    unasked = any(c.role == "primary" for c in gate.criteria.values()) and not _has_primary(found)
    state = "INVALID" if unasked else _together([result.state for result in found])
    between = []
    if not declared and state != "INVALID":
        state = "INCONCLUSIVE"
        found = [replace(result, state=state) for result in found]
        between = [f"no look is declared at {counted(blocks, 'block')}; the next is at {later}"]
    reasons = between + [result.sentence for result in found if result.state == state]
    if not found:
        reasons = ["criteria: there is none, so nothing was asked"]
    elif unasked:
        reasons.insert(0, "criteria: nothing was measured of the primary one, so what is claimed was not asked")
    return Verdict(
        state=state,
        reasons=(*reasons, *disturbed.reasons(judged)),
        criteria=tuple(found),
        gate=gate.name,
        look=blocks,
        alpha_at_look=look.level if declared else None,
        next_look=later if state == "INCONCLUSIVE" else None,
    )


def _has_primary(found: Sequence[CriterionResult]) -> bool:
    return any(result.role == "primary" for result in found)


def _together(states: Sequence[State]) -> State:
    """Of all criteria. Nothing is a pass by default: without a criterion there is nothing valid."""
    if not states or "INVALID" in states:
        return "INVALID"
    if "FAIL" in states:
        return "FAIL"
    return "PASS" if all(state == "PASS" for state in states) else "INCONCLUSIVE"


def _complete(gate: Gate, results: Sequence[BootResult]) -> list[BootResult]:
    """The boots of blocks that have all their boots, half of them of each arm."""
    boots = Counter((result.block, result.arm) for result in results)

    def whole(block: int) -> bool:
        a, b = boots[block, "a"], boots[block, "b"]
        return a + b > 0 if gate.boots_per_block is None else a == b == gate.boots_per_block // 2

    return [result for result in results if whole(result.block)]
