"""gsm8k: arithmetic word problems through the chat template, scored by exact match of the final number.

With `source: own` the questions are the package's own and the metrics are called `word_problems.*`; only the real
test set is called `gsm8k.*`. A failed request is not a wrong answer: it is counted apart and is in no accuracy.
A truncated answer (finish_reason "length") is scored as it stands and counted.

Answers are kept as they come, so that a run which was cut off asks only for what it lacks when the same plan runs
again; each answer carries the boot that gave it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.bench import extraction
from orchestrator.bench.context import BenchContext, Clock, Rates, conclude
from orchestrator.bench.exemplars import EXEMPLARS
from orchestrator.bench.load import closed_loop
from orchestrator.bench.unfinished import Unfinished
from orchestrator.client import Client, Completion
from orchestrator.corpora import Question
from orchestrator.errors import UsageError
from orchestrator.labels import bench_name
from orchestrator.records import Measurement, Target, to_jsonable

INSTRUCTION = "Think step by step. End with a line of the form: #### <number>"


@dataclass(frozen=True)
class Params:
    source: Literal["own", "gsm8k"] = "own"
    path: str = ""  # of GSM8K's test.jsonl; empty: the cache, else a download
    n: int = 60
    max_tokens: int = 256
    temperature: float = 0.0
    concurrency: int = 8
    instruction: str = INSTRUCTION
    few_shot: int = 0  # solved examples before the question, as earlier turns of the chat
    thinking: Literal["default", "on", "off"] = "default"  # enable_thinking of the chat template; default: not said
    max_error_share: float = 0.1

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1 or self.concurrency < 1:
            raise ValueError("n, max_tokens and concurrency must be >= 1")
        if not 0 <= self.few_shot <= len(EXEMPLARS):
            raise ValueError(f"few_shot must be 0 to {len(EXEMPLARS)}")


def prefix(params: Params) -> str:
    return bench_name("gsm8k", {"source": params.source})


def expected_s(params: Params, rates: Rates) -> float:
    rate = rates.answers_tok_per_s or (rates.decode_tok_per_s if params.concurrency == 1 else rates.batch_tok_per_s)
    answer_tokens = 0.6 * params.max_tokens if rates.answer_tokens is None else rates.answer_tokens
    return params.n * min(answer_tokens, params.max_tokens) / rate


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where there are not `n` questions, or the output alone does not fit.

    Downloads the public set where it is wanted and absent.
    """
    chosen(params, context)
    context.require_room(params.max_tokens + 1, "benches.gsm8k.max_tokens and a prompt")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, questions = chosen(params, context)
    config = {**to_jsonable(params), "extraction": extraction.VERSION, "seed": context.seed}
    kept = Unfinished.of("gsm8k", context, {**config, "corpus": sha256})
    found = {sample["id"]: sample for sample in kept.read()}
    earlier = len(found)
    missing = [question for question in questions if question.id not in found]

    async with Client(target) as client:

        async def ask(question: Question) -> Completion:
            completion = await client.chat(
                messages(question.question, params),
                params.max_tokens,
                temperature=params.temperature,
                seed=context.seed_for("gsm8k", question.id),
                **template_options(params.thinking),
            )
            sample = {**score(question, completion), "boot": target.model}
            found[question.id] = sample
            if not completion.error:  # a failed request is asked again
                kept.add(sample)
            context.advance(len(found), len(questions), prefix(params))
            return completion

        if missing:
            await closed_loop(missing, params.concurrency, ask)
    samples = [found[question.id] for question in questions]
    reason = failures(samples, params.max_error_share)
    if not reason:
        kept.discard()
    return conclude(
        bench="gsm8k",
        clock=clock,
        config=config,
        metrics=summary(prefix(params), samples),
        samples=samples,
        reason=reason,
        notes=[f"{earlier} of {len(questions)} answers are of a run that was cut off"] if earlier else [],
        corpora={prefix(params): sha256},
    )


def failures(samples: Sequence[dict[str, Any]], max_error_share: float) -> str:
    """A reason where no question was answered or too many requests failed, else empty."""
    errors = [sample["error"] for sample in samples if sample["error"]]
    if errors and len(errors) == len(samples):
        return f"all {len(errors)} requests failed; the first: {errors[0]}"
    if len(errors) > max_error_share * len(samples):
        return f"{len(errors)} of {len(samples)} requests failed; the first: {errors[0]}"
    return ""


def template_options(thinking: str) -> dict[str, Any]:
    """What a request says to the chat template about thinking; nothing with "default"."""
    return {} if thinking == "default" else {"chat_template_kwargs": {"enable_thinking": thinking == "on"}}


def messages(question: str, params: Params) -> list[dict[str, str]]:
    """The chat: the exemplars as turns that were answered, then the question."""
    turns = [*EXEMPLARS[: params.few_shot], (question, "")]
    chat = []
    for asked, answer in turns:
        chat.append({"role": "user", "content": f"{asked}\n\n{params.instruction}"})
        chat.append({"role": "assistant", "content": answer})
    return chat[:-1]


def score(question: Question, completion: Completion) -> dict[str, Any]:
    """One question's record; the scores of a failed request are None."""
    strict, flexible = extraction.strict(completion.text), extraction.flexible(completion.text)
    answered = not completion.error
    return {
        "id": question.id,
        "answer": question.answer,
        "completion": completion.text,
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "completion_tokens": completion.completion_tokens,
        "prompt_tokens": completion.prompt_tokens,
        "error": completion.error,
        "extracted_strict": strict,
        "extracted_flexible": flexible,
        "correct_strict": extraction.matches(strict, question.answer) if answered else None,
        "correct_flexible": extraction.matches(flexible, question.answer) if answered else None,
    }


def summary(name: str, samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Accuracies over the answered questions (`_n` of them), errors and truncations apart."""
    answered = [sample for sample in samples if not sample["error"]]
    metrics = {
        f"{name}.errors": float(len(samples) - len(answered)),
        f"{name}.truncated": float(sum(sample["finish_reason"] == "length" for sample in answered)),
    }
    if answered:
        for how in ("flexible", "strict"):
            correct = sum(bool(sample[f"correct_{how}"]) for sample in answered)
            metrics[f"{name}.accuracy_{how}"] = correct / len(answered)
            metrics[f"{name}.accuracy_{how}_n"] = float(len(answered))
    return metrics


def chosen(params: Params, context: BenchContext) -> tuple[str, tuple[Question, ...]]:
    """(SHA-256, the first n of a seeded order; all of them in file order where n is their number)."""
    corpora = context.corpora
    sha256, questions = corpora.gsm8k(params.path) if params.source == "gsm8k" else corpora.word_problems()
    if params.n > len(questions):
        raise UsageError(f"benches.gsm8k.n is {params.n}, source {params.source} has {len(questions)} questions")
    if params.n == len(questions):
        return sha256, questions
    return sha256, tuple(random.Random(context.seed_for("gsm8k questions")).sample(questions, params.n))
