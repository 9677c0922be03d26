"""One streamed request and its answer, with the time of each read.

A read is stamped and kept, and no task wakes for it. HTTP and events are parsed a slice of reads at a time, each stream
in a turn of its own, so that streams whose tokens come at one time do not hold up each other's clock, and the end of a
stream leaves little to do before the next request. aiohttp wakes a task for each read, which is more than half of the
CPU time of a token and as much of its delay.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from orchestrator.completion import Completion, CompletionReader

_END = b"data: [DONE]\n\n"
_ENDS = (b"[DONE]", b"0\r\n\r\n")  # of a stream that writes it in another way, and of a chunked body
_END_BYTES = 48  # at the end of what was read, in which one of them may stand
_SLICE = 32  # reads parsed at once: about 0.3 ms
_turns = itertools.count()
_REFUSAL_BYTES = 2000


@dataclass(frozen=True)
class Timeouts:
    """Seconds a phase of a request may take."""

    connect_s: float = 10.0  # asked for until written
    first_token_s: float = 300.0  # from then until the first token
    between_tokens_s: float = 60.0  # from one token to the next, and from the last one to the end
    total_s: float = 1800.0


async def exchange(base_url: str, path: str, body: Mapping[str, Any], limits: Timeouts) -> Completion:
    """POST `body` on a connection of its own and record the stream; never raises for what the server does."""
    place = urlsplit(base_url)
    content = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {place.path}{path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    this = _Exchange(head.encode() + content, limits, body.get("max_tokens"))
    secure = place.scheme == "https"
    broken = ""
    try:
        async with this.limit:
            await asyncio.get_running_loop().create_connection(
                lambda: this, place.hostname, place.port or (443 if secure else 80), ssl=secure or None
            )
            await this.ended
    except OSError as failure:  # a TimeoutError is one
        broken = f"{type(failure).__name__}: {failure}"
    finally:
        this.close()
    ended_ns = time.perf_counter_ns()
    while this.parse():
        await asyncio.sleep(0)
    return this.completion(ended_ns, broken)


class _Exchange(asyncio.Protocol):
    """The connection. `limit` ends it when a phase takes too long.

    It is looked at once in the shortest of the limits and not at each read, so no limit is passed unseen; how far the
    answer got is parsed then, a slice at a time.
    """

    def __init__(self, request: bytes, limits: Timeouts, max_tokens: int | None) -> None:
        self.limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._request, self._limits = request, limits
        self._called_ns = time.perf_counter_ns()
        self._sent_ns: int | None = None
        self._transport: asyncio.Transport | None = None
        self._reads: list[tuple[int, bytes]] = []
        self._is_stream = False
        self._tail = b""
        self._lost = ""
        self._expired = ""
        self._period_s = min(limits.connect_s, limits.first_token_s, limits.between_tokens_s, limits.total_s)
        self._timer = self._loop.call_later(self._period_s, self._look)

        self._parser = httptools.HttpResponseParser(self)
        self._parsed = 0  # reads
        self._slice_at = 1 + next(_turns) % _SLICE  # reads that wait before the first slice
        self._status = 0
        self._framed = False  # the head says where the body ends
        self._complete = False
        self._refusal = b""
        self._at_ns = 0
        self._reader = CompletionReader(max_tokens)

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # libuv's is none by class
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reads.append((time.perf_counter_ns(), data))
        if len(self._reads) == 1:  # an answer of a known length is parsed at once
            self._is_stream = data.startswith(b"HTTP/1.1 200 ") and b"content-length:" not in data.lower()
        if self._is_stream:
            self._tail = (self._tail + data)[-_END_BYTES:]
            if data.find(_END, -64) >= 0:
                self._end()
            elif any(end in self._tail for end in _ENDS):
                self._end_if_over()
            elif len(self._reads) - self._parsed >= self._slice_at:
                self._slice_at = _SLICE
                self.parse()
        else:
            self._end_if_over()

    def connection_lost(self, failure: Exception | None) -> None:
        self._lost = f"{type(failure).__name__}: {failure}" if failure else "closed by the server"
        self._end()

    def _end_if_over(self) -> None:
        while self.parse():
            pass
        if self._complete or self._reader.done:
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # limits

    def _look(self) -> None:
        if self.parse():
            self._timer = self._loop.call_later(0.005, self._look)
            return
        due_ns, why = self._due()
        left_s = (due_ns - time.perf_counter_ns()) / 1e9
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._period_s), self._look)
        else:
            self._expired = why
            self.limit.reschedule(self._loop.time())

    def _due(self) -> tuple[int, str]:
        """When the first limit passes, and what to say then."""
        limits, tokens = self._limits, self._reader.tokens
        total_ns = self._called_ns + int(1e9 * limits.total_s)
        if self._sent_ns is None:
            due_ns = self._called_ns + int(1e9 * limits.connect_s)
            why = f"timed out connecting ({limits.connect_s:g} s)"
        elif not tokens:
            due_ns = self._sent_ns + int(1e9 * limits.first_token_s)
            why = f"timed out before the first token ({limits.first_token_s:g} s)"
        else:
            due_ns = self._reader.token_ns + int(1e9 * limits.between_tokens_s)
            why = f"timed out between tokens ({limits.between_tokens_s:g} s) after {tokens} tokens"
        if total_ns <= due_ns:
            return total_ns, f"timed out in total ({limits.total_s:g} s) after {tokens} tokens"
        return due_ns, why

    # what is read

    def parse(self) -> bool:
        """Parse the next slice; False where nothing is left."""
        for at_ns, data in self._reads[self._parsed : self._parsed + _SLICE]:
            self._at_ns = at_ns
            self._parsed += 1
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self._lost = self._lost or f"no HTTP: {error}"
                self._parsed = len(self._reads)
                self._end()
        return self._parsed < len(self._reads)

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"transfer-encoding", b"content-length")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self._reader.feed(body, self._at_ns)
        else:
            self._refusal = (self._refusal + body)[:_REFUSAL_BYTES]

    def on_message_complete(self) -> None:
        self._complete = self._status >= 200  # an interim answer is followed by the real one

    def completion(self, ended_ns: int, broken: str) -> Completion:
        """The record, when all is parsed. `broken` is why there is no connection."""
        reader, called_ns = self._reader, self._called_ns
        sent_ns = called_ns if self._sent_ns is None else self._sent_ns
        if reader.done:  # what came after the end of the stream is none of its time
            return reader.finish(sent_ns, reader.last_ns, called_ns=called_ns)
        if self._expired:
            error = self._expired
        elif self._status not in (0, 200):
            error = f"HTTP {self._status}: {one_line(self._refusal)}"
        elif self._complete or (self._status == 200 and not self._framed and self._lost == "closed by the server"):
            error = ""  # a whole body: what it lacks, the reader says
        else:
            error = f"connection broken after {reader.tokens} tokens: {broken or self._lost}"
        return reader.finish(sent_ns, ended_ns, error, called_ns=called_ns)


def one_line(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:300]
