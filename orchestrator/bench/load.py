"""A closed loop of requests: a fixed number in flight until the list is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy

from orchestrator.completion import Completion

Job = TypeVar("Job")
_TICK_S = 0.01


@dataclass(frozen=True)
class Load:
    """What one closed loop did. `completions` are in the order of the jobs."""

    completions: tuple[Completion, ...]
    requested_concurrency: int
    client_lag_ms: tuple[float, ...]  # how late a 10 ms timer of this process fired, over the whole loop

    @property
    def span_s(self) -> float:
        """First request written until last token arrived, failed requests included."""
        sent = min(completion.sent_ns for completion in self.completions)
        return (max(completion.end_ns for completion in self.completions) - sent) / 1e9

    @property
    def achieved_concurrency(self) -> float:
        """Mean number of requests in flight over the span."""
        busy_ns = sum(completion.end_ns - completion.sent_ns for completion in self.completions)
        return busy_ns / 1e9 / self.span_s if self.span_s > 0 else 0.0

    @property
    def tok_per_s(self) -> float:
        """Tokens of the good requests per second; a failed request is left out together with its share of the time."""
        good = [completion for completion in self.completions if not completion.error]
        busy_ns = sum(completion.end_ns - completion.sent_ns for completion in self.completions)
        good_share = sum(completion.end_ns - completion.sent_ns for completion in good) / busy_ns
        return sum(completion.completion_tokens for completion in good) / (self.span_s * good_share)

    @property
    def client_lag_p99_ms(self) -> float:
        return float(numpy.percentile(self.client_lag_ms, 99)) if self.client_lag_ms else 0.0


async def closed_loop(
    jobs: Sequence[Job],
    concurrency: int,
    request: Callable[[Job], Awaitable[Completion]],
    on_done: Callable[[], None] = lambda: None,
) -> Load:
    """Send every job, at most `concurrency` in flight; a request's time starts when it is written, not queued."""
    completions: dict[int, Completion] = {}
    waiting = iter(enumerate(jobs))

    async def stream() -> None:
        for number, job in waiting:
            completions[number] = await request(job)
            on_done()

    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(lags))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(stream())
    except ExceptionGroup as failed:  # one line about the first is what a reader can act on
        raise failed.exceptions[0] from failed
    finally:
        watch.cancel()
    return Load(tuple(completions[number] for number in range(len(jobs))), concurrency, tuple(lags))


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, (time.perf_counter() - before_s - _TICK_S) * 1e3))
