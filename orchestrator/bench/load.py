"""A closed loop of requests: a fixed number in flight until the list is done, and whether this process kept up.

What says that it did not: a timer of this process that fires late, and slots of the loop that stand empty between
two requests. Either makes a server look slower than it is, so a bench that sees one is invalid.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy

from orchestrator.completion import Completion

Job = TypeVar("Job")
_TICK_S = 0.02
MAX_LAG_P99_MS = 100.0
MIN_OFFERED_SHARE = 0.95


@dataclass(frozen=True)
class Load:
    """What one closed loop did. `completions` are in the order of the jobs."""

    completions: tuple[Completion, ...]
    requested_concurrency: int
    client_lag_ms: tuple[float, ...]  # how late a 20 ms timer of this process fired, over the whole loop
    offered_share: float = 1.0  # of the slots' time, first request called to last one ended, that a request filled

    @property
    def span_s(self) -> float:
        """First request written until last request ended, failed requests included."""
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
        return lag_p99_ms(self.client_lag_ms)

    def fell_behind(self, max_lag_p99_ms: float = MAX_LAG_P99_MS, min_offered_share: float = MIN_OFFERED_SHARE) -> str:
        """Why the numbers would be the client's and not the server's; empty where it kept up."""
        if self.client_lag_p99_ms > max_lag_p99_ms:
            return lagged(self.client_lag_ms, max_lag_p99_ms)
        if self.offered_share < min_offered_share:
            return (
                f"the client fell behind: it offered {100 * self.offered_share:.1f}% of the load of "
                f"{self.requested_concurrency} streams"
            )
        return ""


def lag_p99_ms(lag_ms: Sequence[float]) -> float:
    return float(numpy.percentile(lag_ms, 99)) if lag_ms else 0.0


def lagged(lag_ms: Sequence[float], max_lag_p99_ms: float) -> str:
    """A reason where this process' timer was late, else empty."""
    if (late_ms := lag_p99_ms(lag_ms)) > max_lag_p99_ms:
        return f"the client fell behind: its timer was {late_ms:.0f} ms late (p99)"
    return ""


async def closed_loop(
    jobs: Sequence[Job],
    concurrency: int,
    request: Callable[[Job], Awaitable[Completion]],
    on_done: Callable[[], None] = lambda: None,
) -> Load:
    """Send every job, at most `concurrency` in flight; a request's time starts when it is written, not queued."""
    completions: dict[int, Completion] = {}
    waiting = iter(enumerate(jobs))
    slots: list[tuple[int, int]] = []  # (nanoseconds that requests filled, nanoseconds from the first to the last)
    slot_count = min(concurrency, len(jobs))

    async def stream() -> None:
        filled_ns, first_ns, last_ns = 0, 0, 0
        for number, job in waiting:
            done = completions[number] = await request(job)
            filled_ns += done.end_ns - done.sent_ns
            first_ns = first_ns or done.sent_ns
            last_ns = done.end_ns
            on_done()
        slots.append((filled_ns, last_ns - first_ns))

    with watched_lag() as lag_ms:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(slot_count):
                    group.create_task(stream())
        except ExceptionGroup as failed:  # one line about the first is what a reader can act on
            raise failed.exceptions[0] from failed
    whole_ns = sum(whole for _, whole in slots)
    return Load(
        tuple(completions[number] for number in range(len(jobs))),
        concurrency,
        tuple(lag_ms),
        sum(filled for filled, _ in slots) / whole_ns if whole_ns else 1.0,
    )


@contextmanager
def watched_lag() -> Iterator[list[float]]:
    """A list that grows by how late a 20 ms timer of the running loop fires (ms); the last tick at the block's end.

    The objects that this process already holds are kept from the garbage collector meanwhile: walking through them
    stops the clock for tens of milliseconds.
    """
    loop = asyncio.get_running_loop()
    lag_ms: list[float] = []

    def tick() -> None:
        nonlocal due_s, timer
        now_s = time.perf_counter()  # libuv's own clock counts whole milliseconds
        lag_ms.append(max(0.0, 1e3 * (now_s - due_s)))
        due_s = now_s + _TICK_S
        timer = loop.call_later(_TICK_S, tick)

    gc.freeze()
    due_s = time.perf_counter() + _TICK_S
    timer = loop.call_later(_TICK_S, tick)
    try:
        yield lag_ms
    finally:
        lag_ms.append(max(0.0, 1e3 * (time.perf_counter() - due_s)))  # a block that never let the loop run is late too
        timer.cancel()
        gc.unfreeze()
