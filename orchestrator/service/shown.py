"""What is shown of a job, a move, an A/B, a prod slot, its history and an event: never a key or a directory."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from orchestrator import slot
from orchestrator.promoting import promotions
from orchestrator.recorded import catalog
from orchestrator.schedule.job import Event, Job
from orchestrator.service.moves import Move

HIDDEN = "idempotency_key"


def _model(record: type) -> type[BaseModel]:
    """A record's fields as they are shown, for OpenAPI."""
    kinds = get_type_hints(record)
    given = {one.name: (kinds[one.name], ...) for one in fields(record) if one.name != HIDDEN}
    return create_model(record.__name__, __config__=ConfigDict(extra="forbid"), __doc__=record.__doc__, **given)


JobShown, MoveShown = _model(Job), _model(Move)
_JOB, _MOVE = tuple(JobShown.model_fields), tuple(MoveShown.model_fields)


class AbShown(BaseModel):
    """An A/B, a sweep or a floor. Times are seconds since the epoch."""

    model_config = ConfigDict(extra="forbid")
    run_id: str
    name: str
    started_s: float
    ended_s: float | None
    status: str
    kind: str
    box: str
    gate: str
    suite: str
    stack: str
    verdict: str


class VerdictShown(BaseModel):
    """`verdict` is the record of orchestrator/judging/verdict.py; a number that is not finite is null."""

    model_config = ConfigDict(extra="forbid")
    run: AbShown
    verdict: dict[str, Any]


class SlotShown(BaseModel):
    """What should serve on a box; nothing where `variant` is null. `displaced` says what has taken its place."""

    model_config = ConfigDict(extra="forbid")
    box: str
    variant: str | None
    plan: str | None = None
    port: int | None = None
    since_utc: str | None = None
    by: str | None = None
    failed_boots: int | None = None
    displaced: str | None = None


class HistoryShown(BaseModel):
    """An entry of a box's ledger."""

    model_config = ConfigDict(extra="forbid")
    number: int
    at_utc: str
    kind: str
    outcome: str
    variant: str
    by: str
    reason: str
    forced: list[str]
    checks: list[str]
    gap_s: float | None
    hash: str
    run_id: str
    verdict: str


def job(found: Job) -> dict[str, Any]:
    made = {name: getattr(found, name) for name in _JOB}
    made["overrides"] = _words(found.overrides)
    return made


def move(found: Move) -> dict[str, Any]:
    return {name: getattr(found, name) for name in _MOVE}


def event(found: Event) -> dict[str, Any]:
    data = finite(found.data)
    if "overrides" in data:
        data["overrides"] = _words(data["overrides"])
    return {"seq": found.seq, "at_utc": found.at_utc, "job": found.job_id, "kind": found.kind, "data": data}


def ab(entry: catalog.Entry) -> dict[str, Any]:
    tags = ("kind", "box", "gate", "suite", "stack", "verdict")
    times = {"started_s": entry.started_s, "ended_s": entry.ended_s, "status": entry.status}
    return {"run_id": entry.run_id, "name": entry.name, **times, **{tag: entry.tags.get(tag, "") for tag in tags}}


def of_slot(state: Path, box: str) -> dict[str, Any]:
    found, away = slot.load(state, box), slot.displacement(state, box)
    if found is None:
        return {"box": box, "variant": None}
    made = {"box": box, "variant": found.plan.variant, "plan": found.plan.fingerprint, "port": found.plan.port}
    made |= {"since_utc": found.since_utc, "by": found.by, "failed_boots": found.failed_boots}
    return {**made, "displaced": None if away is None else str(away)}


def history(entry: promotions.Entry) -> dict[str, Any]:
    names = ("number", "at_utc", "kind", "outcome", "variant", "by", "reason", "forced", "checks", "gap_s", "hash")
    made = {name: getattr(entry, name) for name in names}
    target = entry.target
    made["run_id"], made["verdict"] = (target.run_id, target.verdict) if target else ("", "")
    return finite(made)


def finite(data: Any) -> Any:
    """JSON has no infinity and no NaN: null stands for them."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _words(overrides: Any) -> list[str]:
    return [word for word in overrides if not word.startswith("paths.")]
