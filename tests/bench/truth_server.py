"""An OpenAI-compatible server that does what a script says, and remembers when it did it.

Its tokenizer is bytes: token id = byte value. Its times are `time.perf_counter_ns`, which on Linux is the machine's
monotonic clock: a client in another process compares its own readings with them directly. A write is noted just
before its system call, so the difference to the client's arrival is never negative.

`serving` runs it in the caller's event loop, `spawned` in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import uvloop
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from orchestrator.records import Target

MODEL = "truth-0123"
VOCABULARY = 256
LIES = 1.1  # what `fault="inflated_usage"` multiplies every count by


@dataclass
class Script:
    ttft_s: float = 0.01
    ttft_spread_s: float = 0.0  # uniform extra, by the number of the request
    ttft_s_per_prompt_token: float = 0.0
    gap_s: float = 0.002
    gap_spread: float = 0.0  # each gap is gap_s times a uniform draw from 1 - spread to 1 + spread
    pattern: tuple[int, ...] = (1,)  # tokens of each update after the first, repeated
    role_chunk: bool = True
    role_chunk_usage: int = 0
    role_lead_s: float = 0.0  # how long before the first token the role chunk is sent
    reasoning_updates: int = 0  # of a chat's first updates, in the channel `reasoning_field`
    reasoning_field: str = "reasoning_content"
    keepalive_s: float = 0.0  # comments of this period before the first token; 0: none
    freeze_s: float = 0.0  # one pause before update `freeze_before`
    freeze_before: int = 5
    split_s: float = 0.0  # pause in the middle of each event
    fault: str = ""
    fault_every: int = 1  # 1: each request, 2: each second one, ...
    fault_after_updates: int = 3
    usage_per_update: bool = True
    cached_tokens: int = 0  # prompt tokens of each request served from the prefix cache
    cache_block_tokens: int = 0  # a real prefix cache of blocks of this size; 0: only what `cached_tokens` says
    cached_in_usage: bool = True
    drafter: bool = False  # count updates after the first as verified drafts
    draft_tokens: int = 4
    stop_after: int = 0  # tokens after which a chat ends with "stop"; 0: never
    reply: Callable[[str], str] | None = None  # last user message -> text of the chat's answer; `serving` only
    alphabet: str = "x"  # the output is this text over and over
    temperature: float = 1.0  # of the scripted next-token distribution
    prefix_counters: bool = True
    preempted_per_request: int = 0  # what each request adds to the counter of preemptions
    restart_after: int = 0  # requests after which all counters start again from zero; 0: never


@dataclass
class Sent:
    """What the server did for one stream."""

    path: str
    body: dict[str, Any]
    received_ns: int = 0
    due_ns: list[int] = field(default_factory=list)  # when each update should have been written
    update_ns: list[int] = field(default_factory=list)  # when it was
    update_tokens: list[int] = field(default_factory=list)
    end_ns: int = 0


_read_ns: dict[RequestHandler, int] = {}  # when a connection's request was first read


_RECEIVED_NS = web.RequestKey("received_ns", int)
_plain_data_received = RequestHandler.data_received


def _stamped_data_received(protocol: RequestHandler, data: bytes) -> None:
    _read_ns.setdefault(protocol, time.perf_counter_ns())
    _plain_data_received(protocol, data)


RequestHandler.data_received = _stamped_data_received  # a handler starts only after those of all that came with it


@web.middleware
async def _stamp(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    request[_RECEIVED_NS] = _read_ns.pop(request.protocol)
    try:
        return await handler(request)
    finally:
        _read_ns.pop(request.protocol, None)  # the rest of a long body


class TruthServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.sent: list[Sent] = []
        self.counters: dict[str, int] = {}
        self.accepted_at: list[int] = []
        self._blocks: set[tuple[int, ...]] = set()
        self._restart()

    def _restart(self) -> None:
        names = ("queries", "hits", "preemptions", "drafts", "draft_tokens", "accepted")
        self.counters = dict.fromkeys(names, 0)
        self.accepted_at = [0] * self.script.draft_tokens
        self._created_s = time.time()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26, middlewares=[_stamp])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/truth", self._truth)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _truth(self, request: web.Request) -> web.Response:
        """The log and the process's CPU time so far; `?clear=1` empties the log."""
        told = {"sent": [asdict(sent) for sent in self.sent], "cpu_s": time.process_time()}
        if request.query.get("clear"):
            self.sent.clear()
        return web.json_response(told)

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
                page += f'# TYPE vllm:{name}_created gauge\nvllm:{name}_created{{engine="0"}} {self._created_s}\n'
        if self.script.drafter:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            page += f"# TYPE {name} counter\n"
            for at, count in enumerate(self.accepted_at):
                page += f'{name}_total{{engine="0",position="{at}"}} {count}.0\n'
        return web.Response(text=page)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": list((await request.json())["prompt"].encode())})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode(errors="replace")})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = request[_RECEIVED_NS]
        body = await request.json()
        if body["model"] != MODEL:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        if "prompt_logprobs" in body:
            return self._prompt_logprobs(body)
        record = Sent(request.path, body, received_ns)
        self.sent.append(record)
        if self.script.restart_after and len(self.sent) == self.script.restart_after + 1:
            self._restart()
        number = len(self.sent)
        faulty = bool(self.script.fault) and number % self.script.fault_every == 0
        try:
            # the work for a request waits until those that came with it are read
            await asyncio.sleep(min(0.02, self.script.ttft_s / 4))
            return await self._stream(request, record, self.script.fault if faulty else "", number)
        finally:
            record.end_ns = time.perf_counter_ns()

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

    async def _stream(self, request: web.Request, record: Sent, fault: str, number: int) -> web.StreamResponse:
        script, body = self.script, record.body
        if fault == "http500":
            return web.json_response({"error": {"message": "engine is dead"}}, status=500)
        chat = record.path.endswith("chat/completions")
        prompt = _prompt(body)
        cached = self._take_prompt(prompt)
        updates, finish_reason = self._updates(body, chat)
        first_ns = record.received_ns + int(1e9 * (script.ttft_s + len(prompt) * script.ttft_s_per_prompt_token))
        record.due_ns = self._due(first_ns, len(updates), number)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = _Usage(
            len(prompt),
            cached if script.cached_in_usage else None,
            LIES if fault == "inflated_usage" else 1.0,
            script.usage_per_update,
        )
        if chat and script.role_chunk:
            await _until(first_ns - int(1e9 * script.role_lead_s))
            delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await response.write(_event(chat, delta, usage.text(script.role_chunk_usage)))
        while script.keepalive_s and time.perf_counter_ns() + 1e9 * script.keepalive_s < record.due_ns[0]:
            await asyncio.sleep(script.keepalive_s)
            await response.write(b": waiting\n\n")
        total = 0
        for at, (text, tokens) in enumerate(updates):
            if fault == "never":
                await asyncio.sleep(30)
            if fault and at == script.fault_after_updates:
                if fault == "stall":
                    await asyncio.sleep(30)
                if fault in ("fin", "rst"):
                    assert request.transport is not None
                    (request.transport.close if fault == "fin" else request.transport.abort)()
                    return response
                if fault == "error_event":
                    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                    break
                if fault == "truncated":
                    return response
            total += tokens
            if script.drafter and at:
                self._verify_draft(tokens)
            last = at == len(updates) - 1 and fault != "no_finish_reason"
            key = script.reasoning_field if at < script.reasoning_updates else "content"
            choice: dict[str, Any] = {"delta": {key: text}} if chat else {"text": text}
            choice["finish_reason"] = finish_reason if last else None
            event = _event(chat, choice, usage.text(total))
            await _until(record.due_ns[at])
            if script.split_s:
                await response.write(event[:50])
                await asyncio.sleep(script.split_s)
                event = event[50:]
            record.update_ns.append(time.perf_counter_ns())
            record.update_tokens.append(tokens)
            await response.write(event)
        if fault not in ("no_usage", "error_event"):
            usage.always = True
            claimed = total + 7 if fault == "lying_usage" else total
            await response.write(_event(chat, None, usage.text(claimed)))
        if fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        if fault == "lingering":
            await asyncio.sleep(30)
        await response.write_eof()
        return response

    def _take_prompt(self, prompt: Sequence[int]) -> int:
        """Count the prompt; the number of its tokens that the prefix cache has."""
        cached, block = self.script.cached_tokens, self.script.cache_block_tokens
        if block:
            blocks = [tuple(prompt[:end]) for end in range(block, len(prompt), block)]
            cached += block * sum(known in self._blocks for known in blocks)
            self._blocks.update(blocks)
        self.counters["queries"] += len(prompt)
        self.counters["hits"] += cached
        self.counters["preemptions"] += self.script.preempted_per_request
        return cached

    def _verify_draft(self, tokens: int) -> None:
        self.counters["drafts"] += 1
        self.counters["draft_tokens"] += self.script.draft_tokens
        self.counters["accepted"] += tokens - 1
        for at in range(min(tokens - 1, self.script.draft_tokens)):
            self.accepted_at[at] += 1

    def _due(self, first_ns: int, count: int, seed: int) -> list[int]:
        """When each update is to be written."""
        script, generator = self.script, numpy.random.default_rng(seed)
        first_ns += int(1e9 * generator.uniform(0.0, script.ttft_spread_s))
        gaps_s = script.gap_s * generator.uniform(1.0 - script.gap_spread, 1.0 + script.gap_spread, max(0, count - 1))
        if script.freeze_s and len(gaps_s) >= script.freeze_before:
            gaps_s[script.freeze_before - 1] += script.freeze_s
        return [first_ns, *(first_ns + (1e9 * gaps_s.cumsum()).astype(int)).tolist()]

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
        text = self.script.alphabet * (total // len(self.script.alphabet) + 1)
        ends = numpy.cumsum(sizes).tolist()
        parts = [(text[end - size : end], size) for end, size in zip(ends, sizes, strict=True)]
        return parts, "length" if total == limit else "stop"


@dataclass
class _Usage:
    prompt_tokens: int
    cached_tokens: int | None
    factor: float
    always: bool

    def text(self, completion_tokens: int) -> str:
        """The event's member with the counts, or nothing."""
        if not self.always:
            return ""
        completion = int(self.factor * completion_tokens)
        details = (
            "" if self.cached_tokens is None else f',"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens}}}'
        )
        return (
            f',"usage":{{"prompt_tokens":{self.prompt_tokens},"total_tokens":{self.prompt_tokens + completion},'
            f'"completion_tokens":{completion}{details}}}'
        )


_CREATED = int(time.time())


def _event(chat: bool, choice: dict[str, Any] | None, usage: str) -> bytes:
    """One server-sent event with the members that vLLM sends."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    shown = "" if choice is None else json.dumps({"index": 0, "logprobs": None, "stop_reason": None, **choice})
    return (
        f'data: {{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"{kind}","created":{_CREATED},'
        f'"model":"{MODEL}","choices":[{shown}]{usage}}}\n\n'
    ).encode()


def next_logprobs(before: int, temperature: float) -> numpy.ndarray:
    """The scripted distribution after token `before`: float64 (VOCABULARY,) log probabilities in nats."""
    logits = numpy.random.default_rng(before).normal(0.0, 3.0, VOCABULARY) / temperature
    return logits - numpy.log(numpy.exp(logits).sum())


def _prompt(body: dict[str, Any]) -> Sequence[int]:
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"]).encode()
    return body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"]


async def _until(at_ns: int) -> None:
    # The loop's timers count whole milliseconds, and from a reading of the clock that may be older: they fire early.
    while (left_ns := at_ns - time.perf_counter_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)


@asynccontextmanager
async def serving(script: Script, window_tokens: int = 4096) -> AsyncIterator[tuple[TruthServer, Target]]:
    """A truth server on a free port of the loopback, and the target that reaches it."""
    server = TruthServer(script)
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port: int = runner.addresses[0][1]
    try:
        yield server, Target(f"http://127.0.0.1:{port}", MODEL, window_tokens)
    finally:
        await runner.cleanup()


class TruthProcess:
    """A truth server in a process of its own."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def log(self, clear: bool = False) -> tuple[list[Sent], float]:
        """(what it did since the log was emptied, CPU seconds of its life)."""
        with urllib.request.urlopen(f"{self.target.base_url}/truth?clear={'1' if clear else ''}", timeout=30) as answer:
            told = json.load(answer)
        return [Sent(**sent) for sent in told["sent"]], told["cpu_s"]


@contextmanager
def spawned(script: Script, window_tokens: int = 4096) -> Iterator[TruthProcess]:
    """The same in a process of its own, which ends with the block or with this process."""
    fields = {name: value for name, value in asdict(script).items() if name != "reply"}
    server = subprocess.Popen(
        [sys.executable, __file__, json.dumps(fields)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield TruthProcess(Target(server.stdout.readline().strip(), MODEL, window_tokens))
    finally:
        server.stdin.close()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


async def _serve_until_stdin_closes(script: Script) -> None:
    async with serving(script) as (_, target):
        print(target.base_url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def ids(text: str, length: int) -> Sequence[int]:
    """`length` token ids of repeated `text`."""
    return list((text * (length // len(text) + 1)).encode()[:length])


if __name__ == "__main__":
    uvloop.run(_serve_until_stdin_closes(Script(**json.loads(sys.argv[1]))))
