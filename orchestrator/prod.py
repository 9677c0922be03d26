"""Prod: one slot a box. A run that needs the box takes prod down and owes its return; the guard pays where it cannot.

Everything here that starts or stops a server holds the box's lease, so that prod is never brought back under a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from orchestrator import devices, engines, inputs, journal, lease, owner, prod_server, slot
from orchestrator.boot import check_port
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.inputs import Inputs
from orchestrator.plan import ServePlan
from orchestrator.progress import Progress
from orchestrator.promoting import candidate, promote, promoted, promotion, promotions
from orchestrator.schema import Experiment
from orchestrator.slot import Slot

MAX_FAILED_BOOTS = 3  # in a row; the guard then leaves prod down until a person looks
MAX_EARLY_ENDS = 3  # as well
EARLY = timedelta(minutes=10)  # after it was healthy


@dataclass(frozen=True)
class Outcome:
    """What a pass of the guard found on one box: a line, and whether prod is as it should be."""

    line: str
    ok: bool


@dataclass(frozen=True)
class Places:
    """Where a rollback finds what it needs besides the state directory."""

    cache: Path
    tracking: Path


@contextmanager
def displaced(needed: Inputs, progress: Progress) -> Iterator[None]:
    """Take prod off the box for the block, where there is one; the caller holds the lease.

    Raises UsageError, with prod untouched, where it does not drain; prod_server.NotBack where it does not come back.
    """
    state, box = needed.state, needed.experiment.box
    promote.owed(state, box.name, progress)
    current = slot.load(state, box.name)
    if current is None:
        yield
        return
    if earlier := slot.displacement(state, box.name):
        progress.note(f"prod is not known to be back: {earlier}; it comes back when this run ends")
    if prod_server.is_healthy(current):
        prod_server.drain(replace(current, box=box), progress)
    try:
        slot.open_displacement(state, box.name, needed.experiment.variant.name)
        with progress.stage(f"stop prod ({current.plan.variant})"):
            prod_server.end(current)
            devices.require_clear(box)
        yield
    finally:
        progress.note(prod_server.bring_back(current, state, progress))


def owed(state: Path, box: str, progress: Progress) -> None:
    """Bring prod back where a killed run took it down; the caller holds the lease and does not need the box."""
    promote.owed(state, box, progress)
    current = slot.load(state, box)
    if current is not None and (taken := slot.displacement(state, box)):
        progress.note(f"prod of box {box}: {taken}")
        progress.note(prod_server.bring_back(current, state, progress))


def require_port(plan: ServePlan, state: Path) -> None:
    """Raises UsageError where the plan's port is taken by anything but prod, which is about to be stopped."""
    current = slot.load(state, plan.box)
    if current is None or current.plan.port != plan.port or not prod_server.is_alive(current):
        check_port(plan.host, plan.port)


def start(experiment: Experiment, progress: Progress) -> str:
    """Fill the empty slot of the box with the experiment's plan and serve it; returns the line that says so.

    The checkpoint must be prepared. Raises UsageError where the slot is taken, BootError where the server does not come
    up; that, and an interrupt, leave the slot empty.
    """
    box = experiment.box
    on_prod_port = replace(experiment, box=replace(box, port=box.prod_port or box.port))
    found = inputs.gather(on_prod_port)
    with lease.hold(box.name, "prod start", found.state):
        for line in journal.reap(found.state):
            progress.note(line)
        promote.owed(found.state, box.name, progress)
        promotions.read(found.state, box.name)  # a broken ledger is said before anything starts
        if current := slot.load(found.state, box.name):
            raise UsageError(
                f"prod of box {box.name} is {current.plan.variant} since {current.since_utc}; "
                f"empty the slot with `python -m orchestrator prod stop box={box.name}` first"
            )
        new = Slot(found.plan(), experiment.engine, box, slot.now_utc(), owner.user(), nonce="")
        try:
            served = prod_server.boot(new, found.state, progress)
            promote.note(found.state, "start", served, box.name)
        except BaseException:
            if begun := slot.load(found.state, box.name):
                prod_server.end(begun)
            slot.remove(found.state, box.name)
            raise
        promote.copy_to_mlflow(found.state, box.name, Path(experiment.paths.tracking).resolve(), progress)
        return prod_server.line("serves", served)


def stop(state: Path, box: str, progress: Progress, now: bool = False, tracking: Path | None = None) -> str:
    """Drain prod (unless `now`), stop it and empty the slot: nothing brings it back. MLflow below `tracking` learns of
    it at once."""
    line = _stop(state, box, progress, now)
    if tracking is not None:
        promote.copy_to_mlflow(state, box, tracking, progress)
    return line


def _stop(state: Path, box: str, progress: Progress, now: bool) -> str:
    with lease.hold(box, "prod stop", state):
        promote.abandon(state, box, progress)
        try:
            current = slot.load(state, box)
        except OrchestratorError as error:
            from orchestrator.engines.container import LABEL

            slot.remove(state, box)
            ended = sum(engines.reap("process", None, nonce) for nonce in slot.nonces(state, box))
            _note_stop(state, box, progress)
            return (
                f"the slot of box {box} was damaged and is empty now; ended {ended} processes; a container may be "
                f"left, see `docker ps --all --filter label={LABEL}.purpose=prod`: {error}"
            )
        if current is None:
            raise UsageError(f"there is no prod on box {box}; `python -m orchestrator prod` lists the slots")
        if not now and prod_server.is_healthy(current):
            prod_server.drain(current, progress)
        prod_server.end(current)
        slot.remove(state, box)
        _note_stop(state, box, progress)
        devices.require_clear(current.box)
    return f"prod of box {box} ({current.plan.variant}) is stopped and its slot is empty"


def _note_stop(state: Path, box: str, progress: Progress) -> None:
    try:
        promote.note(state, "stop", None, box)
    except promotions.BrokenLedger as error:  # prod is stopped all the same
        progress.note(str(error))


def show(state: Path, only: str | None = None) -> str:
    """Every slot as text, or that of the box `only`."""
    lines = []
    for box in [box for box in slot.boxes(state) if only in (None, box)]:
        try:
            current = slot.load(state, box)
        except OrchestratorError as error:
            lines.append(f"box {box}: {error}")
            continue
        health = promoted.moving(state, box) or prod_server.condition(current)
        lines += [
            f"box {box}: {current.plan.variant} at {current.base_url}, {health}",
            f"  clients ask for {current.plan.served_model}; this boot alone is {current.model}",
            f"  plan {current.plan.fingerprint}, engine {current.engine.kind}",
            f"  since {current.since_utc}, by {current.by}",
        ]
        lines += [f"  {line}" for line in promoted.standing(state, box, current)]
        if taken := slot.displacement(state, box):
            lives = taken.owner is not None and taken.owner.alive()
            lines.append(f"  {taken}; {'it' if lives else '`python -m orchestrator guard`'} brings it back")
    where = f" on box {only}" if only else ""
    nothing = f"no prod slot is filled{where}; fill one with `python -m orchestrator prod start +variant=NAME`"
    return "\n".join(lines) or nothing


def guard(state: Path, progress: Progress, places: Places | None = None) -> list[Outcome]:
    """One pass: end what killed runs left, and bring back every prod that should serve and that no live run owes.

    With `places`, a prod that is given up makes way for its predecessor where its box declares that.
    """
    outcomes = [Outcome(line, True) for line in journal.reap(state)]
    for box in sorted({*slot.boxes(state), *promotion.boxes(state)}):
        try:
            moving = promotion.path_of(state, box).exists()
            current = promote.slot_or_none(state, box) if moving else slot.load(state, box)
            taken = slot.displacement(state, box)
            if current is None and not moving:  # emptied since the slots were listed
                continue
            if taken is None and not moving and prod_server.is_healthy(current):
                outcomes.append(Outcome(prod_server.line("serves", current), True))
                continue
            with lease.hold(box, "guard", state):
                if line := _settled(state, box, progress):
                    outcomes.append(Outcome(line, True))
                    continue
                current, taken = slot.load(state, box), slot.displacement(state, box)
                if current is None:  # emptied while this pass began
                    continue
                if taken is None and not current.failed_boots and not prod_server.is_alive(current):
                    current = replace(current, early_ends=_early_ends(current))
                    slot.save(state, current)
                given_up = current.failed_boots >= MAX_FAILED_BOOTS or current.early_ends > MAX_EARLY_ENDS
                if given_up and not prod_server.is_healthy(current):
                    prod_server.end(current)
                    outcomes.append(Outcome(_given_up(current, state), False))
                    if places and current.box.when_prod_fails == "rollback":
                        outcomes.append(Outcome(_rolled_back(current, state, places, progress), False))
                    continue
                why = [Outcome(f"prod of box {box}: {taken}", True)] if taken else []
                outcomes += [*why, Outcome(prod_server.bring_back(current, state, progress), True)]
        except lease.Busy as busy:
            outcomes.append(Outcome(f"{busy}; prod is its to bring back", True))
        except OrchestratorError as error:
            outcomes.append(Outcome(str(error), False))
    return outcomes


def _settled(state: Path, box: str, progress: Progress) -> str:
    """What came of a promotion that was killed; empty where there is none, or where prod is given up anyway."""
    current = promote.slot_or_none(state, box)
    if current is not None and current.failed_boots >= MAX_FAILED_BOOTS and not prod_server.is_healthy(current):
        return ""
    entry = promote.owed(state, box, progress)
    if entry is None:
        return ""
    now = slot.load(state, box)
    serves = prod_server.line("serves", now) if now else "nothing serves, as before"
    return f"{entry.kind} of {entry.variant} was cut off and is {entry.outcome}: {serves}"


def _early_ends(prod: Slot) -> int:
    """How often in a row it ended soon after it was healthy, this time included; more than the limit stays so."""
    if prod.early_ends > MAX_EARLY_ENDS:
        return prod.early_ends
    early = prod.healthy_utc and datetime.now(UTC) - datetime.fromisoformat(prod.healthy_utc) < EARLY
    return prod.early_ends + 1 if early else 0


def _rolled_back(prod: Slot, state: Path, places: Places, progress: Progress) -> str:
    """The predecessor serves in place of a prod that was given up; returns the line that says so.

    Raises OrchestratorError where there is none, where it was tried before, or where it does not come up.
    """
    entries = promote.ledger_of(state, prod.box.name, prod)
    before, current = promotions.predecessor(entries), promotions.serving(entries)
    tried = any(entry.kind == "rollback" and entry.number >= current.number for entry in entries)
    if before is None or tried or promotion.path_of(state, prod.box.name).exists():
        why = "a rollback was tried" if before else "nothing served before it"
        raise promote.Refused(f"prod of box {prod.box.name} is not rolled back: {why}; a person has to look")
    found = candidate.served_before(before, entries, prod, prod.box.canary_margin)
    new = promote.begun("rollback", found, prod, "", str(places.tracking))
    entry = promote.conduct(new, state, places.cache, progress)
    now = slot.load(state, prod.box.name)
    return f"{prod_server.line('serves', now)} again, by when_prod_fails; {promote.said(entry)}"


def _given_up(prod: Slot, state: Path) -> str:
    log_path = slot.directory(state, prod) / engines.LOG_NAME
    box = prod.box.name
    what = f"did not come up {prod.failed_boots} times in a row"
    if prod.failed_boots < MAX_FAILED_BOOTS:
        what = f"ended {prod.early_ends} times in a row soon after it was healthy"
    return (
        f"prod of box {box} ({prod.plan.variant}) {what} and is not tried "
        f"again; its log: {log_path}; mend the cause, then `prod stop box={box}` and `prod start +variant=NAME`"
    )
