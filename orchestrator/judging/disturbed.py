"""Boots that had to share the processors with other programs: named beside a verdict, and never part of its state."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.foreign_load import TELLING, percent
from orchestrator.judging.gate import BootResult

MOST = 3  # boots that are named


def reasons(results: Sequence[BootResult]) -> list[str]:
    """One line that names the boots, the most disturbed first; none where all had the box for themselves."""
    shares = [(result.boot.other_cpu_share or 0.0, result) for result in results]
    found = sorted((of for of in shares if of[0] >= TELLING), key=lambda of: -of[0])
    if not found:
        return []
    named = [f"block {r.block + 1}, boot {r.position + 1}, arm {r.arm}: {percent(share)}" for share, r in found[:MOST]]
    more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
    return [
        f"other programs used the processors while {len(found)} of {len(results)} boots were measured "
        f"({'; '.join(named)}{more}); the verdict stands, but measure again on a quiet box where times decide"
    ]
