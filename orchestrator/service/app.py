"""The API: JSON only, but for the stream of events; /openapi.json describes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from orchestrator import __version__
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.schedule.queue import KeyReused, NoSuchJob, NotPossible, QueueFull
from orchestrator.service import shown
from orchestrator.service.context import Service
from orchestrator.service.feed import Feed
from orchestrator.service.gatekeeper import Gatekeeper
from orchestrator.service.moves import NoSuchMove
from orchestrator.service.routes import REFUSALS, about, jobs, prod, verdicts
from orchestrator.sqlite_file import Unusable

STATUS = {NoSuchJob: 404, NoSuchMove: 404, KeyReused: 409, NotPossible: 409, QueueFull: 503, Unusable: 503}


def create(service: Service) -> FastAPI:
    """The application; its lifespan reads the events."""
    app = FastAPI(
        title="paro-orchestrator", version=__version__, openapi_url=None, docs_url=None, redoc_url=None,
        lifespan=_running, redirect_slashes=False,
    )  # fmt: skip
    app.state.service = service
    for noun in (about, jobs, verdicts, prod):
        app.include_router(noun.router, responses=REFUSALS)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(OrchestratorError, _wrong)
    app.add_middleware(Gatekeeper, routes=app.router.routes, service=service)
    return app


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.feed = Feed(
        service.queue, lambda event: service.encode(shown.event(event)), service.stopping, service.say
    )  # fmt: skip
    reading = asyncio.create_task(service.feed.run())
    try:
        with service.queue.open_throughout():
            yield
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        service.worker.close()


async def _refused(request: Request, error: HTTPException) -> Response:
    return _service(request).answer({"error": str(error.detail)}, error.status_code, **(error.headers or {}))


async def _malformed(request: Request, error: RequestValidationError) -> Response:
    """Says where, and not what was sent: it may be a secret."""
    found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5]]
    return _service(request).answer({"error": "; ".join(found)[:1000]}, 422)


async def _wrong(request: Request, error: OrchestratorError) -> Response:
    usage = 422 if isinstance(error, UsageError) else 503
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), usage)
    if status == 503:
        _service(request).say(f"refused: {error}")
    return _service(request).answer({"error": str(error)}, status)


def _service(request: Request) -> Service:
    return request.app.state.service
