"""How fast this very server is, from a few requests, so that a suite can say how long it will take before it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.bench import expected_s, gsm8k, params_of
from orchestrator.bench.context import BenchContext, Rates
from orchestrator.bench.load import closed_loop
from orchestrator.bench.prompts import paragraphs, random_prompt
from orchestrator.client import Client, Completion
from orchestrator.errors import InvalidMeasurement
from orchestrator.records import Target

PREFILL_TOKENS, DECODE_TOKENS, STREAMS = 512, 48, 4
MANY = 12  # questions for each stream, below which it is not worth asking how long answers are
ASKED = 3  # for each stream, where it is: few answers loop, and those few take half of the time
ANSWER_TOKENS = 384  # of the answers that are asked for to see how long they are


async def probe(target: Target, suite_params: Mapping[str, Mapping[str, Any]], context: BenchContext) -> Rates:
    """Rates of `target` for a suite (bench name -> raw parameters). Raises InvalidMeasurement where a request fails."""
    params = {name: params_of(name, raw) for name, raw in suite_params.items()}
    async with Client(target) as client:
        pool = await paragraphs(client, context.corpora.prose())

        async def generate(number: int) -> Completion:
            length = min(PREFILL_TOKENS, target.max_model_len_tokens - DECODE_TOKENS)
            prompt = random_prompt(pool, length, context.seed_for("rates", number))
            return _good(await client.complete(prompt, DECODE_TOKENS, temperature=0.0, ignore_eos=True))

        single = await generate(0)
        together = (await closed_loop(range(1, 1 + STREAMS), STREAMS, generate)).completions
        rates = Rates(
            decode_tok_per_s=single.decode_tok_per_s or 1.0,
            batch_tok_per_s=sum(done.decode_tok_per_s or 0.0 for done in together) or 1.0,
            prefill_tok_per_s=1e3 * single.prompt_tokens / single.ttft_ms,
            window_tokens=target.max_model_len_tokens,
        )
        if bench := params.get("kld"):
            prompt = random_prompt(pool, bench.document_tokens, context.seed_for("rates", "kld"))
            started_s = time.perf_counter()
            await client.prompt_logprobs(prompt, bench.top_k)
            seconds = time.perf_counter() - started_s
            rates = replace(rates, logprob_tok_per_s=bench.document_tokens / seconds)
        if (bench := params.get("gsm8k")) and bench.n >= MANY * bench.concurrency:
            rates = replace(rates, **await _answers(client, bench, context))
    return rates


def expected(suite_params: Mapping[str, Mapping[str, Any]], rates: Rates) -> dict[str, float]:
    """Bench -> seconds."""
    return {name: expected_s(name, raw, rates) for name, raw in suite_params.items()}


async def _answers(client: Client, params: gsm8k.Params, context: BenchContext) -> dict[str, float]:
    """How long answers are, and how fast as many streams as the bench has are: from some of the bench's questions."""
    questions = gsm8k.chosen(params, context)[1][: ASKED * params.concurrency]
    most = min(params.max_tokens, ANSWER_TOKENS)

    async def ask(question: Any) -> Completion:
        return _good(
            await client.chat(
                gsm8k.messages(question.question, params), most, temperature=params.temperature,
                **gsm8k.template_options(params.thinking),
            )
        )  # fmt: skip

    load = await closed_loop(questions, params.concurrency, ask)
    lengths = [done.completion_tokens for done in load.completions]
    cut = sum(done.finish_reason == "length" for done in load.completions) / len(lengths)
    # An answer that reached this bound may well reach the bench's own one: it loops.
    mean = sum(lengths) / len(lengths) + cut * (params.max_tokens - most)
    one = sum(done.decode_tok_per_s or 0.0 for done in load.completions) / len(lengths)
    return {"answer_tokens": mean, "answers_tok_per_s": one * params.concurrency or 1.0}


def _good(completion: Completion) -> Completion:
    if completion.error:
        raise InvalidMeasurement(f"a request that should tell the server's speed failed: {completion.error}")
    return completion
