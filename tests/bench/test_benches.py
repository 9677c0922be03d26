"""Each bench against a server whose truth is known, and what each fault makes of it."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from dataclasses import replace

import numpy
import pytest
from truth_server import Script, TruthServer, serving

from orchestrator import labels
from orchestrator.bench import (
    REGISTRY,
    betterbench,
    decode_ctx,
    expected_s,
    gsm8k,
    measure_one,
    params_of,
    require_suite,
)
from orchestrator.bench.betterbench import WEIGHTS, combined_tok_per_s
from orchestrator.bench.context import BenchContext, Clock, Rates, conclude
from orchestrator.bench.load import Load, closed_loop
from orchestrator.bench.warm import shapes, warm
from orchestrator.client import Client, Completion
from orchestrator.corpora import CATEGORIES
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.recorded import table
from orchestrator.records import Measurement, from_jsonable, to_jsonable

DECODE = {"contexts_tokens": [64, 256], "generate_tokens": 61, "repeats": 2}
PREFILL = {"lengths_tokens": [128, 512], "runs": 3, "warmup_runs": 1}
BETTERBENCH = {"prompts_per_category": 2, "max_tokens": 24, "concurrency": [1, 4], "min_offered_share": 0.3}
GSM8K = {"n": 12, "max_tokens": 16, "concurrency": 4}


def measure(
    name: str, script: Script, params: dict, context: BenchContext, window_tokens: int = 4096
) -> tuple[TruthServer, Measurement]:
    async def run():
        async with serving(script, window_tokens) as (server, target):
            return server, await measure_one(name, target, params, context)

    server, measurement = asyncio.run(run())
    again = from_jsonable(Measurement, json.loads(json.dumps(to_jsonable(measurement))))
    assert again == replace(measurement, samples=again.samples, config=again.config)
    return server, measurement


def test_decode_finds_the_scripted_step_time_without_the_first_update(context):
    _, found = measure("decode_ctx", Script(ttft_s=0.2, gap_s=0.004), DECODE, context)
    assert found.status == "ok", found.reason
    assert found.metrics["decode.ms_per_step.ctx64"] == pytest.approx(4.0, rel=0.03)
    assert found.metrics["decode.tok_per_s.ctx256"] == pytest.approx(250.0, rel=0.03)
    assert found.metrics["decode.errors"] == 0
    assert "decode.acceptance_length.ctx64" not in found.metrics
    assert found.corpora["prose"] == context.corpora.prose().sha256


def test_decode_counts_engine_steps_and_not_tokens_under_speculation(context):
    script = Script(gap_s=0.006, pattern=(3, 1, 5, 3), drafter=True, draft_tokens=5)
    _, found = measure("decode_ctx", script, DECODE, context)
    assert found.status == "ok", found.reason
    assert found.metrics["decode.ms_per_step.ctx256"] == pytest.approx(6.0, rel=0.03)
    assert found.metrics["decode.acceptance_length.ctx256"] == pytest.approx(3.0)
    assert found.metrics["decode.tok_per_s.ctx256"] == pytest.approx(500.0, rel=0.03)
    assert found.metrics["decode.accepted_share.ctx256"] == pytest.approx(2.0 / 5.0)
    assert not found.notes


def test_decode_prompts_are_exact_equal_for_both_arms_and_begin_unlike_each_other(context):
    first, _ = measure("decode_ctx", Script(gap_s=0.0), DECODE, context)
    second, _ = measure("decode_ctx", Script(gap_s=0.001), DECODE, context)
    prompts = [sent.body["prompt"] for sent in first.sent]
    assert [len(prompt) for prompt in prompts] == [64, 64, 256, 256]
    assert prompts == [sent.body["prompt"] for sent in second.sent]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 4
    other_seed, _ = measure("decode_ctx", Script(gap_s=0.0), DECODE, replace(context, seed=2))
    assert prompts[0] != other_seed.sent[0].body["prompt"]


@pytest.mark.parametrize(
    ("name", "params"), [("decode_ctx", DECODE), ("prefill", PREFILL), ("betterbench", BETTERBENCH)]
)
def test_a_prefix_cache_hit_makes_a_cold_bench_invalid(context, name, params):
    _, found = measure(name, Script(cached_tokens=16, gap_s=0.001), params, context)
    assert found.status == "invalid"
    assert "came from the prefix cache" in found.reason
    assert all(name.endswith((".errors", ".skipped", ".short_outputs")) for name in found.metrics)
    assert found.samples


def test_a_server_without_cache_counters_is_noted(context):
    _, found = measure("prefill", Script(prefix_counters=False), PREFILL, context)
    assert found.status == "ok"
    assert any("not proven" in note for note in found.notes)


def test_contexts_over_the_window_are_recorded_as_skipped(context):
    _, found = measure("decode_ctx", Script(gap_s=0.001), DECODE, context, window_tokens=200)
    assert found.status == "ok"
    assert found.metrics["decode.skipped"] == 1
    assert "decode.ms_per_step.ctx256" not in found.metrics
    assert {"context_tokens": 256, "skipped": "over the window"} in found.samples
    _, none_left = measure("decode_ctx", Script(), DECODE, context, window_tokens=100)
    assert (none_left.status, none_left.reason) == ("invalid", "every context is over the window")


def test_prefill_finds_the_scripted_rate(context):
    script = Script(ttft_s=0.0, ttft_s_per_prompt_token=1 / 4000)
    server, found = measure("prefill", script, PREFILL, context)
    assert found.status == "ok", found.reason
    assert found.metrics["prefill.prompt_tok_per_s.len512"] == pytest.approx(4000, rel=0.05)
    assert found.metrics["prefill.ttft_ms.len128"] == pytest.approx(32.0, abs=4.0)
    assert found.metrics["prefill.prompt_tok_per_s.best.len512"] >= found.metrics["prefill.prompt_tok_per_s.len512"]
    assert [len(sent.body["prompt"]) for sent in server.sent] == [128] * 4 + [512] * 4
    assert len({tuple(sent.body["prompt"][:16]) for sent in server.sent}) == 8


def test_betterbench_measures_each_category_and_level(context):
    server, found = measure("betterbench", Script(ttft_s=0.02, gap_s=0.004), BETTERBENCH, context)
    assert found.status == "ok", found.reason
    for category in CATEGORIES:
        assert found.metrics[f"betterbench.decode_tok_per_s.{category}"] == pytest.approx(250, rel=0.05)
    assert found.metrics["betterbench.combined_tok_per_s"] == pytest.approx(250, rel=0.05)
    assert found.metrics["betterbench.itl_ms.p50.conc4"] == pytest.approx(4.0, rel=0.1)
    assert found.metrics["betterbench.ttft_ms.p50.conc1"] == pytest.approx(20.0, abs=5.0)
    assert found.metrics["betterbench.achieved_concurrency.conc4"] == pytest.approx(4.0, abs=0.6)
    assert found.metrics["betterbench.aggregate_tok_per_s.conc4"] > (
        2.5 * found.metrics["betterbench.aggregate_tok_per_s.conc1"]
    )
    assert len({sent.body["messages"][0]["content"] for sent in server.sent}) == len(server.sent) == 32


def test_the_combined_figure_is_the_weighted_mean_of_the_published_weights():
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    rates = {"code": 100.0, "reasoning": 50.0, "prose": 40.0, "json": 80.0, "file_edit": 90.0, "summarization": 30.0}
    assert combined_tok_per_s({**rates, "math": 1.0, "chat": 1.0}) == pytest.approx(30 + 10 + 6 + 12 + 9 + 3)


def test_waiting_for_a_slot_is_in_no_ttft(context):
    _, found = measure("betterbench", Script(ttft_s=0.05, gap_s=0.002), {**BETTERBENCH, "concurrency": [1]}, context)
    assert found.metrics["betterbench.ttft_ms.p99.conc1"] < 80.0  # the last of 16 waited a second for its turn


def test_short_outputs_are_counted_and_have_no_rate(context):
    params = {**BETTERBENCH, "min_tokens": 16, "concurrency": [1]}
    obedient, found = measure("betterbench", Script(stop_after=3, gap_s=0.001), params, context)
    assert found.metrics["betterbench.short_outputs"] == 0
    assert {sum(sent.update_tokens) for sent in obedient.sent} == {16}
    script = Script(reply=lambda text: "no", gap_s=0.001)
    _, found = measure("betterbench", script, params, context)
    assert found.status == "invalid"
    assert "no usable output in code" in found.reason
    assert found.metrics["betterbench.short_outputs"] == 16


def test_injected_errors_are_shown_and_move_no_latency(context):
    """Expected is what the streams that were not broken say by themselves, so that no load of this machine matters."""
    script = Script(ttft_s=0.02, gap_s=0.004, fault="fin", fault_every=11, fault_after_updates=2)
    server, found = measure("betterbench", script, {**BETTERBENCH, "max_client_lag_p99_ms": 1e4}, context)
    assert found.status == "ok", found.reason
    assert found.metrics["betterbench.errors"] == 2
    whole = [sample for sample in found.samples if sample.get("error") == ""]
    assert len(whole) == 30 == sum(sum(sent.update_tokens) == 16 for sent in server.sent)
    rates = {}
    for category in WEIGHTS:
        streams = [s["update_ms"] for s in whole if (s["concurrency"], s["category"]) == (1, category)]
        rates[category] = 1e3 * 15 * len(streams) / sum(at_ms[-1] - at_ms[0] for at_ms in streams)
    assert found.metrics["betterbench.combined_tok_per_s"] == pytest.approx(combined_tok_per_s(rates), rel=1e-3)
    ttft_ms = [sample["update_ms"][0] for sample in whole if sample["concurrency"] == 4]
    assert found.metrics["betterbench.ttft_ms.p50.conc4"] == pytest.approx(statistics.median(ttft_ms), rel=1e-3)
    longest_ms = max(sample["longest_gap_ms"] for sample in whole if sample["concurrency"] == 4)
    assert found.metrics["betterbench.longest_gap_ms.conc4"] == pytest.approx(longest_ms, rel=1e-3)


def test_a_failed_request_is_in_no_latency_and_takes_its_time_with_it():
    good = done_at(100, 110, 130)
    failed = replace(done_at(5, 905), error="connection broken")
    levels = betterbench._level(Load((good, failed, good), 2, (1.0,)), params_of("betterbench", {"min_tokens": 2}))
    assert levels["betterbench.ttft_ms.p50.conc2"] == 100.0
    assert levels["betterbench.itl_ms.p50.conc2"] == 15.0
    assert levels["betterbench.longest_gap_ms.conc2"] == 20.0
    # 6 good tokens over 905 ms, of which the good requests were busy 260 of 1165 ms
    assert levels["betterbench.aggregate_tok_per_s.conc2"] == pytest.approx(6 / (0.905 * 260 / 1165))


def done_at(*update_ms: float, tokens: tuple[int, ...] = ()) -> Completion:
    """A good request, sent at 0, whose updates arrived at these milliseconds."""
    at_ns = tuple(int(1e6 * at) for at in update_ms)
    tokens = tokens or (1,) * len(at_ns)
    return Completion(0, at_ns[-1], at_ns, tokens, 8, None, sum(tokens), "length", "", "", "")


def test_the_latencies_of_a_level_are_these_statistics_of_its_requests():
    # TTFT: 1..100 ms and one of 1000; the gaps after it: 1, 2 and 60 ms, the last shared by three tokens
    requests = tuple(done_at(n, n + 1, n + 3, n + 63, tokens=(1, 1, 1, 3)) for n in (*range(1, 101), 1000))
    lags_ms = tuple(float(n**2) for n in range(101))
    levels = betterbench._level(Load(requests, 7, lags_ms), params_of("betterbench", {"min_tokens": 2}))
    assert levels == {
        "betterbench.ttft_ms.p50.conc7": 51.0,
        "betterbench.ttft_ms.p99.conc7": 100.0,
        "betterbench.itl_ms.p50.conc7": 20.0,  # 60 / 3; the mean is 12.6
        "betterbench.itl_ms.p99.conc7": 20.0,
        "betterbench.longest_gap_ms.conc7": 60.0,
        "betterbench.update_ms.p50.conc7": 2.0,
        "betterbench.update_ms.p99.conc7": 60.0,
        "betterbench.low1_tok_per_s.conc7": pytest.approx(50.0),  # three tokens in 60 ms
        "betterbench.offered_share.conc7": 1.0,
        "betterbench.client_lag_ms.p99.conc7": 99.0**2,
        "betterbench.aggregate_tok_per_s.conc7": pytest.approx(606 / 1.063),
        "betterbench.achieved_concurrency.conc7": pytest.approx((5050 + 1000 + 101 * 63) / 1063),
    }
    gaps = [done_at(0, gap) for gap in (1, 2, 3, 50, *range(100, 301))]
    levels = betterbench._level(Load(tuple(gaps), 1, ()), params_of("betterbench", {"min_tokens": 2}))
    assert levels["betterbench.itl_ms.p50.conc1"] == 198.0
    assert levels["betterbench.itl_ms.p99.conc1"] == pytest.approx(297.96)
    assert levels["betterbench.longest_gap_ms.conc1"] == 300.0


def test_decode_takes_medians_over_the_repeats_and_the_longest_gap_of_all():
    repeats = [done_at(10, 14, 18), done_at(20, 25, 30), done_at(90, 150, 290)]
    assert decode_ctx._summary(64, repeats) == {
        "decode.ms_per_step.ctx64": 5.0,  # of 4, 5 and 100
        "decode.tok_per_s.ctx64": 200.0,
        "decode.ttft_ms.ctx64": 20.0,
        "decode.longest_gap_ms.ctx64": 140.0,
    }


def test_tokens_a_second_and_time_per_step_are_of_the_same_repeats():
    repeats = [done_at(0, 10, 20), done_at(0, 40, 80)]  # two: the mean of the rates is no rate of the mean time
    found = decode_ctx._summary(64, repeats)
    assert found["decode.ms_per_step.ctx64"] == 25.0 and found["decode.tok_per_s.ctx64"] == pytest.approx(1e3 / 25.0)


def test_prefill_takes_the_median_run_and_the_best_one(context, monkeypatch):
    ttfts_ms = iter([999.0, 10.0, 20.0, 90.0])  # the first is the warm-up's

    async def complete(_client, prompt, _max_tokens, **_sampling):
        return replace(done_at(next(ttfts_ms)), prompt_tokens=len(prompt))

    monkeypatch.setattr(Client, "complete", complete)
    _, found = measure("prefill", Script(), {**PREFILL, "lengths_tokens": [128]}, context)
    assert found.metrics["prefill.ttft_ms.len128"] == 20.0
    assert found.metrics["prefill.prompt_tok_per_s.len128"] == pytest.approx(128 / 0.02)
    assert found.metrics["prefill.prompt_tok_per_s.best.len128"] == pytest.approx(128 / 0.01)


@pytest.mark.parametrize(("lag_ms", "status"), [(99.0, "ok"), (101.0, "invalid")])
def test_a_client_that_fell_behind_makes_betterbench_invalid(context, monkeypatch, lag_ms, status):
    async def loaded(*arguments):
        return replace(await closed_loop(*arguments), client_lag_ms=(0.0, *[lag_ms] * 99))

    monkeypatch.setattr(betterbench, "closed_loop", loaded)
    _, found = measure("betterbench", Script(gap_s=0.001), {**BETTERBENCH, "concurrency": [1]}, context)
    assert found.status == status
    assert found.reason == ("" if status == "ok" else "conc1: the client fell behind: its timer was 101 ms late (p99)")


def test_betterbench_counts_and_lag_can_be_computed_from_the_samples(context):
    script = Script(gap_s=0.001, pattern=(3, 1), drafter=True, preempted_per_request=2)
    _, found = measure("betterbench", script, {**BETTERBENCH, "min_tokens": 8}, context)
    assert found.status == "ok", found.reason
    for sample in (sample for sample in found.samples if "client_lag_ms" in sample):
        at = f"conc{sample['concurrency']}"
        lag_ms = numpy.percentile(sample["client_lag_ms"], 99)
        assert found.metrics[f"betterbench.client_lag_ms.p99.{at}"] == pytest.approx(lag_ms, abs=1e-3)
        drafter = sample["speculation"]
        length = 1 + drafter["accepted_tokens"] / drafter["drafts"]
        assert found.metrics[f"betterbench.acceptance_length.{at}"] == pytest.approx(length)
        assert found.metrics[f"betterbench.preemptions.{at}"] == sample["preemptions"] == 32.0
    assert [sample["concurrency"] for sample in found.samples if "client_lag_ms" in sample] == [1, 4]


def test_an_invalid_measurement_keeps_its_counts_only():
    metrics = {"a.ttft_ms": 1.0, "a.errors": 2.0, "a.skipped": 3.0, "a.truncated": 4.0, "a.short_outputs": 5.0}
    given = {"bench": "a", "clock": Clock.start(), "config": {}, "metrics": metrics, "samples": ()}
    invalid = conclude(**given, reason="two\nlines")
    assert (invalid.status, invalid.reason) == ("invalid", "two lines")
    assert invalid.metrics == {name: value for name, value in metrics.items() if name != "a.ttft_ms"}
    assert (conclude(**given).status, conclude(**given).metrics) == ("ok", metrics)


@pytest.mark.parametrize("fault", ["http500", "fin", "no_done", "error_event"])
@pytest.mark.parametrize(
    ("name", "params"),
    [("decode_ctx", DECODE), ("prefill", PREFILL), ("betterbench", BETTERBENCH), ("gsm8k", GSM8K)],
)
def test_all_errors_are_invalid_and_never_a_number(context, name, params, fault):
    _, found = measure(name, Script(fault=fault, fault_after_updates=0, gap_s=0.001), params, context)
    assert found.status == "invalid"
    assert re.search("all .* requests failed", found.reason)
    errors = [value for metric, value in found.metrics.items() if metric.endswith(".errors")]
    assert errors == [float(sum("error" in sample for sample in found.samples))]
    assert "\n" not in found.reason


@pytest.mark.parametrize(
    ("name", "params"),
    [("decode_ctx", DECODE), ("prefill", PREFILL), ("betterbench", BETTERBENCH), ("gsm8k", GSM8K)],
)
def test_a_dead_server_makes_every_bench_invalid(context, name, params):
    async def run():
        async with serving(Script()) as (_, target):
            pass
        return await measure_one(name, target, params, context)

    found = asyncio.run(run())
    assert found.status == "invalid"
    assert "Connect" in found.reason


def test_a_server_that_dies_under_a_bench_leaves_the_samples_and_the_errors(context):
    async def run():
        async with serving(Script(gap_s=0.005)) as (server, target):

            def advance(done: int, _total: int, _note: str) -> None:
                server.script.fault = "http500" if done >= 5 else ""

            return await measure_one("betterbench", target, BETTERBENCH, replace(context, advance=advance))

    found = asyncio.run(run())
    assert found.status == "invalid"
    assert found.reason.startswith("conc1: 11 of 16 requests failed; the first: HTTP 500")
    assert found.metrics["betterbench.errors"] == 27.0
    assert len([sample for sample in found.samples if "error" in sample]) == 32


def test_a_defect_of_a_bench_is_invalid_and_keeps_its_traceback(context, monkeypatch):
    from orchestrator.bench import prefill

    async def broken(*_arguments):
        return 1 / 0

    monkeypatch.setattr(prefill, "measure", broken)
    _, found = measure("prefill", Script(), PREFILL, context)
    assert found.status == "invalid"
    assert found.reason.startswith("prefill crashed: ZeroDivisionError")
    assert "in broken" in found.notes[0]


def test_word_problems_are_scored_and_never_called_gsm8k(context):
    def reply(text: str) -> str:
        number = int(re.search(r"What is (\d+)", text).group(1))
        if number == 3:
            return "I do not know."
        if number == 4:
            return "It is 9999 #### 9999"
        return f"The sum is {2 * number}" if number % 2 else f"Add them. #### {2 * number}"

    _, found = measure("gsm8k", Script(reply=reply, gap_s=0.0), GSM8K, context)
    assert found.status == "ok"
    assert found.metrics["word_problems.accuracy_flexible"] == pytest.approx(10 / 12)
    assert found.metrics["word_problems.accuracy_strict"] == pytest.approx(5 / 12)
    assert found.metrics["word_problems.accuracy_strict_n"] == 12
    assert not any(name.startswith("gsm8k") for name in found.metrics)
    assert list(found.corpora) == ["word_problems"]
    assert all(sample["completion"] and sample["finish_reason"] == "stop" for sample in found.samples)


def test_an_error_is_not_a_wrong_answer_and_a_truncation_is_counted(context):
    def reply(text: str) -> str:
        number = int(re.search(r"What is (\d+)", text).group(1))
        if number == 7:
            return " ".join(["word"] * 40)
        return f"#### {2 * number}" if number % 3 else f"It is {2 * number}"

    script = Script(
        reply=reply,
        fault="fin",
        fault_every=12,
        fault_after_updates=0,
        gap_s=0.0,
    )
    _, found = measure("gsm8k", script, {**GSM8K, "concurrency": 1}, context)
    assert found.status == "ok"
    assert found.metrics["word_problems.errors"] == 1
    assert found.metrics["word_problems.truncated"] == 1
    assert found.metrics["word_problems.accuracy_strict_n"] == 11
    # answered: 0 to 10; wrong: 7, and to the strict pattern 0, 3, 6 and 9 too
    assert found.metrics["word_problems.accuracy_strict"] == pytest.approx(6 / 11)
    assert found.metrics["word_problems.accuracy_flexible"] == pytest.approx(10 / 11)
    assert [sample["correct_strict"] for sample in found.samples].count(None) == 1


def test_an_accuracy_is_of_the_answered_questions():
    def sample(strict: bool | None, flexible: bool | None, error: str = "", finish_reason: str = "stop"):
        return {
            "error": error,
            "finish_reason": finish_reason,
            "correct_strict": strict,
            "correct_flexible": flexible,
        }

    samples = [sample(True, True), sample(False, True), sample(False, False, "", "length"), sample(False, True)]
    broken = [sample(None, None, "HTTP 500", "length")] * 4
    assert gsm8k.summary("gsm8k", [*samples, *broken]) == {
        "gsm8k.errors": 4.0,
        "gsm8k.truncated": 1.0,
        "gsm8k.accuracy_flexible": 3 / 4,
        "gsm8k.accuracy_flexible_n": 4.0,
        "gsm8k.accuracy_strict": 1 / 4,
        "gsm8k.accuracy_strict_n": 4.0,
    }
    assert gsm8k.summary("gsm8k", broken) == {"gsm8k.errors": 4.0, "gsm8k.truncated": 0.0}


@pytest.mark.parametrize(("params", "shown"), [({}, "word_problems"), ({"source": "gsm8k"}, "gsm8k")])
def test_own_word_problems_are_not_called_gsm8k_when_they_crash_or_are_invalid(context, monkeypatch, params, shown):
    async def broken(*_arguments):
        return 1 / 0

    assert labels.bench_name("gsm8k", params) == shown
    monkeypatch.setattr(gsm8k, "measure", broken)
    _, found = measure("gsm8k", Script(), params, context)
    assert found.reason.startswith(f"{shown} crashed: ZeroDivisionError")
    cells = [cell for column in table.summary_table([found], []).columns for cell in column.cells]
    assert shown in map(str, cells)
    assert ("gsm8k" in "".join(map(str, cells)).lower()) == (shown == "gsm8k")


def test_a_table_says_that_there_is_no_interval():
    (row, *_) = table._spread("kl.mean_nats.prose", {"kl.mean_nats.prose": 0.1})
    assert row == "no interval"


def test_outputs_that_cannot_fit_are_found_before_a_boot(context):
    require_suite({"decode_ctx": DECODE, "prefill": PREFILL}, replace(context, window_tokens=129))
    for name, params, window_tokens in (
        ("decode_ctx", DECODE, 124),
        ("prefill", PREFILL, 128),
        ("betterbench", BETTERBENCH, 24),
        ("gsm8k", GSM8K, 16),
    ):
        require_suite({name: params}, replace(context, window_tokens=window_tokens + 1))
        with pytest.raises(
            UsageError, match=rf"benches\.{name}\..* take {window_tokens + 1} tokens, .*{window_tokens}$"
        ):
            require_suite({name: params}, replace(context, window_tokens=window_tokens))


def test_the_questions_of_a_subset_depend_on_the_seed_only(context):
    asked = []
    for seed in (1, 1, 2):
        server, _ = measure("gsm8k", Script(gap_s=0.0), {**GSM8K, "n": 5}, replace(context, seed=seed))
        asked.append(sorted(sent.body["messages"][0]["content"] for sent in server.sent))
    assert asked[0] == asked[1] != asked[2]


def test_wrong_parameters_name_the_key():
    with pytest.raises(UsageError, match=r"benches\.prefill: .*lenghts_tokens"):
        params_of("prefill", {"lenghts_tokens": [1]})
    with pytest.raises(UsageError, match=r"benches\.decode_ctx: .*repeats >= 1"):
        params_of("decode_ctx", {"repeats": 0})
    with pytest.raises(UsageError, match=r"benches\.gsm8k: .*n"):
        params_of("gsm8k", {"n": "many"})
    with pytest.raises(UsageError, match=r"benches\.speed: no such bench"):
        params_of("speed", {})


def test_the_expected_time_follows_the_rates():
    slow = expected_s("decode_ctx", DECODE, Rates(decode_tok_per_s=10))
    assert slow > 2.5 * expected_s("decode_ctx", DECODE)
    assert all(expected_s(name, {}) > 0 for name in REGISTRY)


def test_warming_covers_every_shape_of_a_suite_once(context):
    suite = {
        "decode_ctx": DECODE,
        "prefill": PREFILL,
        "betterbench": BETTERBENCH,
        "gsm8k": GSM8K,
        "kld": {"document_tokens": 100, "top_k": 20},
    }
    assert shapes(suite, 400) == ([(64, 8), (128, 1), (256, 8)], [1, 4], [(100, 20)])

    async def run():
        async with serving(Script(gap_s=0.0)) as (server, target):
            await warm(target, suite, context)
            warmed = [sent.body for sent in server.sent]
            await measure_one("decode_ctx", target, DECODE, context)
            return warmed, [sent.body for sent in server.sent[len(warmed) :]]

    warmed, measured = asyncio.run(run())
    assert [len(body["prompt"]) for body in warmed if "prompt" in body] == [64, 128, 256, 512]
    assert len([body for body in warmed if "messages" in body]) == 1 + 4
    starts = {tuple(body["prompt"][:8]) for body in warmed if "prompt" in body}
    assert not starts & {tuple(body["prompt"][:8]) for body in measured}


def test_warming_a_broken_server_says_so(context):
    async def run():
        async with serving(Script(fault="http500")) as (_, target):
            await warm(target, {"prefill": PREFILL}, context)

    with pytest.raises(InvalidMeasurement, match="warm-up request failed: HTTP 500"):
        asyncio.run(run())


def test_what_a_suite_lacks_is_found_before_anything_starts(context):
    require_suite(
        {"gsm8k": GSM8K, "kld": {}, "betterbench": BETTERBENCH, "prefill": PREFILL, "decode_ctx": {}}, context
    )
    with pytest.raises(UsageError, match=r"benches\.gsm8k\.n is 13, source own has 12 questions"):
        require_suite({"gsm8k": {"n": 13}}, context)
    with pytest.raises(UsageError, match=r"prompts_per_category is 4, the corpus has 3"):
        require_suite({"betterbench": {"prompts_per_category": 4}}, context)
    with pytest.raises(UsageError, match=r"corpus /no/such/file"):
        require_suite({"kld": {"corpora": ["wikitext"], "wikitext_path": "/no/such/file"}}, context)
