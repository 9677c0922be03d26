"""The HTTP client of one server: streamed completions with arrival times, and the endpoints around them.

While a stream runs, a read costs its time and its bytes and nothing else; the events are parsed when the stream has
ended, in slices, so that the clock of the other streams is not held up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from orchestrator.completion import Completion, CompletionReader
from orchestrator.errors import InvalidMeasurement
from orchestrator.metrics import Snapshot, parse
from orchestrator.records import Target

__all__ = ["Client", "Completion", "Timeouts"]

_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


_END = b"data: [DONE]\n\n"
_SLICE = 32  # reads parsed at once: about 0.2 ms


@dataclass(frozen=True)
class Timeouts:
    """Seconds a phase of a request may take."""

    connect_s: float = 10.0  # called until the request's head is written
    first_token_s: float = 300.0  # from then until the first token
    between_tokens_s: float = 60.0  # from one token to the next, and from the last one to the end
    total_s: float = 1800.0


class Client:
    """An open session with `target`; use as `async with`.

    Every request has a connection of its own: a kept-alive one can be closed by the server at the moment it is
    used again, which would count as an error of the server. Opening it is not part of any latency.
    """

    def __init__(self, target: Target, timeouts: Timeouts | None = None) -> None:
        self.target = target
        self.timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        trace = aiohttp.TraceConfig()

        async def note_sent(_session: Any, context: SimpleNamespace, _params: Any) -> None:
            context.trace_request_ctx["sent_ns"] = time.perf_counter_ns()

        trace.on_request_headers_sent.append(note_sent)
        self._session = aiohttp.ClientSession(
            base_url=self.target.base_url,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, prompt: str | Sequence[int], max_tokens: int, **sampling: Any) -> Completion:
        """POST /v1/completions with text or token ids; never raises for what the server does."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens}
        return await self._stream("/v1/completions", {**body, **sampling})

    async def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **sampling: Any) -> Completion:
        """POST /v1/chat/completions; never raises for what the server does."""
        body = {"messages": list(messages), "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", {**body, **sampling})

    async def _stream(self, path: str, body: Mapping[str, Any]) -> Completion:
        assert self._session is not None
        marks = {"called_ns": time.perf_counter_ns()}  # and "sent_ns" when the head is written
        reads: list[tuple[int, bytes]] = []
        watch = _Watch(self.timeouts, marks, reads)
        refused = broken = ""
        try:
            async with (
                watch.limit,
                self._session.post(
                    path, json={"model": self.target.model, **body, **_STREAM}, trace_request_ctx=marks
                ) as response,
            ):
                if response.status != 200:
                    refused = f"HTTP {response.status}: {_one_line(await response.content.read(2000))}"
                else:
                    async for data in response.content.iter_any():
                        reads.append((time.perf_counter_ns(), data))
                        if data.endswith(_END):
                            break
        except TimeoutError:
            pass  # `watch.expired` says which
        except (aiohttp.ClientError, OSError) as failure:
            broken = f"{type(failure).__name__}: {failure}"
        finally:
            watch.stop()
        ended_ns = time.perf_counter_ns()
        while watch.parse():
            await asyncio.sleep(0)
        reader = watch.reader
        if reader.done:  # what came after the end of the stream is none of its time
            return reader.finish(marks["sent_ns"], reader.last_ns, called_ns=marks["called_ns"])
        if broken:
            broken = f"connection broken after {reader.tokens} tokens: {broken}"
        sent_ns = marks.get("sent_ns", marks["called_ns"])
        return reader.finish(sent_ns, ended_ns, refused or watch.expired or broken, called_ns=marks["called_ns"])

    async def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list((await self._ask("/tokenize", body))["tokens"])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": list(token_ids)}))["prompt"])

    async def prompt_logprobs(self, token_ids: Sequence[int], top_k: int) -> list[dict[int, float]]:
        """Log probabilities (nats) of the `top_k` likeliest tokens and the actual one, at positions 1..T-1.

        Entry i belongs to position i + 1: what the model expected after `token_ids[: i + 1]`.
        Raises InvalidMeasurement where the server does not answer with T - 1 full positions.
        """
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        answer = await self._ask("/v1/completions", body)
        positions = answer["choices"][0].get("prompt_logprobs") or []
        if len(positions) != len(token_ids) or any(not entry for entry in positions[1:]):
            raise InvalidMeasurement(
                f"prompt_logprobs: {len(positions)} positions for {len(token_ids)} tokens, or an empty one"
            )
        return [{int(token): float(value["logprob"]) for token, value in entry.items()} for entry in positions[1:]]

    async def healthy(self) -> bool:
        try:
            await self._fetch("GET", "/health")
        except InvalidMeasurement:
            return False
        return True

    async def models(self) -> list[str]:
        """The ids in /v1/models."""
        return [entry["id"] for entry in json.loads(await self._fetch("GET", "/v1/models"))["data"]]

    async def metrics(self) -> Snapshot:
        return parse((await self._fetch("GET", "/metrics")).decode())

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return json.loads(await self._fetch("POST", path, json={"model": self.target.model, **body}))
        except ValueError as error:
            raise InvalidMeasurement(f"POST {path}: the answer is not JSON") from error

    async def _fetch(self, method: str, path: str, **request: Any) -> bytes:
        """The body of a 200 answer; raises InvalidMeasurement for everything else."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self.timeouts.connect_s + self.timeouts.first_token_s),
                self._session.request(method, path, trace_request_ctx={}, **request) as response,
            ):
                body = await response.read()
        except TimeoutError as error:
            raise InvalidMeasurement(f"{method} {path}: timed out") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InvalidMeasurement(f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise InvalidMeasurement(f"{method} {path}: HTTP {response.status}: {_one_line(body)}")
        return body


def _one_line(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:300]


class _Watch:
    """Ends a request whose phase takes too long.

    It looks once in the shortest of the limits and not at each read, so no limit is passed unseen; how far the request
    got is parsed then, a slice at a time.
    """

    def __init__(self, limits: Timeouts, marks: Mapping[str, int], reads: Sequence[tuple[int, bytes]]) -> None:
        self.limit = asyncio.timeout(None)
        self.reader = CompletionReader()
        self.expired = ""
        self._limits, self._marks, self._reads = limits, marks, reads
        self._parsed = 0
        self._loop = asyncio.get_running_loop()
        self._period_s = min(limits.connect_s, limits.first_token_s, limits.between_tokens_s, limits.total_s)
        self._timer = self._loop.call_later(self._period_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def parse(self) -> bool:
        """Parse the next slice; False where nothing is left."""
        for at_ns, data in self._reads[self._parsed : self._parsed + _SLICE]:
            self.reader.feed(data, at_ns)
            self._parsed += 1
        return self._parsed < len(self._reads)

    def _look(self) -> None:
        if self.parse():
            self._timer = self._loop.call_later(0.005, self._look)
            return
        due_ns, why = self._due()
        left_s = (due_ns - time.perf_counter_ns()) / 1e9
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._period_s), self._look)
        else:
            self.expired = why
            self.limit.reschedule(self._loop.time())

    def _due(self) -> tuple[int, str]:
        """When the first limit passes as far as is parsed, and what to say then."""
        limits, tokens = self._limits, self.reader.tokens
        total_ns = self._marks["called_ns"] + int(1e9 * limits.total_s)
        if "sent_ns" not in self._marks:
            due_ns = self._marks["called_ns"] + int(1e9 * limits.connect_s)
            why = f"timed out connecting ({limits.connect_s:g} s)"
        elif not tokens:
            due_ns = self._marks["sent_ns"] + int(1e9 * limits.first_token_s)
            why = f"timed out before the first token ({limits.first_token_s:g} s)"
        else:
            due_ns = self.reader.token_ns + int(1e9 * limits.between_tokens_s)
            why = f"timed out between tokens ({limits.between_tokens_s:g} s) after {tokens} tokens"
        if total_ns <= due_ns:
            return total_ns, f"timed out in total ({limits.total_s:g} s) after {tokens} tokens"
        return due_ns, why
