"""betterbench: eight kinds of prompts through the chat template, one stream and several.

The combined figure is the weighted mean over the categories of decode tok/s at one stream, with the weights that
BetterBench publishes; math and chat are measured and carry no weight. A category's decode tok/s is the sum of
tokens after each first update over the sum of their times. Every request starts with a line of its own, so that
no prompt begins as another one did.

With `grid`, the prompts cover BetterBench's published grid of input and output lengths; what the server's window does
not hold is skipped and counted. Without, every prompt is as short as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from orchestrator.bench.context import BenchContext, Clock, Rates, Window, close_window, conclude
from orchestrator.bench.grid import Job, jobs
from orchestrator.bench.load import MAX_LAG_P99_MS, MIN_OFFERED_SHARE, Load, closed_loop
from orchestrator.client import Client, Completion
from orchestrator.corpora import CATEGORIES, Prompt
from orchestrator.errors import UsageError
from orchestrator.metrics import PREEMPTIONS, growth, speculation
from orchestrator.records import Measurement, Target, to_jsonable

WEIGHTS = {"code": 0.30, "reasoning": 0.20, "prose": 0.15, "json": 0.15, "file_edit": 0.10, "summarization": 0.10}


@dataclass(frozen=True)
class Params:
    prompts_per_category: int = 2
    grid: bool = False
    medium_tokens: int = 2048  # of material before the prompt, published as 2k to 8k
    long_tokens: int = 16384  # published as 16k to 64k
    max_tokens: int = 64  # an upper bound on each prompt's own
    min_tokens: int = 16  # the server may not stop earlier; a shorter output has no rate and is counted apart
    concurrency: tuple[int, ...] = (1, 4)
    temperature: float = 0.0
    max_error_share: float = 0.1
    max_client_lag_p99_ms: float = MAX_LAG_P99_MS  # above it this process was too slow to be the clock
    min_offered_share: float = (
        MIN_OFFERED_SHARE  # of several streams; below it they stood empty too long between requests
    )

    def __post_init__(self) -> None:
        if not self.concurrency or self.concurrency[0] != 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError("concurrency must start with 1 (the combined figure is of one stream) and not repeat")
        if self.prompts_per_category < 1 or not 2 <= self.min_tokens <= self.max_tokens:
            raise ValueError("prompts_per_category must be >= 1 and 2 <= min_tokens <= max_tokens")
        if not 1 <= self.medium_tokens <= self.long_tokens:
            raise ValueError("1 <= medium_tokens <= long_tokens")

    @property
    def material_tokens(self) -> Mapping[str, int]:
        """Input length of the grid -> tokens of material before the prompt; empty without a grid."""
        return {"short": 0, "medium": self.medium_tokens, "long": self.long_tokens} if self.grid else {}


def expected_s(params: Params, rates: Rates) -> float:
    tokens = len(CATEGORIES) * params.prompts_per_category * params.max_tokens
    read = 0.0
    if params.grid:  # a third of the prompts each; output is 512 tokens in the middle
        tokens = len(CATEGORIES) * params.prompts_per_category * min(params.max_tokens, 512)
        lengths = (length for length in params.material_tokens.values() if length < (rates.window_tokens or 2**31))
        read = len(CATEGORIES) * params.prompts_per_category / 3 * sum(lengths) / rates.prefill_tok_per_s
    return sum(
        read + tokens / (rates.decode_tok_per_s if level == 1 else rates.batch_tok_per_s)
        for level in params.concurrency
    )


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpora lack what `params` ask for, or the longest output alone does not fit."""
    chosen = _choose(context.corpora.prompts()[1], params.prompts_per_category)
    if params.grid:
        context.corpora.grid(), context.corpora.prose(), context.corpora.code()
    longest = max(min(prompt.max_tokens, params.max_tokens) for prompt in chosen)
    context.require_room(longest + 1, "benches.betterbench.max_tokens and a prompt")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, prompts = context.corpora.prompts()
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
        asked, skipped = _choose(prompts, params.prompts_per_category), []
        chosen = [Job(prompt) for prompt in asked]
        if params.grid:
            chosen, skipped = await jobs(client, target, context, asked, params.material_tokens, params.max_tokens)
        metrics["betterbench.skipped"] = float(len(skipped))
        samples += [{"prompt_id": job.prompt.id, "cell": job.cell, "skipped": "over the window"} for job in skipped]
        notes += [f"skipped over the window: {', '.join(job.prompt.id for job in skipped)}"] if skipped else []
        for level in params.concurrency:

            async def request(job: Job, level: int = level) -> Completion:
                return await _request(client, params, context, job, level)

            before = await client.metrics()
            load = await closed_loop(chosen, level, request, on_done)
            done = load.completions
            window = await close_window(client, before, done, params.max_error_share)
            samples += [
                completion.sample(
                    concurrency=level, category=job.prompt.category, prompt_id=job.prompt.id, cell=job.cell
                )
                for job, completion in zip(chosen, done, strict=True)
            ]
            samples.append(_level_sample(load, window))
            reason = window.reason or load.fell_behind(
                params.max_client_lag_p99_ms, params.min_offered_share if level > 1 else 0.0
            )
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
                    metrics |= _cells(chosen, done, params)
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


async def _request(client: Client, params: Params, context: BenchContext, job: Job, level: int) -> Completion:
    prompt = job.prompt
    nonce = context.seed_for("betterbench", level, prompt.id)
    material = f"Material, which the task after it may leave unused:\n\n{job.material}\n\n" if job.material else ""
    messages = [
        {"role": "system", "content": f"{nonce:08x} is the number of this request. You are a helpful assistant."},
        {"role": "user", "content": material + prompt.prompt},
    ]
    return await client.chat(
        messages,
        min(prompt.max_tokens, params.max_tokens),
        temperature=params.temperature,
        seed=nonce,
        min_tokens=min(prompt.max_tokens, params.min_tokens),
    )


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
    gaps = [gap for done in good if not _is_short(done, params) for gap in done.gaps]
    levels = {
        f"betterbench.ttft_ms.p50.{where}": float(numpy.percentile(ttft_ms, 50)),
        f"betterbench.ttft_ms.p99.{where}": float(numpy.percentile(ttft_ms, 99)),
        f"betterbench.aggregate_tok_per_s.{where}": load.tok_per_s,
        f"betterbench.achieved_concurrency.{where}": load.achieved_concurrency,
        f"betterbench.offered_share.{where}": load.offered_share,
        f"betterbench.longest_gap_ms.{where}": max(done.longest_gap_ms for done in good),
        f"betterbench.client_lag_ms.p99.{where}": load.client_lag_p99_ms,
    }
    if itl_ms:
        levels[f"betterbench.itl_ms.p50.{where}"] = float(numpy.percentile(itl_ms, 50))
        levels[f"betterbench.itl_ms.p99.{where}"] = float(numpy.percentile(itl_ms, 99))
        levels[f"betterbench.update_ms.p50.{where}"] = float(numpy.percentile([gap_ms for gap_ms, _ in gaps], 50))
        levels[f"betterbench.update_ms.p99.{where}"] = float(numpy.percentile([gap_ms for gap_ms, _ in gaps], 99))
        levels[f"betterbench.low1_tok_per_s.{where}"] = low1_tok_per_s(gaps)
    return levels


def low1_tok_per_s(gaps: Sequence[tuple[float, int]]) -> float:
    """The mean of the slowest 1% (at least one) of the updates' rates, tokens / gap: BetterBench's "1% low"."""
    rates = numpy.sort([1e3 * tokens / gap_ms for gap_ms, tokens in gaps])
    return float(rates[: max(1, round(0.01 * len(rates)))].mean())


def _level_sample(load: Load, window: Window) -> dict[str, Any]:
    """What a level's metrics need besides its requests: the client's lag, and the growth of the server's counters."""
    drafter = speculation(window.before, window.after)
    return {
        "concurrency": load.requested_concurrency,
        "client_lag_ms": [round(lag_ms, 4) for lag_ms in load.client_lag_ms],
        "offered_share": load.offered_share,
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


def _categories(jobs: Sequence[Job], done: Sequence[Completion], params: Params) -> tuple[dict[str, float], list[str]]:
    """(category -> decode tok/s, weighted categories without a usable output)."""
    rates: dict[str, float] = {}
    for name in CATEGORIES:
        rate = _rate([got for job, got in zip(jobs, done, strict=True) if job.prompt.category == name], params)
        if rate is not None:
            rates[name] = rate
    return rates, [name for name in WEIGHTS if name not in rates]


def _cells(jobs: Sequence[Job], done: Sequence[Completion], params: Params) -> dict[str, float]:
    """Decode tok/s and median TTFT of each cell of the grid."""
    found: dict[str, float] = {}
    for cell in dict.fromkeys(job.cell for job in jobs if job.cell):
        of_cell = [got for job, got in zip(jobs, done, strict=True) if job.cell == cell and not got.error]
        if (rate := _rate(of_cell, params)) is not None:
            found[f"betterbench.cell_tok_per_s.{cell}"] = rate
        if of_cell:
            found[f"betterbench.cell_ttft_ms.{cell}"] = float(numpy.median([got.ttft_ms for got in of_cell]))
    return found


def _rate(done: Sequence[Completion], params: Params) -> float | None:
    """Tokens after the first updates over the sum of their times; None without a usable output."""
    usable = [completion for completion in done if not completion.error and not _is_short(completion, params)]
    span_ms = sum(completion.decode_span_ms for completion in usable)
    return 1e3 * sum(completion.decode_tokens for completion in usable) / span_ms if span_ms > 0 else None
