"""What the ledger of promotions says, for the terminal: the standing of what serves, and the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.progress import span
from orchestrator.promoting import promotion, promotions
from orchestrator.promoting.promotions import BrokenLedger, Entry
from orchestrator.slot import Slot

if TYPE_CHECKING:
    from rich.table import Table


def standing(state: Path, box: str, current: Slot) -> list[str]:
    """The verdict of what serves, what served before it, and a promotion under way; a line each."""
    lines = _under_way(state, box)
    try:
        entries = promotions.read(state, box)
    except BrokenLedger as error:
        return [*lines, str(error)]
    entry = promotions.serving(entries)
    if entry is None or entry.target.plan.fingerprint != current.plan.fingerprint:
        return [*lines, "verdict: none, the ledger of promotions does not know this plan yet"]
    lines.append(_verdict(entry))
    if entry.forced:
        lines.append(f"forced by {entry.by}: {entry.reason}; passed over: {'; '.join(entry.forced)}")
    before = promotions.predecessor(entries)
    if before is None:
        return [*lines, "before it: nothing that a rollback could bring back"]
    plan = before.target.plan
    back = f"`python -m orchestrator rollback box={box}` brings it back"
    return [*lines, f"before it: {before.variant}, plan {plan.fingerprint} (entry {before.number}); {back}"]


def moving(state: Path, box: str) -> str:
    """How a live promotion has its candidate, where the previous server is down for it; else empty."""
    try:
        found = promotion.load(state, box)
    except promotion.Damaged:
        return ""
    if found is None or found.step not in ("booting", "checking") or not found.owner.alive():
        return ""
    candidate = found.candidate
    if found.step == "checking":
        return f"its place taken by {candidate.plan.variant}, which serves and is being checked"
    since = f" since {candidate.booting_utc}" if candidate.booting_utc else ""
    return f"making way for {candidate.plan.variant}, which is booting{since}"


def history(entries: Sequence[Entry]) -> Table:
    """One row an entry, oldest first."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("entry", "at (UTC)", "what", "variant", "plan", "verdict", "outcome", "no server for", "by", "why"):
        made.add_column(head, no_wrap=head != "why", justify="right" if head == "entry" else "left", overflow="fold")
    current = promotions.serving(entries)
    for entry in entries:
        target = entry.target
        cells = (
            f"{entry.number}{' *' if entry is current else ''}",
            entry.at_utc[:19].replace("T", " "),
            entry.kind,
            entry.variant,
            target.plan.fingerprint if target else "",
            f"{target.verdict or 'none'} {target.run_id[:8]}" if target else "",
            entry.outcome,
            "" if entry.gap_s is None else span(entry.gap_s),
            entry.by,
            "; ".join(part for part in (entry.reason, *entry.forced) if part),
        )
        made.add_row(*map(Text, cells))
    return made


def _verdict(entry: Entry) -> str:
    target = entry.target
    if not target.run_id:
        return f"verdict: none, it was {'found serving' if entry.kind == 'found' else 'started by hand'}"
    return (
        f"verdict: {target.verdict} of A/B {target.run_id} (gate {target.gate}, against {target.against}), "
        f"entry {entry.number} of the ledger"
    )


def _under_way(state: Path, box: str) -> list[str]:
    try:
        found = promotion.load(state, box)
    except promotion.Damaged as damaged:
        return [f"{damaged}; `python -m orchestrator guard` mends it"]
    if found is None:
        return []
    if found.owner.alive():
        return [f"{found.what} is under way in process {found.owner.pid}: {found.step}"]
    return [f"{found.what} was cut off while {found.step}; `python -m orchestrator guard` settles it"]
