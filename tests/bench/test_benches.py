"""Each bench against a server whose truth is known, and what each fault makes of it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest
from truth_server import Script, TruthServer, serving

from orchestrator.bench import REGISTRY, expected_s, measure_one, params_of, require_suite
from orchestrator.bench.betterbench import WEIGHTS, combined_tok_per_s
from orchestrator.bench.context import BenchContext, Rates
from orchestrator.bench.warm import shapes, warm
from orchestrator.corpora import CATEGORIES
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.records import Measurement, from_jsonable, to_jsonable

DECODE = {"contexts_tokens": [64, 256], "generate_tokens": 61, "repeats": 2}
PREFILL = {"lengths_tokens": [128, 512], "runs": 3, "warmup_runs": 1}
BETTERBENCH = {"prompts_per_category": 2, "max_tokens": 24, "concurrency": [1, 4]}
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
    script = Script(ttft_s=0.02, gap_s=0.004, fault="fin", fault_every=11, fault_after_updates=2)
    _, found = measure("betterbench", script, BETTERBENCH, context)
    assert found.status == "ok", found.reason
    assert found.metrics["betterbench.errors"] == 2
    assert found.metrics["betterbench.itl_ms.p50.conc4"] == pytest.approx(4.0, rel=0.1)
    assert found.metrics["betterbench.combined_tok_per_s"] == pytest.approx(250, rel=0.05)
    _, clean = measure("betterbench", replace(script, fault=""), BETTERBENCH, context)
    aggregate = "betterbench.aggregate_tok_per_s.conc4"
    assert found.metrics[aggregate] == pytest.approx(clean.metrics[aggregate], rel=0.1)


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
    assert errors == [float(len(found.samples))]
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
    assert len(found.samples) == 32


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
    script = Script(
        reply=lambda text: " ".join(["word"] * 40) if "What is 7 " in text else "#### 0",
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
    assert [sample["correct_strict"] for sample in found.samples].count(None) == 1


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
