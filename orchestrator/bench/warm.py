"""One cheap request of every shape a suite will use, so that nothing is compiled or loaded while it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.bench import decode_ctx, params_of
from orchestrator.bench.context import BenchContext
from orchestrator.bench.load import closed_loop
from orchestrator.bench.prompts import paragraphs, random_prompt
from orchestrator.client import Client, Completion
from orchestrator.errors import InvalidMeasurement
from orchestrator.records import Target

GENERATE_TOKENS = 8


async def warm(target: Target, suite_params: Mapping[str, Mapping[str, Any]], context: BenchContext) -> None:
    """Exercise `target` with the shapes of `suite_params` (bench name -> its raw parameters).

    The prompts are not those of the benches. Raises InvalidMeasurement where a request fails.
    """
    lengths, concurrency, logprobs = shapes(suite_params, target.max_model_len_tokens)
    total = len(lengths) + len(concurrency) + len(logprobs)
    done = 0
    async with Client(target) as client:
        pool = await paragraphs(client, context.corpora.prose())
        for length, generate in lengths:
            context.advance(done, total, f"warming {length} tokens")
            prompt = random_prompt(pool, length, context.seed_for("warm", length))
            _require(await client.complete(prompt, generate, temperature=0.0, ignore_eos=True))
            done += 1
        for level in concurrency:
            context.advance(done, total, f"warming {level} streams")

            async def chat(number: int, level: int = level) -> Completion:
                content = f"{context.seed_for('warm', level, number):08x}: count to ten."
                return await client.chat([{"role": "user", "content": content}], GENERATE_TOKENS, temperature=0.0)

            for completion in (await closed_loop(range(level), level, chat)).completions:
                _require(completion)
            done += 1
        for length, top_k in logprobs:
            context.advance(done, total, f"warming log probabilities, top {top_k}")
            await client.prompt_logprobs(random_prompt(pool, length, context.seed_for("warm kl", length)), top_k)
            done += 1
    context.advance(total, total, "warm")


def shapes(
    suite_params: Mapping[str, Mapping[str, Any]], window_tokens: int
) -> tuple[list[tuple[int, int]], list[int], list[tuple[int, int]]]:
    """(prompt length, tokens to generate), concurrency levels, (prompt length, top K): each once, in order."""
    params = {name: params_of(name, raw) for name, raw in suite_params.items()}
    lengths: dict[int, int] = {}
    concurrency: set[int] = set()
    logprobs: set[tuple[int, int]] = set()
    if bench := params.get("prefill"):
        lengths |= {length: 1 for length in bench.lengths_tokens if length + 1 <= window_tokens}
    if bench := params.get("decode_ctx"):
        measured, _ = decode_ctx.contexts(bench, window_tokens)
        lengths |= {decode_ctx.prompt_tokens(n): min(GENERATE_TOKENS, bench.generate_tokens) for n in measured}
    if bench := params.get("betterbench"):
        concurrency |= set(bench.concurrency)
        read = bench.material_tokens.values()
        lengths |= {length: GENERATE_TOKENS for length in read if 0 < length <= window_tokens - GENERATE_TOKENS}
    if params.keys() & {"acceptance", "greedy"}:
        concurrency.add(1)
    if bench := params.get("battery"):
        concurrency.add(bench.concurrency)
        fitting = [length for length in bench.contexts_tokens if length <= window_tokens - bench.needle_max_tokens]
        lengths |= dict.fromkeys(fitting, GENERATE_TOKENS)
    if bench := params.get("gsm8k"):
        concurrency.add(bench.concurrency)
    if bench := params.get("kld"):
        logprobs.add((bench.document_tokens, bench.top_k))
    return sorted(lengths.items()), sorted(concurrency), sorted(logprobs)


def _require(completion: Completion) -> None:
    if completion.error:
        raise InvalidMeasurement(f"warm-up request failed: {completion.error}")
