"""greedy: fixed prompts at temperature 0, one at a time, sent several times to the same boot.

What a boot does not reproduce itself proves nothing about another one. So each prompt is asked `passes` times (the
first finds a cold prefix cache, the later ones their own prompt in it). The claim `identical` of a gate compares boots,
on what those of arm A repeat.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude, failures
from orchestrator.client import Client, Completion
from orchestrator.corpora import CATEGORIES, Prompt
from orchestrator.errors import UsageError
from orchestrator.records import Measurement, Target, to_jsonable


@dataclass(frozen=True)
class Params:
    prompts_per_category: int = 1
    max_tokens: int = 64
    passes: int = 3
    max_error_share: float = 0.1

    def __post_init__(self) -> None:
        if self.prompts_per_category < 1 or self.max_tokens < 2 or self.passes < 2:
            raise ValueError("prompts_per_category must be >= 1, max_tokens and passes >= 2")


def expected_s(params: Params, rates: Rates) -> float:
    requests = len(CATEGORIES) * params.prompts_per_category * params.passes
    return requests * params.max_tokens / rates.decode_tok_per_s


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpus has too few prompts, or the output alone does not fit."""
    _prompts(params, context)
    context.require_room(params.max_tokens + 1, "benches.greedy.max_tokens and a prompt")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, prompts = _prompts(params, context)
    done: list[Completion] = []
    samples: list[dict[str, Any]] = []
    async with Client(target) as client:
        for number in range(params.passes):
            for prompt in prompts:
                context.advance(len(done), len(prompts) * params.passes, "greedy")
                done.append(
                    await client.chat([{"role": "user", "content": prompt.prompt}], params.max_tokens, temperature=0.0)
                )
                output = done[-1].reasoning + done[-1].text
                samples.append(
                    {
                        "id": f"{prompt.id}/{number}",
                        "prompt_id": prompt.id,
                        "pass": number,
                        "text": output,
                        "token_ids": await client.tokenize(output) if output and not done[-1].error else [],
                        "finish_reason": done[-1].finish_reason,
                        "completion_tokens": done[-1].completion_tokens,
                        "error": done[-1].error,
                    }
                )
    context.advance(1, 1, "greedy")
    reason = failures(done, params.max_error_share)
    metrics = {"greedy.errors": float(sum(bool(one.error) for one in done))}
    if not reason:
        metrics |= summary(samples)
    notes = []
    if metrics.get("greedy.self_agreement") == 0.0:
        notes.append("this boot reproduces none of its own outputs: nothing can be said about another's")
    return conclude(
        bench="greedy",
        clock=clock,
        config=to_jsonable(params),
        metrics=metrics,
        samples=samples,
        reason=reason,
        notes=notes,
        corpora={"prompts": sha256},
    )


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Agreement of the boot with itself, over the prompts of which no pass failed."""
    outputs = [found for found in _by_prompt(samples).values() if found]
    if not outputs:
        return {}
    metrics = {
        "greedy.prompts": float(len(outputs)),
        "greedy.self_agreement": _share(found.count(found[0]) == len(found) for found in outputs),
        "greedy.cold_warm_agreement": _share(found[0] == found[1] for found in outputs),
    }
    if len(outputs[0]) > 2:
        metrics["greedy.warm_agreement"] = _share(found[1:].count(found[1]) == len(found) - 1 for found in outputs)
    firsts = [min(_first_difference(found[0], other) for other in found if other != found[0]) for found in outputs
              if found.count(found[0]) < len(found)]  # fmt: skip
    if firsts:
        metrics["greedy.first_difference_tokens"] = float(statistics.median(firsts))
    return metrics


def _by_prompt(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, ...]]]:
    """Prompt -> the token ids of its passes in order; empty where one of them failed."""
    found: dict[str, list[tuple[int, ...]]] = {}
    failed = {sample["prompt_id"] for sample in samples if sample["error"]}
    for sample in sorted(samples, key=lambda sample: sample["pass"]):
        outputs = found.setdefault(sample["prompt_id"], [])
        if sample["prompt_id"] not in failed:
            outputs.append(tuple(sample["token_ids"]))
    return found


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place where the two differ; the shorter one's length where it is the other's beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _share(truths: Any) -> float:
    found = list(truths)
    return sum(found) / len(found)


def _prompts(params: Params, context: BenchContext) -> tuple[str, list[Prompt]]:
    """(SHA-256, the first prompts of each category)."""
    sha256, prompts = context.corpora.prompts()
    groups = [[prompt for prompt in prompts if prompt.category == name] for name in CATEGORIES]
    shortest = min(map(len, groups))
    if params.prompts_per_category > shortest:
        raise UsageError(f"benches.greedy.prompts_per_category is {params.prompts_per_category}, there are {shortest}")
    return sha256, [prompt for group in groups for prompt in group[: params.prompts_per_category]]
