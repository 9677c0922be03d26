"""decode_ctx: time of a decoding step against the length of the context, one stream.

ms/step = (last update - first update) / (updates - 1): the first update ends the prefill and is in neither the
time nor the count. tok/s = tokens after the first update / the same time. Acceptance length = 1 + accepted /
drafts, from the server's counters over the context's requests.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace

from orchestrator.bench.context import BenchContext, Clock, Rates, close_window, conclude
from orchestrator.bench.prompts import paragraphs, prose_prompt
from orchestrator.client import Client, Completion
from orchestrator.metrics import speculation
from orchestrator.records import Measurement, Target, to_jsonable

COUNTER_TOLERANCE = 0.08  # share by which the drafter's counters and usage may disagree before it is noted


@dataclass(frozen=True)
class Params:
    contexts_tokens: tuple[int, ...] = (32, 512, 2048)  # prompt length
    generate_tokens: int = 128
    repeats: int = 3
    temperature: float = 0.0
    settle_s: float = 0.0  # pause before each request
    max_error_share: float = 0.34

    def __post_init__(self) -> None:
        if min(self.contexts_tokens, default=0) < 16 or self.generate_tokens < 3 or self.repeats < 1:
            raise ValueError("contexts_tokens must be >= 16, generate_tokens >= 3, repeats >= 1")


def expected_s(params: Params, rates: Rates) -> float:
    return params.repeats * sum(
        params.settle_s + context / rates.prefill_tok_per_s + params.generate_tokens / rates.decode_tok_per_s
        for context in params.contexts_tokens
    )


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpus cannot be read or not even the shortest context fits."""
    context.corpora.prose()
    context.require_room(
        min(params.contexts_tokens) + params.generate_tokens,
        "the shortest of benches.decode_ctx.contexts_tokens and generate_tokens",
    )


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    corpus = context.corpora.prose()
    metrics: dict[str, float] = {"decode.errors": 0.0, "decode.skipped": 0.0}
    samples: list[dict[str, object]] = []
    notes: list[str] = []
    reasons: list[str] = []
    total = len(params.contexts_tokens) * params.repeats
    async with Client(target) as client:
        pool = await paragraphs(client, corpus)
        for number, length in enumerate(params.contexts_tokens):
            if length + params.generate_tokens > target.max_model_len_tokens:
                metrics["decode.skipped"] += 1
                samples.append({"context_tokens": length, "skipped": "over the window"})
                notes.append(f"ctx{length} skipped: over the window of {target.max_model_len_tokens} tokens")
                continue
            before = await client.metrics()
            done: list[Completion] = []
            for repeat in range(params.repeats):
                context.advance(number * params.repeats + repeat, total, f"decode at {length} tokens")
                await asyncio.sleep(params.settle_s)
                done.append(await _request(client, params, context, pool, length, repeat))
                samples.append(done[-1].sample(context_tokens=length, repeat=repeat))
            window = await close_window(client, before, done, params.max_error_share)
            reasons += [f"ctx{length}: {window.reason}"] if window.reason else []
            notes += [f"ctx{length}: {window.note}"] if window.note else []
            good = [completion for completion in done if not completion.error]
            metrics["decode.errors"] += len(done) - len(good)
            if not window.reason:
                metrics |= _summary(length, good)
                drafter = speculation(window.before, window.after)
                if drafter:
                    where = f"ctx{length}"
                    metrics[f"decode.acceptance_length.{where}"] = drafter.acceptance_length
                    metrics[f"decode.accepted_share.{where}"] = drafter.accepted_tokens / (drafter.draft_tokens or 1)
                    samples.append({"context_tokens": length, "speculation": to_jsonable(drafter)})
                    notes += _disagreement(where, drafter.tokens, done)
            if window.lost:
                break
        context.advance(total, total, "decode")
    if not reasons and not any(name.startswith("decode.ms_per_step") for name in metrics):
        reasons.append("every context is over the window")
    return conclude(
        bench="decode_ctx",
        clock=clock,
        config=to_jsonable(params),
        metrics=metrics,
        samples=samples,
        reason="; ".join(reasons),
        notes=notes,
        corpora={corpus.name: corpus.sha256},
    )


async def _request(
    client: Client, params: Params, context: BenchContext, pool: tuple[tuple[int, ...], ...], length: int, repeat: int
) -> Completion:
    prompt = prose_prompt(pool, length, context.seed_for("decode_ctx", length, repeat))
    completion = await client.complete(
        prompt,
        params.generate_tokens,
        temperature=params.temperature,
        seed=context.seed_for("sampling", length, repeat),
        ignore_eos=True,
    )
    return checked(completion, length, params.generate_tokens)


def checked(completion: Completion, prompt_tokens: int, generate_tokens: int) -> Completion:
    """The completion, as an error where prompt or output are not as long as asked."""
    if completion.error:
        return completion
    if completion.prompt_tokens != prompt_tokens:
        return replace(completion, error=f"the prompt was {completion.prompt_tokens} tokens, not {prompt_tokens}")
    if completion.completion_tokens != generate_tokens:
        return replace(completion, error=f"{completion.completion_tokens} tokens instead of {generate_tokens}")
    if completion.decode_tok_per_s is None:
        return replace(completion, error="every token arrived at one time")
    return completion


def ms_per_step(completion: Completion) -> float:
    """Mean time between updates (one engine step each); the first update only starts the time."""
    return completion.decode_span_ms / (len(completion.update_ns) - 1)


def _summary(length: int, good: list[Completion]) -> dict[str, float]:
    """Medians over the repeats, and the longest gap of all."""
    return {
        f"decode.ms_per_step.ctx{length}": statistics.median(map(ms_per_step, good)),
        f"decode.tok_per_s.ctx{length}": statistics.median(done.decode_tok_per_s or 0.0 for done in good),
        f"decode.ttft_ms.ctx{length}": statistics.median(done.ttft_ms for done in good),
        f"decode.longest_gap_ms.ctx{length}": max(done.longest_gap_ms for done in good),
    }


def _disagreement(where: str, drafted_tokens: float, done: list[Completion]) -> list[str]:
    decoded = sum(sum(completion.update_tokens[1:]) for completion in done)
    if decoded and abs(drafted_tokens - decoded) > COUNTER_TOLERANCE * decoded:
        return [f"{where}: drafted steps made {drafted_tokens:.0f} of {decoded} decoded tokens"]
    return []
