"""decode_ctx and prefill against a scripted server in a process of its own.

What is expected is what the server wrote down that it did, so that a busy machine makes no test fail.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
from truth_server import Script, Sent, serving, spawned

from orchestrator import bench
from orchestrator.bench import decode_ctx, params_of
from orchestrator.bench.context import BenchContext
from orchestrator.bench.recount import repeats
from orchestrator.bench.warm import shapes
from orchestrator.errors import UsageError
from orchestrator.records import Measurement

PATIENT = {"max_client_lag_p99_ms": 1e4}  # whether this machine is busy is no subject of the test
DECODE = {"contexts_tokens": [64, 256], "generate_tokens": 61, "repeats": 3, **PATIENT}
PREFILL = {"lengths_tokens": [128, 512], "runs": 3, "warmup_runs": 1, **PATIENT}
BETTERBENCH = {"prompts_per_category": 1, "max_tokens": 24, "concurrency": [1], "max_client_lag_p99_ms": 1e4}


def measure(
    name: str,
    script: Script,
    params: Mapping[str, Any],
    context: BenchContext,
    window_tokens: int = 4096,
    times: int = 1,
) -> tuple[list[Sent], list[Measurement]]:
    """The bench run `times` times on one server."""

    async def run(target):
        return [await bench.measure_one(name, target, params, context) for _ in range(times)]

    with spawned(script, window_tokens) as server:
        found = bench.run(run(server.target))
        return server.log()[0], found


def recomputed_decode(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Every metric of decode_ctx by the definitions of docs/methodology.md, from what is stored."""
    requests = [sample for sample in samples if "update_ms" in sample]
    metrics = {
        "decode.errors": float(sum(bool(sample["error"]) for sample in requests)),
        "decode.skipped": float(sum("skipped" in sample for sample in samples)),
    }
    for extra in (sample for sample in samples if "client_lag_ms" in sample):
        at = f"ctx{extra['context_tokens']}"
        good = [s for s in requests if s["context_tokens"] == extra["context_tokens"] and not s["error"]]
        spans = [s["update_ms"][-1] - s["update_ms"][0] for s in good]
        steps = [len(s["update_ms"]) - 1 for s in good]
        tokens = [sum(s["update_tokens"][1:]) for s in good]
        gaps = [
            later - earlier for s in good for earlier, later in zip(s["update_ms"], s["update_ms"][1:], strict=False)
        ]
        metrics[f"decode.ms_per_step.{at}"] = statistics.median(a / b for a, b in zip(spans, steps, strict=True))
        metrics[f"decode.tok_per_s.{at}"] = 1e3 / statistics.median(b / a for a, b in zip(tokens, spans, strict=True))
        metrics[f"decode.ttft_ms.{at}"] = statistics.median(s["update_ms"][0] for s in good)
        metrics[f"decode.longest_gap_ms.{at}"] = max(gaps)
        metrics[f"decode.client_lag_ms.p99.{at}"] = float(numpy.percentile(extra["client_lag_ms"], 99))
        if drafter := extra["speculation"]:
            metrics[f"decode.acceptance_length.{at}"] = 1 + drafter["accepted_tokens"] / drafter["drafts"]
            metrics[f"decode.accepted_share.{at}"] = drafter["accepted_tokens"] / drafter["draft_tokens"]
            for position, accepted in enumerate(drafter["accepted_per_position"]):
                metrics[f"decode.accepted_share.pos{position}.{at}"] = accepted / drafter["drafts"]
        again = whole = 0
        for output in extra["output_token_ids"]:
            seen = set()
            for start in range(len(output) - 7):
                gram = tuple(output[start : start + 8])
                again, whole = again + (gram in seen), whole + 1
                seen.add(gram)
        metrics[f"decode.repeated_8gram_share.{at}"] = again / whole
    return metrics


def recomputed_prefill(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    requests = [sample for sample in samples if "update_ms" in sample]
    metrics = {
        "prefill.errors": float(sum(bool(sample["error"]) for sample in requests)),
        "prefill.skipped": float(sum("skipped" in sample for sample in samples)),
    }
    for extra in (sample for sample in samples if "client_lag_ms" in sample):
        length, at = extra["length_tokens"], f"len{extra['length_tokens']}"
        good = [s for s in requests if s["length_tokens"] == length and not s["error"] and not s["warmup"]]
        ttft_ms = [s["update_ms"][0] for s in good]
        metrics[f"prefill.ttft_ms.{at}"] = statistics.median(ttft_ms)
        metrics[f"prefill.prompt_tok_per_s.{at}"] = 1e3 * length / statistics.median(ttft_ms)
        metrics[f"prefill.prompt_tok_per_s.best.{at}"] = 1e3 * length / min(ttft_ms)
        metrics[f"prefill.client_lag_ms.p99.{at}"] = float(numpy.percentile(extra["client_lag_ms"], 99))
    return metrics


@pytest.mark.parametrize("pattern", [(3, 1, 5, 3), (1,), (8,), (1, 1, 1, 6)])
def test_any_drafter_gives_the_step_time_and_acceptance_that_the_server_had(context, pattern):
    script = Script(gap_s=0.01, gap_spread=0.2, pattern=pattern, drafter=True, draft_tokens=7, alphabet="abcdefghijk")
    params = {**DECODE, "contexts_tokens": [64], "generate_tokens": 121, "repeats": 1}
    sent, [found] = measure("decode_ctx", script, params, context)
    assert found.status == "ok", found.reason
    steps = sent[0].update_tokens[1:]
    spans_ms = (sent[0].update_ns[-1] - sent[0].update_ns[0]) / 1e6
    late_ms = 20.0  # that a busy machine may make the first or the last arrival
    assert found.metrics["decode.ms_per_step.ctx64"] * len(steps) == pytest.approx(spans_ms, abs=late_ms)
    assert 1e3 * sum(steps) / found.metrics["decode.tok_per_s.ctx64"] == pytest.approx(spans_ms, abs=late_ms)
    assert found.metrics["decode.acceptance_length.ctx64"] == pytest.approx(statistics.mean(steps))
    assert found.metrics["decode.accepted_share.ctx64"] == pytest.approx((sum(steps) - len(steps)) / 7 / len(steps))
    for position in range(7):
        reached = sum(tokens - 1 > position for tokens in steps) / len(steps)
        assert found.metrics[f"decode.accepted_share.pos{position}.ctx64"] == pytest.approx(reached)
    assert found.metrics["decode.repeated_8gram_share.ctx64"] == pytest.approx((114 - 11) / 114)
    assert not found.notes


def test_every_metric_of_decode_can_be_computed_from_the_samples(context):
    script = Script(gap_s=0.003, gap_spread=0.3, pattern=(3, 1, 2), drafter=True, fault="fin", fault_every=4)
    _, [found] = measure("decode_ctx", script, {**DECODE, "contexts_tokens": [64, 256, 9000]}, context)
    assert found.status == "ok", found.reason
    assert (found.metrics["decode.errors"], found.metrics["decode.skipped"]) == (1.0, 1.0)
    assert recomputed_decode(found.samples) == pytest.approx(dict(found.metrics), rel=1e-3, abs=1e-3)


def test_every_metric_of_prefill_can_be_computed_from_the_samples(context):
    script = Script(ttft_s_per_prompt_token=1 / 8000, fault="http500", fault_every=7)
    _, [found] = measure("prefill", script, {**PREFILL, "lengths_tokens": [128, 512, 9000]}, context)
    assert found.status == "ok", found.reason
    assert (found.metrics["prefill.errors"], found.metrics["prefill.skipped"]) == (1.0, 1.0)
    assert recomputed_prefill(found.samples) == pytest.approx(dict(found.metrics), rel=1e-3, abs=1e-3)


def test_a_twentieth_of_the_requests_failing_moves_no_latency_and_shows(context):
    """The broken ones would: the server cuts them after an update that came a second late, or answers at once."""
    script = Script(gap_s=0.004, fault="fin", fault_every=20, fault_after_updates=2)
    sent, [found] = measure(
        "decode_ctx", script, {**DECODE, "contexts_tokens": [64], "repeats": 40, "generate_tokens": 31}, context
    )
    assert found.status == "ok", found.reason
    assert found.metrics["decode.errors"] == 2
    whole = [s for s in found.samples if s.get("error") == ""]
    assert len(whole) == 38 == sum(sum(record.update_tokens) == 31 for record in sent)
    steps_ms = [(s["update_ms"][-1] - s["update_ms"][0]) / 30 for s in whole]
    assert found.metrics["decode.ms_per_step.ctx64"] == pytest.approx(statistics.median(steps_ms), rel=1e-3)
    longest_ms = max(s["longest_gap_ms"] for s in whole)
    assert found.metrics["decode.longest_gap_ms.ctx64"] == pytest.approx(longest_ms, rel=1e-3)
    script = Script(ttft_s=0.02, fault="http500", fault_every=20)  # an error comes 20 ms before a token would
    _, [found] = measure("prefill", script, {**PREFILL, "lengths_tokens": [128], "runs": 39}, context)
    assert found.status == "ok", found.reason
    assert found.metrics["prefill.errors"] == 2
    assert found.metrics["prefill.prompt_tok_per_s.best.len128"] <= 128 / 0.02


@pytest.mark.parametrize(
    ("name", "params"), [("decode_ctx", DECODE), ("prefill", PREFILL), ("betterbench", BETTERBENCH)]
)
@pytest.mark.parametrize("seen_in", ["counters", "usage"])
def test_a_prompt_that_the_prefix_cache_knows_is_caught_by_either_witness(context, name, params, seen_in):
    """A real cache of blocks of 16: the first time all prompts are new, the second time none is."""
    script = Script(
        gap_s=0.005,
        cache_block_tokens=16,
        cached_in_usage=seen_in == "usage",
        prefix_counters=seen_in == "counters",
    )
    _, [first, second] = measure(name, script, params, context, times=2)
    assert first.status == "ok", first.reason
    assert second.status == "invalid"
    assert "came from the prefix cache" in second.reason
    assert not [metric for metric in second.metrics if not metric.endswith((".errors", ".skipped", ".short_outputs"))]


@pytest.mark.parametrize(("name", "params"), [("decode_ctx", DECODE), ("prefill", PREFILL)])
def test_a_server_that_restarts_under_a_bench_makes_it_invalid_and_keeps_the_samples(context, name, params):
    _, [found] = measure(name, Script(gap_s=0.001, restart_after=2), params, context)
    assert found.status == "invalid"
    assert "the server restarted while it was measured" in found.reason
    assert [sample for sample in found.samples if "update_ms" in sample]


@pytest.mark.parametrize(("name", "params"), [("decode_ctx", DECODE), ("prefill", PREFILL)])
def test_a_client_that_fell_behind_makes_the_bench_invalid(context, name, params):
    slow = replace(context, advance=lambda *_: time.sleep(0.25))
    _, [found] = measure(name, Script(gap_s=0.001), {**params, "max_client_lag_p99_ms": 100.0}, slow)
    assert found.status == "invalid"
    assert "the client fell behind: its timer was" in found.reason


def test_a_usage_that_its_text_does_not_bear_out_is_noted(context):
    params = {**DECODE, "contexts_tokens": [64], "generate_tokens": 110}

    async def run():
        async with serving(Script(gap_s=0.0, fault="inflated_usage")) as (_, target):
            return await bench.measure_one("decode_ctx", target, params, context)

    found = bench.run(run())  # asks for 110, is told 121 in the end and sent 110
    assert found.status == "invalid"
    assert "110 were asked for at most" in found.reason
    found = bench.run(noted(context))
    assert any("usage says" in note and "(+10.0%)" in note for note in found.notes), found.notes


async def noted(context: BenchContext) -> Measurement:
    async with serving(Script(gap_s=0.001, stop_after=50, fault="inflated_usage")) as (_, target):
        return await bench.measure_one(
            "betterbench", target, {**BETTERBENCH, "max_tokens": 60, "min_tokens": 50}, context
        )


def test_counters_that_do_not_agree_with_the_tokens_are_noted(context):
    params = {**DECODE, "contexts_tokens": [64]}
    _, [merged] = measure("decode_ctx", Script(gap_s=0.002, pattern=(2,)), params, context)
    assert merged.notes == (
        "ctx64: 90 of 90 updates brought several tokens and no draft was counted: steps were merged",
    )
    _, [busy] = measure("decode_ctx", Script(gap_s=0.002, pattern=(2,), drafter=True), params, context)
    assert not busy.notes


def test_contexts_over_the_window_are_capped_once_where_that_is_asked_for(context):
    params = {**DECODE, "contexts_tokens": [0, 64, 9000, 100000], "repeats": 1, "over_window": "cap"}
    sent, [found] = measure("decode_ctx", Script(gap_s=0.004), params, context, window_tokens=400)
    assert found.status == "ok", found.reason
    assert [len(record.body["prompt"]) for record in sent] == [16, 64, 339]
    assert {name for name in found.metrics if ".ms_per_step." in name} == {
        f"decode.ms_per_step.ctx{length}" for length in (0, 64, 339)
    }
    assert found.metrics["decode.skipped"] == 2
    assert [s["context_tokens"] for s in found.samples if "skipped" in s] == [9000, 100000]
    parsed = params_of("decode_ctx", params)
    assert decode_ctx.contexts(parsed, 400) == ((0, 64, 339), (9000, 100000))
    assert decode_ctx.contexts(parsed, 125) == ((0, 64), (9000, 100000))  # the cap is one of them
    assert shapes({"decode_ctx": params}, 400)[0] == [(16, 8), (64, 8), (339, 8)]


def test_a_context_longer_than_the_corpus_is_noted(context):
    params = {**DECODE, "contexts_tokens": [12000], "generate_tokens": 10, "repeats": 1}
    sent, [found] = measure("decode_ctx", Script(gap_s=0.01), params, context, window_tokens=20000)
    assert found.status == "ok", found.reason
    assert len(sent[0].body["prompt"]) == 12000
    assert len(found.notes) == 1
    assert found.notes[0].startswith("contexts over 8")
    assert found.notes[0].endswith("tokens repeat paragraphs of corpus prose")


def test_a_corpus_that_is_not_there_is_found_before_a_boot(context):
    with pytest.raises(UsageError, match=r"/no/such/file"):
        bench.require_suite({"decode_ctx": {"corpus": "wikitext", "wikitext_path": "/no/such/file"}}, context)


@pytest.mark.parametrize("lengths", [[], [8], [-1], [64, 64]])
def test_contexts_that_cannot_be_measured_are_refused(lengths):
    with pytest.raises(UsageError, match=r"benches\.decode_ctx: .*contexts_tokens"):
        params_of("decode_ctx", {"contexts_tokens": lengths})


def test_both_arms_are_asked_the_same_and_the_samples_prove_it(context):
    prompts = []
    for gap_s in (0.002, 0.003):
        sent, [found] = measure("decode_ctx", Script(gap_s=gap_s), {**DECODE, "repeats": 2}, context)
        prompts.append([s["prompt_sha256"] for s in found.samples if "prompt_sha256" in s])
        assert len(set(prompts[-1])) == len(sent) == 4
    assert prompts[0] == prompts[1]


def test_an_8_gram_counts_as_repeated_from_its_second_time_on():
    assert repeats([1, 2, 3] * 4, 8) == (2, 5)
    assert repeats(list(range(20)), 8) == (0, 13)
    assert repeats([1, 2], 8) == (0, 0)
