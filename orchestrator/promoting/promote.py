"""Moves what prod is: the candidate boots on the prod port, is checked there, and becomes prod or is taken away again.

The steps are a record on disk (promotion.py) that is written before each is taken; `settle` ends a promotion from that
record alone, after a failure as after a kill. Everything here that starts or stops a server holds the box's lease.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from orchestrator import compile_cache, devices, engines, interrupts, journal, lease, owner, prod_server, slot
from orchestrator.errors import OrchestratorError
from orchestrator.progress import Progress, span
from orchestrator.promoting import canary, promotion, promotions
from orchestrator.promoting.candidate import Candidate
from orchestrator.promoting.promotion import Promotion
from orchestrator.promoting.promotions import Entry, Target
from orchestrator.slot import Slot


class Refused(OrchestratorError):
    """The promotion was not begun; prod is as it was."""

    exit_code = 1


class NotPromoted(OrchestratorError):
    """The candidate was taken away again; the message says what serves."""

    exit_code = 1


def ledger_of(state: Path, box: str, current: Slot | None) -> list[Entry]:
    """The ledger, with an entry for what serves where it does not say so: a slot that was filled before there was one,
    or whose entry a kill prevented. The caller holds the lease."""
    entries = promotions.read(state, box)
    known = promotions.serving(entries)
    if current is not None and (known is None or known.target.plan.fingerprint != current.plan.fingerprint):
        note(state, "found", current, box, f"it serves since {current.since_utc}")
        return promotions.read(state, box)
    return entries


def note(state: Path, kind: promotions.Kind, current: Slot | None, box: str, reason: str = "") -> Entry:
    """An entry for what a person did to the slot by hand."""
    target = Target(current.plan, current.engine, current.box) if current else None
    by = current.by if current else owner.user()
    return promotions.append(state, _entry(kind, "moved", box, target, by, reason=reason))


def begun(
    kind: Literal["promote", "rollback"], found: Candidate, current: Slot | None, reason: str, tracking: str
) -> Promotion:
    """The record of a promotion that is about to start. Raises Refused for what stands against it, without a
    `reason` to go on all the same."""
    target = found.target
    if found.objections and not reason:
        raise Refused(
            f"{target.plan.variant} is not promoted: {found.objections[0]}; mend it, or say "
            '`--force --reason "WHY"`, which is recorded',
            "\n".join(found.objections[1:]),
        )
    if current is not None and current.plan.fingerprint == target.plan.fingerprint:
        raise Refused(f"prod of box {target.plan.box} is this very plan of {target.plan.variant} already")
    fresh = Slot(target.plan, target.engine, target.box, slot.now_utc(), owner.user(), nonce="")
    return Promotion(
        id=secrets.token_hex(8),
        kind=kind,
        step="draining",
        owner=owner.current(),
        began_utc=_now(),
        target=target,
        candidate=fresh,
        previous=current,
        tracking=tracking,
        reason=reason,
        forced=found.objections,
    )


def conduct(new: Promotion, state: Path, cache: Path, progress: Progress, now: bool = False) -> Entry:
    """Carry the promotion out; returns its entry in the ledger. The caller holds the lease.

    Whatever fails, the previous plan serves again and NotPromoted says so; prod_server.NotBack where even that failed.
    With `now`, requests in flight are not waited for.
    """
    promotion.save(state, new)
    try:
        made = _try(new, state, cache, progress, now)
    except BaseException as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        failed = promotion.advanced(state, promotion.load(state, new.box) or new, "restoring", failure=why)
        progress.note(f"{new.what}: {why}")
        settle(failed, state, progress)
        if not isinstance(error, OrchestratorError):
            raise  # an interrupt, or a defect, which keeps its traceback
        detail = "\n".join(filter(None, [error.detail, *failed.checks]))
        raise NotPromoted(f"{new.what} failed: {error}; {_serves(state, new.box)}", detail) from error
    with interrupts.once(held=True):  # it is decided; what is left takes no time
        return settle(promotion.advanced(state, made, "moving"), state, progress)


def settle(found: Promotion, state: Path, progress: Progress) -> Entry:
    """End a promotion as its record says, from wherever it was stopped; returns its entry in the ledger.

    Raises prod_server.NotBack, and keeps the record, where what has to serve does not come up.
    """
    if promotion.direction(found) == "forward":
        return _forward(found, state, progress)
    return _back(found, state, progress)


def owed(state: Path, box: str, progress: Progress) -> Entry | None:
    """Settle what a killed promotion left, where there is one; the caller holds the lease."""
    try:
        found = promotion.load(state, box)
    except promotion.Damaged as damaged:
        progress.note(_give_up_record(state, box, damaged))
        return None
    if found is None:
        return None
    progress.note(f"{found.what} was cut off while {found.step} (process {found.owner.pid}, {found.began_utc})")
    if not found.failure and promotion.direction(found) == "back":
        found = replace(found, failure=f"cut off while {found.step}")
    return settle(found, state, progress)


@contextmanager
def held(state: Path, box: str, purpose: str, progress: Progress) -> Iterator[Slot | None]:
    """Hold the box, with what killed processes left ended and owed promotions settled; yields its slot."""
    with lease.hold(box, purpose, state):
        for line in journal.reap(state):
            progress.note(line)
        owed(state, box, progress)
        yield slot.load(state, box)


def copy_to_mlflow(state: Path, box: str, tracking: Path, progress: Progress) -> None:
    """MLflow's copy of the ledger is brought up to date; where it cannot be, prod and ledger stand all the same."""
    from orchestrator.promoting import promotion_runs
    from orchestrator.recorded.mlflow_store import TrackingError

    try:
        copied = promotion_runs.copy(tracking, box, promotions.read(state, box))
        for run_id in copied.unknown:
            progress.note(f"MLflow's run {run_id} is an entry that the ledger of box {box} has lost")
    except TrackingError as error:
        progress.note(
            f"MLflow has no copy of the last promotion ({error}); `python -m orchestrator prod sync` makes it"
        )


def _try(p: Promotion, state: Path, cache: Path, progress: Progress, now: bool) -> Promotion:
    """Up to where every check has passed."""
    box = p.box
    if p.previous is not None:
        if not now and prod_server.is_healthy(p.previous):
            prod_server.drain(replace(p.previous, box=p.candidate.box), progress)
        p = promotion.advanced(state, p, "stopping", stopped_utc=_now())
        slot.open_displacement(state, box, p.what)
        with progress.stage(f"stop prod ({p.previous.plan.variant})"):
            p = replace(p, checks=(prod_server.ended(p.previous),))
    devices.require_clear(p.candidate.box)
    p = promotion.advanced(state, p, "booting")

    def keep(where: Path, candidate: Slot) -> None:
        promotion.save(where, replace(p, candidate=candidate))

    before = compile_cache.compiled(Path(p.target.plan.cache_dir))
    candidate, server = prod_server.come_up(p.candidate, state, progress, keep)
    candidate = replace(candidate, since_utc=candidate.healthy_utc)
    p = replace(p, candidate=candidate, gap_s=_since(p.stopped_utc))
    p = promotion.advanced(state, p, "checking")
    proven = canary.check(candidate, server, p.target.canary, before, state, cache, progress)
    return replace(p, checks=(*p.checks, *proven))


def _forward(p: Promotion, state: Path, progress: Progress) -> Entry:
    """The candidate is prod: the pointer first, then the server, the ledger and MLflow."""
    current = slot_or_none(state, p.box)
    moved = current is not None and (p.previous is None or current.nonce != p.previous.nonce)
    if not moved:
        prod_server.keep_up(p.candidate)
        slot.save(state, p.candidate)
        current = p.candidate
    prod_server.bring_back(current, state, progress)
    return _close(p, "moved", p.reason, p.gap_s, state, progress)


def _back(p: Promotion, state: Path, progress: Progress) -> Entry:
    """The previous plan is prod, as it has been: the pointer never moved."""
    if p.candidate.nonce:
        prod_server.end(p.candidate)
    if p.previous is None:
        slot.remove(state, p.box)
    else:
        if slot_or_none(state, p.box) is None:
            slot.save(state, p.previous)
        progress.note(prod_server.bring_back(slot.load(state, p.box), state, progress))
    return _close(p, "restored", _why(p, p.failure), _since(p.stopped_utc), state, progress)


def _why(p: Promotion, failure: str) -> str:
    """Why it was restored, and why it had been forced, where it had."""
    return f"{failure}; it was forced because: {p.reason}" if p.reason else failure


def _close(
    p: Promotion, outcome: promotions.Outcome, reason: str, gap_s: float | None, state: Path, progress: Progress
) -> Entry:
    proven = {"reason": reason, "forced": p.forced, "checks": p.checks, "gap_s": gap_s}
    new = _entry(p.kind, outcome, p.box, p.target, p.candidate.by, id=p.id, **proven)
    made = promotions.append(state, new)
    copy_to_mlflow(state, p.box, Path(p.tracking), progress)
    promotion.remove(state, p.box)
    return made


def _entry(
    kind: promotions.Kind, outcome: promotions.Outcome, box: str, target: Target | None, by: str, **more: Any
) -> Entry:
    """`more` are the other fields of an entry, where they are not its defaults."""
    values = {"id": secrets.token_hex(8), **more}
    return Entry(0, at_utc=_now(), box=box, kind=kind, outcome=outcome, target=target, by=by, **values)


def slot_or_none(state: Path, box: str) -> Slot | None:
    """A slot that cannot be read is written again from the record."""
    try:
        return slot.load(state, box)
    except OrchestratorError:
        return None


def _give_up_record(state: Path, box: str, damaged: promotion.Damaged) -> str:
    """A record that cannot be read says nothing: what the slot says serves, and every other boot of prod is ended."""
    current = slot.load(state, box)
    if current is not None:
        socket = None
        if current.plan.container is not None:
            from orchestrator.engines import daemon

            socket = daemon.socket_of(current.engine)
        for nonce in slot.nonces(state, box):
            if nonce != current.nonce:
                engines.reap(current.engine.kind, socket, nonce)
    path = promotion.path_of(state, box)
    path.replace(path.with_name(f"{path.name}.damaged"))
    return f"{damaged}; it is moved to {path.name}.damaged, and prod is what its slot says"


def _serves(state: Path, box: str) -> str:
    current = slot.load(state, box)
    return prod_server.line("serves", current) if current else f"box {box} has no prod, as before"


def _since(stopped_utc: str) -> float | None:
    """Seconds, by the wall clock: whoever settles a promotion may be another process, after a reboot."""
    if not stopped_utc:
        return None
    return round(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(stopped_utc)).total_seconds()), 3)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def abandon(state: Path, box: str, progress: Progress) -> None:
    """End the candidate of a killed promotion and forget its record: prod is about to be stopped by hand."""
    try:
        found = promotion.load(state, box)
    except promotion.Damaged as damaged:
        progress.note(_give_up_record(state, box, damaged))
        return
    if found is None:
        return
    if found.candidate.nonce:
        prod_server.end(found.candidate)
    why = f"cut off while {found.step}, and prod was stopped by hand"
    proven = {"reason": _why(found, why), "forced": found.forced}
    new = _entry(found.kind, "restored", box, found.target, owner.user(), id=found.id, **proven)
    promotions.append(state, new)
    promotion.remove(state, box)


def said(entry: Entry) -> str:
    """What came of it, for the terminal."""
    gap = "" if entry.gap_s is None else f"; the prod port had no server for {span(entry.gap_s)}"
    return f"entry {entry.number} of the ledger of box {entry.box}: {entry.kind} {entry.variant}{gap}"
