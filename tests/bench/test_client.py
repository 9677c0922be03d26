"""The client against the scripted server: what it reports is what the server did, or an error with the reason."""

from __future__ import annotations


import json
import re
import statistics
from dataclasses import replace

import pytest
from truth_server import MODEL, Script, TruthServer, ids, serving

from orchestrator import bench
from orchestrator.client import Client, Completion, Timeouts
from orchestrator.completion import CompletionReader
from orchestrator.errors import InvalidMeasurement

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
    assert statistics.median(done.itl_ms) == pytest.approx(5.0, abs=0.5)
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
        ("fin", "connection broken after 3 tokens"),
        ("lying_usage", "usage says 27 tokens, the updates carried 20"),
        ("never", "timed out before the first token"),
        ("stall", "timed out between tokens .* after 3 tokens"),
    ],
)
def test_a_fault_is_an_error_with_its_reason(fault: str, reason: str):
    _, done = complete(Script(fault=fault))
    assert re.search(reason, done.error), done.error or "no error"


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
