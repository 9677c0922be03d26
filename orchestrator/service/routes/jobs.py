"""The queue's jobs, and the stream of what happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from starlette.responses import Response

from orchestrator.schedule.job import OPEN, JobState
from orchestrator.service import shown, submission
from orchestrator.service.context import Serving, Who
from orchestrator.service.feed import EventStream, wanted_after
from orchestrator.service.routes import LARGEST, Key, Limit, Number, keyed, made, scope
from orchestrator.service.submission import Name, Submission

router = APIRouter(prefix="/v1")
STREAM = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("/jobs", response_model=list[shown.JobShown], **scope("read"))
def list_jobs(
    service: Serving,
    state: Annotated[list[JobState] | None, Query(max_length=7)] = None,
    box: Annotated[Name | None, Query()] = None,
    limit: Limit = 100,
    after: Annotated[int, Query(ge=0, le=LARGEST, description="last id of the page before")] = 0,
    newest_first: bool = False,
) -> Response:
    """One page, by id. `x-total` is the number of all jobs that are queued, running or paused."""
    found, count = service.queue.page(state or (), box, limit, after, newest_first)
    total = sum(count[name] for name in OPEN)
    return service.answer([shown.job(job) for job in found], **{"x-total": str(total)})


@router.get("/jobs/{job_id}", response_model=shown.JobShown, **scope("read"))
def job(service: Serving, job_id: Number) -> Response:
    return service.answer(shown.job(service.queue.get(job_id)))


@router.post("/jobs", status_code=201, response_model=shown.JobShown, responses=made(shown.JobShown), **scope("run"))
async def submit(service: Serving, who: Who, body: Submission, idempotency_key: Key = None) -> Response:
    """Queue an A/B; it starts in its window. The same key with the same body is the same job."""
    words = submission.words(body, service.places, service.boxes)
    asked = await service.worker.run(submission.composed, words, f"token {who}")
    asked = replace(asked, idempotency_key=keyed(who, idempotency_key))
    job, new = await asyncio.to_thread(service.queue.add, asked)
    service.wake()
    return service.answer(shown.job(job), 201 if new else 200, location=f"/v1/jobs/{job.id}")


@router.post("/jobs/{job_id}/cancel", response_model=shown.JobShown, **scope("run"))
def cancel(service: Serving, who: Who, job_id: Number) -> Response:
    """A job that waits is cancelled; one that runs stops at its next boot boundary."""
    job = service.queue.cancel(job_id, f"cancelled by token {who}")
    service.wake()
    return service.answer(shown.job(job))


@router.get("/events", status_code=200, response_class=EventStream, responses=STREAM, **scope("read"))
async def events(
    service: Serving,
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
    job: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
) -> Response:
    """What happens, as server-sent events whose ids count up; without `after`, from now on."""
    if service.feed.watchers >= service.most_watchers:
        raise HTTPException(503, f"{service.most_watchers} clients watch already")
    token = request.scope["state"]["token"]
    start = wanted_after(request, after, service.feed.seq)
    return EventStream(service.feed, start, job, service.send_timeout_s, lambda: service.tokens.has(token))
