"""What serves on each box, what served before, and moves: promotions and rollbacks that were asked for here."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from orchestrator import slot
from orchestrator.promoting import promotions
from orchestrator.service import shown
from orchestrator.service.context import Service, Serving, Who
from orchestrator.service.moves import Move
from orchestrator.service.routes import LARGEST, Box, Key, Limit, Number, RunId, an_ab, keyed, made, require_box, scope

router = APIRouter(prefix="/v1")
ASKED = {"status_code": 202, "response_model": shown.MoveShown, "responses": made(shown.MoveShown), **scope("promote")}


class Promotion(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run_id: RunId


class Rollback(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: Annotated[int, Field(ge=1, le=LARGEST)] | None = None


@router.get("/prod", response_model=list[shown.SlotShown], **scope("read"))
def prod(service: Serving) -> Response:
    """What should serve on each box."""
    return service.answer([shown.of_slot(service.state, box) for box in slot.boxes(service.state)])


@router.get("/prod/{box}/history", response_model=list[shown.HistoryShown], **scope("read"))
def history(service: Serving, box: Box) -> Response:
    """The ledger of the box, oldest first, verified."""
    require_box(box)
    return service.answer([shown.history(entry) for entry in promotions.read(service.state, box)])


@router.post("/prod/{box}/promote", **ASKED)
def promote(service: Serving, who: Who, box: Box, body: Promotion, idempotency_key: Key = None) -> Response:
    """Make arm B of an A/B that passed the prod of the box. It is checked as `promote` does; nothing is forced."""
    _require_here(service, box)
    entry = an_ab(service.tracking, body.run_id)
    return _ask(service, Move("promote", box, run_id=entry.run_id, by=who), idempotency_key)


@router.post("/prod/{box}/rollback", **ASKED)
def rollback(service: Serving, who: Who, box: Box, body: Rollback, idempotency_key: Key = None) -> Response:
    """Back to what served before, or to what entry `to` of the history served."""
    _require_here(service, box)
    return _ask(service, Move("rollback", box, to=body.to, by=who), idempotency_key)


@router.get("/moves", response_model=list[shown.MoveShown], **scope("read"))
def list_moves(service: Serving, limit: Limit = 100) -> Response:
    """Newest first."""
    return service.answer([shown.move(move) for move in service.moves.list(limit)])


@router.get("/moves/{move_id}", response_model=shown.MoveShown, **scope("read"))
def move(service: Serving, move_id: Number) -> Response:
    return service.answer(shown.move(service.moves.get(move_id)))


def _require_here(service: Service, box: str) -> None:
    """Raises HTTPException for a box that is not shipped, or that this machine neither is nor ever served as."""
    require_box(box)
    if service.boxes is None or box in {*service.boxes, *slot.boxes(service.state), *promotions.boxes(service.state)}:
        return
    raise HTTPException(404, f"this machine is no {box}; it is: {', '.join(service.boxes)}")


def _ask(service: Service, move: Move, key: str | None) -> Response:
    move, new = service.moves.add(replace(move, idempotency_key=keyed(move.by, key)))
    if new:
        service.queue.log("move queued", None, move=move.id, asked=move.kind, box=move.box, by=move.by)
    service.wake()
    return service.answer(shown.move(move), 202 if new else 200, location=f"/v1/moves/{move.id}")
