"""The client against the scripted server: what it reports is what the server did, or an error with the reason."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from truth_server import MODEL, Script, TruthServer, ids, serving

from orchestrator import bench
from orchestrator.bench.recount import Recount, recount
from orchestrator.client import Client, Completion, Timeouts
from orchestrator.completion import CompletionReader
from orchestrator.errors import InvalidMeasurement
from orchestrator.records import Target

PROMPT = ids("A prompt. ", 50)
SHORT = Timeouts(connect_s=2.0, first_token_s=0.3, between_tokens_s=0.3, total_s=5.0)


def complete(script: Script, max_tokens: int = 20, **options) -> tuple[TruthServer, Completion]:
    async def run():
        async with serving(script) as (server, target), Client(target, SHORT) as client:
            return server, await client.complete(PROMPT, max_tokens, **options)

    return bench.run(run())


def chat(script: Script, max_tokens: int = 20) -> tuple[TruthServer, Completion]:
    async def run():
        async with serving(script) as (server, target), Client(target, SHORT) as client:
            return server, await client.chat([{"role": "user", "content": "Hello."}], max_tokens)

    return bench.run(run())


def test_arrival_times_are_the_times_the_server_wrote():
    server, done = complete(Script(ttft_s=0.03, gap_s=0.005), max_tokens=60)
    assert not done.error
    sent = server.sent[0]
    late_ms = [(seen - wrote) / 1e6 for seen, wrote in zip(done.update_ns, sent.update_ns, strict=True)]
    assert min(late_ms) >= 0.0
    assert statistics.median(late_ms) < 2.0
    gaps_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(sent.update_ns)]
    assert statistics.median(done.itl_ms) == pytest.approx(statistics.median(gaps_ms), abs=0.5)
    assert done.ttft_ms == pytest.approx((sent.update_ns[0] - done.sent_ns) / 1e6, abs=5.0)
    assert done.ttft_ms >= 30.0
    assert done.decode_span_ms == pytest.approx((sent.update_ns[-1] - sent.update_ns[0]) / 1e6, rel=0.05)


def test_the_tokens_of_an_update_share_its_gap():
    _, done = complete(Script(gap_s=0.008, pattern=(3, 1, 5)), max_tokens=19)
    assert done.update_tokens == (1, 3, 1, 5, 3, 1, 5)
    assert len(done.itl_ms) == 18 == done.decode_tokens
    assert sum(done.itl_ms) == pytest.approx(done.decode_span_ms)


def test_the_announcement_of_the_role_is_not_the_first_token():
    for usage in (0, 1):  # a server may already count a token there
        server, done = chat(Script(ttft_s=0.08, role_lead_s=0.07, role_chunk_usage=usage))
        assert not done.error
        assert done.update_ns[0] >= server.sent[0].update_ns[0]
        assert done.completion_tokens == 20 == sum(done.update_tokens)


def test_a_token_whose_text_is_held_back_counts_when_usage_counts_it():
    def event(content: str, completion_tokens: int, **choice) -> bytes:
        usage = {"prompt_tokens": 1, "completion_tokens": completion_tokens}
        body = {"choices": [{"delta": {"content": content}, **choice}], "usage": usage}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    reader = CompletionReader()
    assert not reader.feed(event("", 0), 1_000_000)  # neither text nor a token
    assert reader.feed(event("", 1), 5_000_000)  # half a character
    assert reader.feed(event("\u00e9", 2, finish_reason="stop") + b"data: [DONE]\n\n", 9_000_000)
    done = reader.finish(0, 9_000_000)
    assert not done.error
    assert (done.ttft_ms, done.update_tokens) == (5.0, (1, 1))


def test_a_prompt_of_token_ids_is_sent_as_such_and_tokens_are_counted_from_usage():
    server, done = complete(Script(cached_tokens=16), temperature=0.0)
    assert server.sent[0].body["prompt"] == PROMPT
    assert server.sent[0].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (50, 16, 20)
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("http500", "HTTP 500: .*engine is dead"),
        ("error_event", "error event: engine died"),
        ("no_done", "without \\[DONE\\] after 20 tokens"),
        ("truncated", "without \\[DONE\\] after 3 tokens"),
        ("no_finish_reason", "without a finish_reason"),
        ("fin", "connection broken after 3 tokens: closed by the server"),
        ("rst", "connection broken after 3 tokens"),
        ("lying_usage", "usage says 27 tokens, 20 were asked for at most"),
        ("never", "timed out before the first token"),
        ("stall", "timed out between tokens .* after 3 tokens"),
    ],
)
def test_a_fault_is_an_error_with_its_reason(fault: str, reason: str):
    _, done = complete(Script(fault=fault))
    assert re.search(reason, done.error), done.error or "no error"


def test_a_body_that_ends_by_closing_is_judged_by_what_it_lacks():
    """Neither a length nor chunks: a FIN is the end of such a body, also where it came in the middle."""
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":1}'
    event = b'data: {"choices":[{"text":"a","finish_reason":"length"}],' + usage + b"}\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert "without [DONE] after 1 tokens" in answered(head + event).error
    assert answered(head + event + b"data: [DONE]\n\n").error == ""
    assert "without [DONE] after 0 tokens" in answered(head + event[:30]).error
    assert "no HTTP" in answered(b"SSH-2.0-OpenSSH_9.2\r\n").error
    assert "connection broken after 0 tokens: closed by the server" in answered(head[:30]).error


def test_a_refusal_on_a_connection_that_stays_open_is_not_waited_for():
    body = b'{"error":{"message":"too long"}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert answered(head[:9], head[9:] + body, stays_open=True).error == "HTTP 400: " + body.decode()


def answered(*parts: bytes, stays_open: bool = False) -> Completion:
    """What the client makes of a server that answers with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if stays_open:
            await asyncio.sleep(1)
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(Target(f"http://127.0.0.1:{port}", MODEL, 4096), SHORT) as client:
            return await client.complete(PROMPT, 1)

    return bench.run(run())


def test_a_stream_that_lingers_after_its_end_is_over():
    _, done = complete(Script(fault="lingering"))
    assert not done.error
    assert done.end_ns - done.update_ns[-1] < 200_000_000


def raw(*reads: bytes, max_tokens: int = 3) -> tuple[Completion, float]:
    """What the client makes of an answer in these writes on a connection that stays open, and the seconds it took."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for data in reads:
            writer.write(data)
            await asyncio.sleep(0.005)
        await reader.read()  # until the client leaves
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(Target(f"http://127.0.0.1:{port}", MODEL, 4096), SHORT) as client:
            started = asyncio.get_running_loop().time()
            return await client.complete(PROMPT, max_tokens), asyncio.get_running_loop().time() - started

    return bench.run(run())


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    {"choices": [{"text": "a", "finish_reason": end}], "usage": {"prompt_tokens": 9, "completion_tokens": n + 1}}
    for n, end in enumerate((None, None, "length"))
]


def chunked(*parts: bytes) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]


@pytest.mark.parametrize(
    ("lead", "tail", "end"),
    [
        (b"data: ", b"\n\n", chunked(b"data: [DONE]\n\n")),
        (b"data: ", b"\r\n\r\n", chunked(b"data: [DONE]\r\n\r\n")),
        (b"data:", b"\n\n", chunked(b"data:[DONE]\n\n")),
        (b"data: ", b"\n\n", [*chunked(b"data: [DO", b"NE]\n\n"), b"0\r\n\r\n"]),
        (b"data: ", b"\n", chunked(b"data: [DONE]\n")),
    ],
    ids=["plain", "crlf", "no space", "in two", "one newline"],
)
@pytest.mark.parametrize("interim", [(), (b"HTTP/1.1 100 Continue\r\n\r\n",)], ids=["", "100 first"])
def test_a_stream_is_over_at_its_done_however_it_is_written(lead, tail, end, interim):
    events = chunked(*(lead + json.dumps(event).encode() + tail for event in EVENTS))
    done, seconds = raw(*interim, HEAD, *events, *end)
    assert (done.error, done.text, done.update_tokens) == ("", "aaa", (1, 1, 1)) and seconds < SHORT.between_tokens_s


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ((HEAD, *chunked(b"data: {}\n\n"), b"0\r\n\r\n"), "the stream ended without [DONE] after 0 tokens"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",), "the stream ended without [DONE] after 0 tokens"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",), "the stream ended without [DONE] after 0 tokens"),
    ],
)
def test_a_body_that_is_whole_and_no_stream_is_an_error_at_once(reads, said):
    done, seconds = raw(*reads)
    assert done.error == said and seconds < SHORT.first_token_s


def test_an_event_of_megabytes_in_small_reads_is_read_in_time():
    reader = CompletionReader()
    event = b"data: " + json.dumps({"choices": [{"text": "x" * 3_000_000}]}).encode() + b"\n\n"
    started = time.perf_counter()
    for at in range(0, len(event), 1000):
        reader.feed(event[at : at + 1000], at)
    assert reader.tokens == 1 and time.perf_counter() - started < 1.0


def test_comments_that_keep_a_connection_alive_are_no_tokens():
    _, done = complete(Script(ttft_s=1.0, keepalive_s=0.02))
    assert done.error == "timed out before the first token (0.3 s)"


def test_a_limit_of_a_long_stream_holds_for_each_token():
    """The limit between tokens is shorter than the stream: what arrived in time is seen in time."""
    _, done = complete(Script(ttft_s=0.2, gap_s=0.05, pattern=(1,)), max_tokens=20)
    assert not done.error
    _, frozen = complete(Script(freeze_s=0.5, freeze_before=10), max_tokens=20)
    assert frozen.error == "timed out between tokens (0.3 s) after 10 tokens"
    assert len(frozen.update_ns) == 10
    assert 0.3 <= (frozen.end_ns - frozen.update_ns[-1]) / 1e9 < 0.5  # its time is the server's, not only the tokens'


def test_a_freeze_shows_as_the_longest_gap():
    server, done = complete(Script(gap_s=0.003, freeze_s=0.15, freeze_before=7), max_tokens=40)
    truth_ms = max(later - earlier for earlier, later in pairwise(server.sent[0].update_ns)) / 1e6
    assert truth_ms > 150.0
    assert done.longest_gap_ms == pytest.approx(truth_ms, abs=15.0)


def test_an_event_counts_when_all_of_it_is_there():
    server, done = complete(Script(split_s=0.03, gap_s=0.05), max_tokens=5)
    assert not done.error
    assert all(seen >= wrote for seen, wrote in zip(done.update_ns, server.sent[0].update_ns, strict=True))


@pytest.mark.parametrize("channel", ["reasoning_content", "reasoning"])
def test_tokens_of_a_reasoning_channel_are_tokens_and_are_counted_apart(channel: str):
    server, done = chat(Script(reasoning_updates=8, reasoning_field=channel, pattern=(1, 2)))
    assert not done.error
    assert (done.completion_tokens, done.reasoning_tokens) == (20, sum(server.sent[0].update_tokens[:8]))
    assert (len(done.reasoning), len(done.text)) == (done.reasoning_tokens, 20 - done.reasoning_tokens)
    assert done.update_ns[0] >= server.sent[0].update_ns[0]
    assert done.sample()["reasoning_tokens"] == done.reasoning_tokens


def test_a_usage_that_its_text_does_not_bear_out_is_shown():
    def found(script: Script, tokens: int) -> Recount:
        async def run():
            async with serving(script) as (_, target), Client(target, SHORT) as client:
                done = [await client.chat([{"role": "user", "content": "Go on."}], tokens) for _ in range(6)]
                assert not any(completion.error for completion in done)
                return await recount(client, done)

        return bench.run(run())

    assert found(Script(gap_s=0.0, stop_after=60), 100).note == ""
    inflated = found(Script(gap_s=0.0, stop_after=60, fault="inflated_usage"), 100)
    assert inflated.note == "usage says 198 tokens, the texts of these 3 outputs are 180 (+10.0%)"
    assert inflated.sample()["recount"] == {"outputs": 3, "usage_tokens": 198, "text_tokens": 180}
    assert Recount((101, 101), ((1,) * 100, (1,) * 100)).note == ""  # a stop token has no text
    assert Recount((400,), ((1,) * 390,)).note != ""


def test_a_server_that_cannot_tokenize_leaves_usage_unchecked_and_says_so():
    async def run():
        async with serving(Script()) as (_, target), Client(target, SHORT) as client:
            done = await client.complete(PROMPT, 5)
        async with Client(target, SHORT) as client:
            return await recount(client, [done])

    assert str(bench.run(run())).startswith("usage is not checked against the texts: POST /tokenize")


def test_a_stream_without_usage_is_an_error():
    _, done = complete(Script(fault="no_usage", usage_per_update=False))
    assert "without usage" in done.error


def test_without_usage_per_update_single_tokens_are_counted_and_several_at_once_are_an_error():
    _, single = complete(Script(usage_per_update=False))
    assert not single.error
    assert single.completion_tokens == 20
    _, several = complete(Script(usage_per_update=False, pattern=(4,)))
    assert "no usage with each update" in several.error


def test_the_total_time_of_a_request_is_bounded():
    async def run():
        limits = replace(SHORT, total_s=0.2)
        async with serving(Script(gap_s=0.02)) as (_, target), Client(target, limits) as client:
            return await client.complete(PROMPT, 100)

    assert "timed out in total (0.2 s)" in bench.run(run()).error


def test_a_server_that_is_gone_is_an_error_and_not_an_exception():
    async def run():
        async with serving(Script()) as (_, target):
            pass
        async with Client(target, SHORT) as client:
            with pytest.raises(InvalidMeasurement, match="GET /metrics"):
                await client.metrics()
            return await client.complete(PROMPT, 5), await client.healthy()

    done, healthy = bench.run(run())
    assert "connection broken after 0 tokens" in done.error
    assert not healthy


def test_another_server_on_the_port_refuses_the_model():
    async def run():
        async with serving(Script()) as (_, target), Client(replace(target, model="truth-9999")) as client:
            assert await client.models() == [MODEL]
            return await client.complete(PROMPT, 5)

    assert "HTTP 404" in bench.run(run()).error


def test_the_longest_gap_of_a_request_is_kept():
    _, done = complete(Script(gap_s=0.002), max_tokens=30)
    frozen = replace(done, update_ns=(*done.update_ns[:-1], done.update_ns[-2] + 500_000_000))
    assert frozen.longest_gap_ms == pytest.approx(500.0)
    assert frozen.sample()["longest_gap_ms"] == pytest.approx(500.0)


def test_every_token_after_the_first_update_has_an_itl_also_where_it_came_with_the_first():
    done = Completion(0, 9, (10, 10, 30), (1, 2, 2), 5, None, 5, "stop", "", "", "")
    assert done.itl_ms == (0.0, 0.0, 1e-5, 1e-5)
    assert sum(done.itl_ms) == pytest.approx(done.decode_span_ms)


def test_updates_of_one_read_are_one_gap():
    done = Completion(0, 9, (10, 20, 20, 40), (1, 1, 2, 1), 5, None, 5, "stop", "", "", "")
    assert done.gaps == ((1e-5, 3), (2e-5, 1))


def test_a_request_ends_with_its_last_read_even_if_it_is_the_only_one():
    _, done = complete(Script(gap_s=0.0), max_tokens=1)
    assert not done.error
    assert done.end_ns >= done.update_ns[0] > done.sent_ns


def test_tokenize_and_detokenize_are_the_servers():
    async def run():
        async with serving(Script()) as (_, target), Client(target) as client:
            tokens = await client.tokenize("river")
            return tokens, await client.detokenize(tokens)

    assert bench.run(run()) == (list(b"river"), "river")


WHOLE_EVENT = b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{}}',
        b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":"1"}}',
        b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1.5}}',
        b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":[1]}',
        b'{"choices":["a"]}',
        b'{"choices":"a"}',
        b'{"choices":[{"delta":"a"}]}',
        b'{"choices":[{"delta":{"content":[{"text":"a"}]}}]}',
        b"[" * 100_000,
    ],
)
def test_an_event_of_another_shape_is_an_error_of_the_server_and_none_of_the_client(payload):
    reader = CompletionReader()
    reader.feed(b"data: " + payload + b"\n\ndata: " + WHOLE_EVENT + b"\n\ndata: [DONE]\n\n", 1_000_000)
    assert reader.finish(0, 2_000_000).error.startswith("an event")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_output_that_the_server_gave_up_is_an_error(reason):
    reader = CompletionReader()
    event = WHOLE_EVENT.replace(b"stop", reason.encode())
    reader.feed(b"data: " + event + b"\n\ndata: [DONE]\n\n", 1_000_000)
    assert reader.finish(0, 2_000_000).error == f"finish_reason {reason} after 1 tokens"


def test_nothing_after_the_end_of_the_stream_belongs_to_it():
    reader = CompletionReader()
    later = WHOLE_EVENT.replace(b'completion_tokens":1', b'completion_tokens":2')
    reader.feed(b"data: " + WHOLE_EVENT + b"\n\ndata: [DONE]\n\ndata: " + later + b"\n\n", 1_000_000)
    done = reader.finish(0, 2_000_000)
    assert not done.error and done.completion_tokens == 1
