"""An OpenAI-compatible server that does what a script says, and remembers when it did it.

Its tokenizer is bytes: token id = byte value. Its times are `time.perf_counter_ns` of this process, so that a
client in the same process can be compared with them directly.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
from aiohttp import web

from orchestrator.records import Target

MODEL = "truth-0123"
VOCABULARY = 256


@dataclass
class Script:
    ttft_s: float = 0.01
    ttft_s_per_prompt_token: float = 0.0
    gap_s: float = 0.002
    pattern: tuple[int, ...] = (1,)  # tokens of each update after the first, repeated
    role_chunk: bool = True
    role_chunk_usage: int = 0
    role_lead_s: float = 0.0  # how long before the first token the role chunk is sent
    fault: str = ""
    fault_every: int = 1  # 1: each request, 2: each second one, ...
    fault_after_updates: int = 3
    usage_per_update: bool = True
    cached_tokens: int = 0  # prompt tokens of each request served from the prefix cache
    drafter: bool = False  # count updates after the first as verified drafts
    draft_tokens: int = 4
    stop_after: int = 0  # tokens after which a chat ends with "stop"; 0: never
    reply: Callable[[str], str] | None = None  # last user message -> text of the chat's answer
    temperature: float = 1.0  # of the scripted next-token distribution
    prefix_counters: bool = True
    preempted_per_request: int = 0  # what each request adds to the counter of preemptions


@dataclass
class Sent:
    """What the server did for one stream."""

    path: str
    body: dict[str, Any]
    received_ns: int = 0
    update_ns: list[int] = field(default_factory=list)
    update_tokens: list[int] = field(default_factory=list)


class TruthServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.sent: list[Sent] = []
        self.counters = {"queries": 0, "hits": 0, "preemptions": 0, "drafts": 0, "draft_tokens": 0, "accepted": 0}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        names = {
            "queries": "prefix_cache_queries",
            "hits": "prefix_cache_hits",
            "preemptions": "num_preemptions",
            "drafts": "spec_decode_num_drafts",
            "draft_tokens": "spec_decode_num_draft_tokens",
            "accepted": "spec_decode_num_accepted_tokens",
        }
        cache = self.script.prefix_counters
        shown = {"queries": cache, "hits": cache, "preemptions": True}
        page = ""
        for key, name in names.items():
            if shown.get(key, self.script.drafter):
                page += f'# TYPE vllm:{name} counter\nvllm:{name}_total{{engine="0"}} {self.counters[key]}.0\n'
        return web.Response(text=page)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": list((await request.json())["prompt"].encode())})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode(errors="replace")})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.perf_counter_ns()
        body = await request.json()
        if body["model"] != MODEL:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        if "prompt_logprobs" in body:
            return self._prompt_logprobs(body)
        record = Sent(request.path, body, received_ns)
        self.sent.append(record)
        faulty = bool(self.script.fault) and len(self.sent) % self.script.fault_every == 0
        return await self._stream(request, record, self.script.fault if faulty else "")

    def _prompt_logprobs(self, body: dict[str, Any]) -> web.Response:
        if self.script.fault == "http500":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        positions: list[Any] = [None]
        for before, actual in zip(body["prompt"], body["prompt"][1:], strict=False):
            logprobs = next_logprobs(before, self.script.temperature)
            order = numpy.argsort(-logprobs)
            kept = dict.fromkeys([*order[: body["prompt_logprobs"]].tolist(), actual])
            positions.append({str(token): {"logprob": float(logprobs[token]), "rank": 1} for token in kept})
        return web.json_response({"choices": [{"text": "a", "prompt_logprobs": positions}]})

    async def _stream(self, request: web.Request, record: Sent, fault: str) -> web.StreamResponse:
        script, body = self.script, record.body
        if fault == "http500":
            return web.json_response({"error": {"message": "engine is dead"}}, status=500)
        chat = record.path.endswith("chat/completions")
        prompt_tokens = _prompt_tokens(body)
        self.counters["queries"] += prompt_tokens
        self.counters["hits"] += script.cached_tokens
        self.counters["preemptions"] += script.preempted_per_request
        updates, finish_reason = self._updates(body, chat)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first_ns = record.received_ns + int(1e9 * (script.ttft_s + prompt_tokens * script.ttft_s_per_prompt_token))
        if chat and script.role_chunk:
            await _until(first_ns - int(1e9 * script.role_lead_s))
            choice = {"delta": {"role": "assistant", "content": ""}}
            await _send(response, choice, self._usage(prompt_tokens, script.role_chunk_usage, script.usage_per_update))
        total = 0
        for number, (text, tokens) in enumerate(updates):
            if fault and number == script.fault_after_updates:
                if fault == "stall":
                    await asyncio.sleep(30)
                if fault == "fin":
                    assert request.transport is not None
                    request.transport.close()
                    return response
                if fault == "error_event":
                    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                    break
                if fault == "truncated":
                    return response
            if fault == "never":
                await asyncio.sleep(30)
            await _until(first_ns + int(1e9 * number * script.gap_s))
            total += tokens
            last = number == len(updates) - 1 and fault != "no_finish_reason"
            choice = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = finish_reason if last else None
            record.update_ns.append(time.perf_counter_ns())
            record.update_tokens.append(tokens)
            if script.drafter and number:
                self.counters["drafts"] += 1
                self.counters["draft_tokens"] += script.draft_tokens
                self.counters["accepted"] += tokens - 1
            await _send(response, choice, self._usage(prompt_tokens, total, script.usage_per_update))
        if fault not in ("no_usage", "error_event"):
            claimed = total + 7 if fault == "lying_usage" else total
            await _send(response, None, self._usage(prompt_tokens, claimed, True))
        if fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _updates(self, body: dict[str, Any], chat: bool) -> tuple[list[tuple[str, int]], str]:
        """[(text, tokens)] of each update, and the finish reason."""
        limit = body["max_tokens"]
        if chat and self.script.reply:
            words = self.script.reply(body["messages"][-1]["content"]).split(" ")
            text = [word + " " for word in words[:limit]]
            return [(part, 1) for part in text], "stop" if len(words) <= limit else "length"
        total = min(limit, max(self.script.stop_after, body.get("min_tokens", 0)) or limit) if chat else limit
        sizes, left, number = [1], total - 1, 0
        while left > 0:
            sizes.append(min(left, self.script.pattern[number % len(self.script.pattern)]))
            left -= sizes[-1]
            number += 1
        return [("x" * size, size) for size in sizes], "length" if total == limit else "stop"

    def _usage(self, prompt_tokens: int, completion_tokens: int, shown: bool) -> dict[str, Any] | None:
        if not shown:
            return None
        details = {"prompt_tokens_details": {"cached_tokens": self.script.cached_tokens}}
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}


def next_logprobs(before: int, temperature: float) -> numpy.ndarray:
    """The scripted distribution after token `before`: float64 (VOCABULARY,) log probabilities in nats."""
    logits = numpy.random.default_rng(before).normal(0.0, 3.0, VOCABULARY) / temperature
    return logits - numpy.log(numpy.exp(logits).sum())


def _prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return sum(len(message["content"].encode()) for message in body["messages"])
    return len(body["prompt"])


async def _until(at_ns: int) -> None:
    await asyncio.sleep(max(0.0, (at_ns - time.perf_counter_ns()) / 1e9))


async def _send(response: web.StreamResponse, choice: dict[str, Any] | None, usage: dict[str, Any] | None) -> None:
    event: dict[str, Any] = {"choices": [] if choice is None else [choice]}
    if usage is not None:
        event["usage"] = usage
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(script: Script, window_tokens: int = 4096) -> AsyncIterator[tuple[TruthServer, Target]]:
    """A truth server on a free port of the loopback, and the target that reaches it."""
    server = TruthServer(script)
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    try:
        yield server, Target(f"http://127.0.0.1:{port}", MODEL, window_tokens)
    finally:
        await runner.cleanup()


def ids(text: str, length: int) -> Sequence[int]:
    """`length` token ids of repeated `text`."""
    return list((text * (length // len(text) + 1)).encode()[:length])
