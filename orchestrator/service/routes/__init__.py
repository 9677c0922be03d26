"""The routes by noun, and what they share: what a client may write, and the scope that each declares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Header, HTTPException, Query
from fastapi import Path as InPath
from pydantic import BaseModel, Field

from orchestrator import shipped
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog
from orchestrator.schedule.queue import LONGEST_PAGE
from orchestrator.service.gatekeeper import PUBLIC, SCOPE
from orchestrator.service.submission import Name

LARGEST = 2**53
Number = Annotated[int, InPath(ge=1, le=LARGEST)]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{4,32}$")]
Box = Annotated[Name, InPath()]
Limit = Annotated[int, Query(ge=1, le=LONGEST_PAGE)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=r"^[\x21-\x7e]{1,128}$")]


class Error(BaseModel):
    error: str


REFUSALS = {code: {"model": Error} for code in (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 429, 500, 503)}


def scope(name: str) -> dict[str, Any]:
    """Keywords of a route: the scope that it takes, as OpenAPI shows it and the gatekeeper reads it."""
    return {"openapi_extra": {SCOPE: name, "security": [] if name == PUBLIC else [{"bearer": []}]}}


def made(kind: Any) -> dict[int, dict]:
    """The other answer of a route that takes an Idempotency-Key."""
    return {200: {"description": "the earlier one of the same Idempotency-Key", "model": kind}}


def keyed(who: str, key: str | None) -> str | None:
    """A key counts for its token only."""
    return None if key is None else f"{who}:{key}"


def an_ab(tracking: Path, run_id: str) -> catalog.Entry:
    """Raises HTTPException where the run is not one A/B that was measured here."""
    try:
        entry = catalog.find(tracking, run_id)
    except UsageError:
        raise HTTPException(404, f"there is no single run {run_id}") from None
    if not entry.is_ab or entry.is_published:
        raise HTTPException(404, f"run {run_id} is no A/B")
    return entry


def require_box(box: str) -> None:
    if box not in (known := shipped.names("box")):
        raise HTTPException(404, f"there is no box {box!r}; there are: {', '.join(known)}")
