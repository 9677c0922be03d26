"""How long a suite will take, from a few requests to the very server: before it starts, and right within 30%."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from hosting import hosted, measured
from truth_server import Script, TruthServer

from orchestrator.bench import rates
from orchestrator.errors import InvalidMeasurement

SUITE = {
    "decode_ctx": {"contexts_tokens": [64, 512, 8000], "generate_tokens": 60, "repeats": 1},
    "prefill": {"lengths_tokens": [256, 1024, 9000], "runs": 1, "warmup_runs": 1},
    "betterbench": {
        "prompts_per_category": 1,
        "max_tokens": 32,
        "concurrency": [1, 4],
        "max_client_lag_p99_ms": 1e4,
        "min_offered_share": 0.0,
    },
    "greedy": {"prompts_per_category": 1, "max_tokens": 20, "passes": 2},
    "battery": {"max_tokens": 60, "contexts_tokens": [512], "depths": [0.5]},
    "gsm8k": {"n": 12, "max_tokens": 200, "concurrency": 1},
}


class Slow(TruthServer):
    """A server of fixed rates: 2,000 prompt tokens a second, 5 ms a token for each stream."""

    def __init__(self, answer_words: int) -> None:
        super().__init__(Script(ttft_s=0.0, ttft_s_per_prompt_token=1 / 2000, gap_s=0.005))
        self.answer_words = answer_words

    def _updates(self, body, chat):
        if chat and re.search("What is", body["messages"][-1]["content"]):
            words = ["word "] * min(self.answer_words, body["max_tokens"])
            return [(word, 1) for word in words], "stop" if len(words) < body["max_tokens"] else "length"
        return super()._updates(body, chat)


def probe(server: TruthServer, suite: dict, context) -> rates.Rates:
    async def run():
        async with hosted(server) as target:
            return await rates.probe(target, suite, context)

    return asyncio.run(run())


def test_the_rates_are_the_servers(context):
    found = probe(Slow(70), SUITE, context)
    assert found.prefill_tok_per_s == pytest.approx(2000, rel=0.15)
    assert found.decode_tok_per_s == pytest.approx(200, rel=0.15)
    assert found.batch_tok_per_s == pytest.approx(800, rel=0.25)
    assert found.answer_tokens == 70 and found.window_tokens == 4096 and found.logprob_tok_per_s is None


def test_answers_that_do_not_end_are_expected_to_reach_the_bound(context):
    suite = {"gsm8k": {"n": 12, "max_tokens": 2048, "concurrency": 1}}
    assert probe(Slow(10_000), suite, context).answer_tokens == 2048


def test_few_questions_are_not_worth_the_probe(context):
    server = Slow(70)
    found = probe(server, {"gsm8k": {"n": 12, "max_tokens": 200, "concurrency": 4}}, context)
    assert found.answer_tokens is None and not [sent for sent in server.sent if "messages" in sent.body]


def test_a_suite_takes_the_time_that_was_said(context):
    """All benches together within 30%; the parts over the window are in no estimate."""
    expected_s = rates.expected(SUITE, probe(Slow(70), SUITE, context))
    started_s = time.monotonic()
    for name, params in SUITE.items():
        assert measured(name, Slow(70), params, context).status == "ok", name
    assert sum(expected_s.values()) == pytest.approx(time.monotonic() - started_s, rel=0.3), expected_s


def test_a_server_that_fails_the_probe_ends_the_run(context):
    with pytest.raises(InvalidMeasurement, match="should tell the server's speed failed: HTTP 500"):
        probe(TruthServer(Script(fault="http500")), SUITE, context)
