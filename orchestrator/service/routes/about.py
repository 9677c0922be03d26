"""The server itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from orchestrator.service.context import Serving
from orchestrator.service.document import document
from orchestrator.service.gatekeeper import PUBLIC
from orchestrator.service.routes import scope

router = APIRouter()


@router.get("/health", response_model=dict[str, str], **scope(PUBLIC))
async def health(service: Serving) -> Response:
    return service.answer({"status": "ok"})


@router.get("/openapi.json", response_model=dict[str, Any], **scope("read"))
async def openapi(service: Serving, request: Request) -> Response:
    return service.answer(document(request.app))
