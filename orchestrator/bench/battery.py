"""battery: does the served model end, say something, not loop, and find what stands far back in its prompt.

Each prompt of the package's battery asks for a short answer. Per output:

- stopped: the finish reason is "stop"; runaway: it is "length", so the answer did not end within `max_tokens`
- empty: no visible text, whatever was thought
- attractor: its end repeats itself: a period of at most 64 tokens fills the last 4 periods and at least 32 tokens

Retrieval: a sentence with a number stands at a depth of prose of exact length; a miss is an answer without the number.
The counts are no verdict by themselves; a gate compares them between two variants.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude, failures
from orchestrator.bench.gsm8k import template_options
from orchestrator.bench.load import closed_loop
from orchestrator.bench.prompts import paragraphs
from orchestrator.client import Client, Completion
from orchestrator.records import Measurement, Target, to_jsonable

LONGEST_PERIOD, LEAST_PERIODS, LEAST_TOKENS = 64, 4, 32
QUESTION = "What is the number of the locker in the station? Answer with the number alone."
TEMPLATE_TOKENS = 128  # what the chat template, the sentence and the question may take


@dataclass(frozen=True)
class Params:
    max_tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 4
    contexts_tokens: tuple[int, ...] = (1024,)  # of the haystack
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)  # 0: the beginning of the haystack
    needle_max_tokens: int = 64
    thinking: Literal["default", "on", "off"] = "default"
    max_error_share: float = 0.1

    def __post_init__(self) -> None:
        if self.max_tokens < LEAST_TOKENS or self.concurrency < 1 or self.needle_max_tokens < 8:
            raise ValueError(f"max_tokens must be >= {LEAST_TOKENS}, concurrency >= 1, needle_max_tokens >= 8")
        if min(self.contexts_tokens, default=64) < 64 or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError("contexts_tokens must be >= 64, depths from 0 to 1")


@dataclass(frozen=True)
class Job:
    """One request; `number` is what a needle hides, `place` where: (haystack tokens, depth)."""

    id: str
    prompt: str
    max_tokens: int
    number: str = ""
    place: tuple[int, float] = (0, 0.0)


def expected_s(params: Params, rates: Rates) -> float:
    read = len(params.depths) * sum(n for n in params.contexts_tokens if n < (rates.window_tokens or 2**31))
    written = PROMPTS * params.max_tokens / 3 + len(params.depths) * len(params.contexts_tokens) * 16
    return read / rates.prefill_tok_per_s + written / rates.batch_tok_per_s


PROMPTS = 12  # in the package's battery, for the estimate


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpora cannot be read, or the output alone does not fit."""
    context.corpora.battery(), context.corpora.prose()
    context.require_room(params.max_tokens + 1, "benches.battery.max_tokens and a prompt")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, prompts = context.corpora.battery()
    jobs = [Job(prompt.id, prompt.prompt, params.max_tokens) for prompt in prompts]
    finished = 0

    def on_done() -> None:
        nonlocal finished
        finished += 1
        context.advance(finished, len(jobs), "battery")

    async with Client(target) as client:
        needles, skipped = await _needles(client, target, params, context)
        jobs += needles

        async def ask(job: Job) -> Completion:
            return await client.chat(
                [{"role": "user", "content": job.prompt}],
                job.max_tokens,
                temperature=params.temperature,
                seed=context.seed_for("battery", job.id),
                **template_options(params.thinking),
            )

        done = (await closed_loop(jobs, params.concurrency, ask, on_done)).completions
        samples = [await _judged(client, job, one) for job, one in zip(jobs, done, strict=True)]
    samples += [{"id": name, "skipped": "over the window"} for name in skipped]
    reason = failures(done, params.max_error_share)
    metrics = {"battery.errors": float(sum(bool(one.error) for one in done)), "battery.skipped": float(len(skipped))}
    return conclude(
        bench="battery",
        clock=clock,
        config={**to_jsonable(params), "seed": context.seed},
        metrics=metrics if reason else metrics | summary(samples),
        samples=samples,
        reason=reason,
        notes=[f"skipped over the window: {', '.join(skipped)}"] if skipped else [],
        corpora={"battery": sha256, "prose": context.corpora.prose().sha256},
    )


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The counts, over the requests that did not fail."""
    good = [sample for sample in samples if not sample.get("skipped") and not sample["error"]]
    plain = [sample for sample in good if not sample["number"]]
    needles = [sample for sample in good if sample["number"]]
    metrics = {
        "battery.requests": float(len(plain)),
        "battery.stopped": float(sum(sample["finish_reason"] == "stop" for sample in plain)),
        "battery.runaway": float(sum(sample["finish_reason"] == "length" for sample in plain)),
        "battery.empty": float(sum(sample["empty"] for sample in plain)),
        "battery.attractor": float(sum(sample["period"] > 0 for sample in plain)),
        "battery.needles": float(len(needles)),
        "battery.retrieval_miss": float(sum(not sample["found"] for sample in needles)),
    }
    for context in sorted({sample["context_tokens"] for sample in needles}):
        at = [sample["found"] for sample in needles if sample["context_tokens"] == context]
        metrics[f"battery.retrieval.ctx{context}"] = sum(at) / len(at)
    return metrics


def period(token_ids: Sequence[int]) -> int:
    """The shortest period with which the end of the output repeats itself; 0 where it does not."""
    for length in range(1, LONGEST_PERIOD + 1):
        tail = max(LEAST_PERIODS * length, LEAST_TOKENS)
        end = list(token_ids[-tail:])
        if len(end) == tail and end[length:] == end[:-length]:
            return length
    return 0


async def _judged(client: Client, job: Job, done: Completion) -> dict[str, Any]:
    output = done.reasoning + done.text
    token_ids = await client.tokenize(output) if output and not done.error else []
    context, depth = job.place
    return {
        "id": job.id,
        "output": output,
        "finish_reason": done.finish_reason,
        "completion_tokens": done.completion_tokens,
        "prompt_tokens": done.prompt_tokens,
        "error": done.error,
        "empty": not done.text.strip(),
        "period": period(token_ids),
        "number": job.number,
        "context_tokens": context,
        "depth": depth,
        "found": bool(job.number) and job.number in done.text.replace(",", "").replace(" ", ""),
    }


async def _needles(
    client: Client, target: Target, params: Params, context: BenchContext
) -> tuple[list[Job], list[str]]:
    """(jobs, the names of those that do not fit the window)."""
    pool = await paragraphs(client, context.corpora.prose()) if params.contexts_tokens and params.depths else ()
    jobs, skipped = [], []
    for length in params.contexts_tokens:
        for depth in params.depths:
            name = f"needle-{length}-{depth:g}"
            if length + TEMPLATE_TOKENS + params.needle_max_tokens > target.max_model_len_tokens:
                skipped.append(name)
                continue
            generator = random.Random(context.seed_for("battery", name))
            number = str(generator.randrange(10_000, 100_000))
            hay: list[list[int]] = []
            while sum(map(len, hay)) < length:
                hay += [list(part) for part in generator.sample(list(pool), len(pool))]
            ids = [token for part in hay for token in part][:length]
            at = round(depth * len(ids))
            before, after = [await client.detokenize(part) if part else "" for part in (ids[:at], ids[at:])]
            sentence = f" The number of the locker in the station is {number}. "
            prompt = f"{before}{sentence}{after}\n\n{QUESTION}"
            jobs.append(Job(name, prompt, params.needle_max_tokens, number, (length, depth)))
    return jobs, skipped
