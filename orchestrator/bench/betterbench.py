"""betterbench: eight kinds of prompts through the chat template, one stream and several.

The combined figure is the weighted mean over the categories of decode tok/s at one stream, with the weights that
BetterBench publishes; math and chat are measured and carry no weight. A category's decode tok/s is the sum of
tokens after each first update over the sum of their times. Every request starts with a line of its own, so that
no prompt begins as another one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from orchestrator.bench.context import BenchContext, Clock, Rates, Window, close_window, conclude
from orchestrator.bench.load import Load, closed_loop
from orchestrator.client import Client, Completion
from orchestrator.corpora import CATEGORIES, Prompt
from orchestrator.errors import UsageError
from orchestrator.metrics import PREEMPTIONS, growth, speculation
from orchestrator.records import Measurement, Target, to_jsonable

WEIGHTS = {"code": 0.30, "reasoning": 0.20, "prose": 0.15, "json": 0.15, "file_edit": 0.10, "summarization": 0.10}


@dataclass(frozen=True)
class Params:
    prompts_per_category: int = 2
    max_tokens: int = 64  # an upper bound on each prompt's own
    min_tokens: int = 16  # the server may not stop earlier; a shorter output has no rate and is counted apart
    concurrency: tuple[int, ...] = (1, 4)
    temperature: float = 0.0
    max_error_share: float = 0.1
    max_client_lag_p99_ms: float = 100.0  # above it this process was too slow to be the clock

    def __post_init__(self) -> None:
        if not self.concurrency or self.concurrency[0] != 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError("concurrency must start with 1 (the combined figure is of one stream) and not repeat")
        if self.prompts_per_category < 1 or not 2 <= self.min_tokens <= self.max_tokens:
            raise ValueError("prompts_per_category must be >= 1 and 2 <= min_tokens <= max_tokens")


def expected_s(params: Params, rates: Rates) -> float:
    tokens = len(CATEGORIES) * params.prompts_per_category * params.max_tokens
    return sum(
        tokens / (rates.decode_tok_per_s if level == 1 else rates.batch_tok_per_s) for level in params.concurrency
    )


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpora lack what `params` ask for, or the longest output alone does not fit."""
    chosen = _choose(context.corpora.prompts()[1], params.prompts_per_category)
    longest = max(min(prompt.max_tokens, params.max_tokens) for prompt in chosen)
    context.require_room(longest + 1, "benches.betterbench.max_tokens and a prompt")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, prompts = context.corpora.prompts()
    chosen = _choose(prompts, params.prompts_per_category)
    metrics: dict[str, float] = {"betterbench.errors": 0.0, "betterbench.short_outputs": 0.0}
    samples: list[dict[str, Any]] = []
    notes: list[str] = []
    reasons: list[str] = []
    finished = 0

    def on_done() -> None:
        nonlocal finished
        finished += 1
        context.advance(finished, len(chosen) * len(params.concurrency), "betterbench")

    async with Client(target) as client:
        for level in params.concurrency:

            async def request(prompt: Prompt, level: int = level) -> Completion:
                return await _request(client, params, context, prompt, level)

            before = await client.metrics()
            load = await closed_loop(chosen, level, request, on_done)
            done = load.completions
            window = await close_window(client, before, done, params.max_error_share)
            samples += [
                completion.sample(concurrency=level, category=prompt.category, prompt_id=prompt.id)
                for prompt, completion in zip(chosen, done, strict=True)
            ]
            samples.append(_level_sample(load, window))
            reason = window.reason
            if load.client_lag_p99_ms > params.max_client_lag_p99_ms:
                reason = reason or f"the client fell behind: its timer was {load.client_lag_p99_ms:.0f} ms late (p99)"
            reasons += [f"conc{level}: {reason}"] if reason else []
            notes += [f"conc{level}: {window.note}"] if window.note else []
            metrics["betterbench.errors"] += sum(bool(completion.error) for completion in done)
            metrics["betterbench.short_outputs"] += sum(_is_short(completion, params) for completion in done)
            if not reason:
                metrics |= _level(load, params)
                metrics |= _counted(level, window)
                if level == 1:
                    rates, missing = _categories(chosen, done, params)
                    metrics |= {f"betterbench.decode_tok_per_s.{name}": rate for name, rate in rates.items()}
                    reasons += [f"no usable output in {', '.join(missing)}"] if missing else []
                    if not missing:
                        metrics["betterbench.combined_tok_per_s"] = combined_tok_per_s(rates)
            if window.lost:
                break
    return conclude(
        bench="betterbench",
        clock=clock,
        config=to_jsonable(params),
        metrics=metrics,
        samples=samples,
        reason="; ".join(reasons),
        notes=notes,
        corpora={"prompts": sha256},
    )


def combined_tok_per_s(rates: dict[str, float]) -> float:
    """The weighted mean of the categories' decode tok/s; the weights sum to 1."""
    return sum(weight * rates[name] for name, weight in WEIGHTS.items())


def _choose(prompts: Sequence[Prompt], per_category: int) -> list[Prompt]:
    """The first `per_category` of each category, interleaved so that a drift hits all alike."""
    groups = [[prompt for prompt in prompts if prompt.category == name] for name in CATEGORIES]
    shortest = min(len(group) for group in groups)
    if per_category > shortest:
        raise UsageError(f"benches.betterbench.prompts_per_category is {per_category}, the corpus has {shortest}")
    return [group[number] for number in range(per_category) for group in groups]


async def _request(client: Client, params: Params, context: BenchContext, prompt: Prompt, level: int) -> Completion:
    nonce = context.seed_for("betterbench", level, prompt.id)
    messages = [
        {"role": "system", "content": f"{nonce:08x} is the number of this request. You are a helpful assistant."},
        {"role": "user", "content": prompt.prompt},
    ]
    completion = await client.chat(
        messages,
        min(prompt.max_tokens, params.max_tokens),
        temperature=params.temperature,
        seed=nonce,
        min_tokens=min(prompt.max_tokens, params.min_tokens),
    )
    if not completion.error and completion.finish_reason not in ("stop", "length"):
        return replace(completion, error=f"finish_reason {completion.finish_reason}")
    return completion


def _is_short(completion: Completion, params: Params) -> bool:
    return not completion.error and (
        completion.completion_tokens < params.min_tokens or completion.decode_tok_per_s is None
    )


def _level(load: Load, params: Params) -> dict[str, float]:
    """Latencies over the good requests of one level; every token weighs the same in ITL."""
    where = f"conc{load.requested_concurrency}"
    good = [done for done in load.completions if not done.error]
    ttft_ms = [done.ttft_ms for done in good]
    itl_ms = [value for done in good if not _is_short(done, params) for value in done.itl_ms]
    levels = {
        f"betterbench.ttft_ms.p50.{where}": float(numpy.percentile(ttft_ms, 50)),
        f"betterbench.ttft_ms.p99.{where}": float(numpy.percentile(ttft_ms, 99)),
        f"betterbench.aggregate_tok_per_s.{where}": load.tok_per_s,
        f"betterbench.achieved_concurrency.{where}": load.achieved_concurrency,
        f"betterbench.longest_gap_ms.{where}": max(done.longest_gap_ms for done in good),
        f"betterbench.client_lag_ms.p99.{where}": load.client_lag_p99_ms,
    }
    if itl_ms:
        levels[f"betterbench.itl_ms.p50.{where}"] = float(numpy.percentile(itl_ms, 50))
        levels[f"betterbench.itl_ms.p99.{where}"] = float(numpy.percentile(itl_ms, 99))
    return levels


def _level_sample(load: Load, window: Window) -> dict[str, Any]:
    """What a level's metrics need besides its requests: the client's lag, and the growth of the server's counters."""
    drafter = speculation(window.before, window.after)
    return {
        "concurrency": load.requested_concurrency,
        "client_lag_ms": [round(lag_ms, 4) for lag_ms in load.client_lag_ms],
        "speculation": to_jsonable(drafter) if drafter else None,
        "preemptions": growth(window.before, window.after, PREEMPTIONS),
    }


def _counted(level: int, window: Window) -> dict[str, float]:
    """What the server's own counters say about the level."""
    found: dict[str, float] = {}
    if drafter := speculation(window.before, window.after):
        found[f"betterbench.acceptance_length.conc{level}"] = drafter.acceptance_length
    if (preemptions := growth(window.before, window.after, PREEMPTIONS)) is not None:
        found[f"betterbench.preemptions.conc{level}"] = preemptions
    return found


def _categories(
    prompts: Sequence[Prompt], done: Sequence[Completion], params: Params
) -> tuple[dict[str, float], list[str]]:
    """(category -> decode tok/s, weighted categories without a usable output)."""
    rates: dict[str, float] = {}
    for name in CATEGORIES:
        usable = [
            completion
            for prompt, completion in zip(prompts, done, strict=True)
            if prompt.category == name and not completion.error and not _is_short(completion, params)
        ]
        span_ms = sum(completion.decode_span_ms for completion in usable)
        if span_ms > 0:
            rates[name] = 1e3 * sum(completion.decode_tokens for completion in usable) / span_ms
    return rates, [name for name in WEIGHTS if name not in rates]
