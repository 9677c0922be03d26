"""A/Bs and what was decided of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from fastapi import Path as InPath
from starlette.responses import Response

from orchestrator.recorded import catalog
from orchestrator.service import shown
from orchestrator.service.context import Serving
from orchestrator.service.routes import Limit, RunId, an_ab, scope

router = APIRouter(prefix="/v1/verdicts")


@router.get("", response_model=list[shown.AbShown], **scope("read"))
def verdicts(service: Serving, limit: Limit = 100) -> Response:
    """A/Bs and sweeps with their verdicts as recorded, newest first."""
    found = [entry for entry in catalog.entries(service.tracking) if entry.is_ab and not entry.is_published]
    return service.answer([shown.ab(entry) for entry in found[:limit]])


@router.get("/{run_id}", response_model=shown.VerdictShown, **scope("read"))
async def verdict(service: Serving, run_id: Annotated[RunId, InPath()]) -> Response:
    """The verdict of one A/B, computed again from its records."""
    return service.answer(await service.worker.run(_recomputed, service.tracking, run_id))


def _recomputed(tracking: Path, run_id: str) -> dict[str, Any]:
    from orchestrator.abtest import attempts
    from orchestrator.records import to_jsonable

    entry = an_ab(tracking, run_id)
    if entry.tags.get("kind") == "sweep":
        raise HTTPException(409, "this run is a sweep; ask for one of its A/Bs")
    return {"run": shown.ab(entry), "verdict": shown.finite(to_jsonable(attempts.recomputed(tracking, entry)))}
