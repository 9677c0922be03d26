"""The queue's events as server-sent events: one reader of the database for all who watch.

A watcher is a number, the last event that it was sent: nothing is kept for it, however slowly it reads. One that takes
nothing for `send_timeout_s` is cut off, and goes on later from `Last-Event-ID`; one whose token is gone is shut out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.errors import UsageError
from orchestrator.schedule.job import Event
from orchestrator.schedule.queue import Queue

PERIOD_S = 0.5
KEEP_ALIVE_S = 15.0
SEND_TIMEOUT_S = 30.0
KEPT = 2_000  # events in memory; who is further behind reads the database
PAGE = 500
MAX_WATCHERS = 200


class Feed:
    """`run` is a task of the server's loop. `stopping` ends it and every stream."""

    def __init__(
        self, queue: Queue, encode: Callable[[Event], bytes], stopping: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self.queue, self.encode, self.stopping, self.say = queue, encode, stopping, say
        self.seq, self.watchers = queue.last_seq(), 0
        self._kept: deque[tuple[int, int | None, bytes]] = deque(maxlen=KEPT)
        self._from = self.seq  # what came after it is in _kept
        self._news = asyncio.Event()

    async def run(self) -> None:
        while not self.stopping():
            try:
                found = await asyncio.to_thread(self.queue.events, self.seq, None, PAGE)
            except UsageError as error:
                self.say(f"the events cannot be read: {error}")
                found = []
            for event in found:
                if len(self._kept) == KEPT:
                    self._from = self._kept[0][0]
                self._kept.append((event.seq, event.job_id, self._text(event)))
                self.seq = event.seq
            if found:
                self._wake()
            if len(found) < PAGE:
                await asyncio.sleep(PERIOD_S)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _text(self, event: Event) -> bytes:
        return b"id: %d\ndata: %s\n\n" % (event.seq, self.encode(event))

    async def after(self, seq: int, job_id: int | None) -> tuple[int, bytes]:
        """(number of the last event looked at, the text of those that are asked for): empty after KEEP_ALIVE_S."""
        news = self._news
        if seq >= self.seq:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await news.wait()
            except TimeoutError:
                return seq, b""
        if seq >= self._from:
            found = [kept for kept in self._kept if kept[0] > seq][:PAGE]
            last = found[-1][0] if found else seq
            return last, b"".join(text for _, job, text in found if job_id in (None, job))
        events = await asyncio.to_thread(self.queue.events, seq, job_id, PAGE)
        if not events:
            return self._from, b""
        return events[-1].seq, b"".join(self._text(event) for event in events)


class EventStream(Response):
    """The events after number `after`, until the client goes, reads nothing for too long, may read no longer
    (`allowed`, asked every PERIOD_S), or the server ends."""

    def __init__(
        self,
        feed: Feed,
        after: int,
        job_id: int | None,
        send_timeout_s: float = SEND_TIMEOUT_S,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.feed, self.seq, self.job_id, self.send_timeout_s = feed, after, job_id, send_timeout_s
        self.allowed = allowed
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.feed.watchers += 1
        try:
            refused = asyncio.create_task(self._refused())
            ends = {asyncio.create_task(_gone(receive)), asyncio.create_task(self._stream(send)), refused}
            done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()
            if done == {refused}:
                await self._end(send)
        except TimeoutError:
            self.feed.say("a watcher was cut off: it read nothing for too long")
        finally:
            self.feed.watchers -= 1

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b": events follow\n\n", "more_body": True})
        while not self.feed.stopping():
            self.seq, text = await self.feed.after(self.seq, self.job_id)
            async with asyncio.timeout(self.send_timeout_s):
                await send({"type": "http.response.body", "body": text or b": alive\n\n", "more_body": True})
        await self._end(send)

    async def _end(self, send: Send) -> None:
        async with asyncio.timeout(self.send_timeout_s):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _refused(self) -> None:
        await asyncio.sleep(PERIOD_S)
        while self.allowed():
            await asyncio.sleep(PERIOD_S)
        self.feed.say("a watcher was shut out: its token is gone")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def wanted_after(request: Request, after: int | None, newest: int) -> int:
    """Where a stream begins: `Last-Event-ID` of a client that comes back, else `after`, else now."""
    last = request.headers.get("last-event-id", "")
    if last.isdecimal() and len(last) <= 18:
        return int(last)
    return newest if after is None else after
