"""acceptance: what the drafter's tokens are worth on held-out prompts, by the server's own counters.

One request is in flight at a time and the counters are read around it, so each prompt has its own. Sums over all:

    acceptance length = 1 + accepted / drafts        accepted share = accepted / drafted
    accepted share at position i = accepted at i / drafts
    tokens per step = tokens after the first update / updates after the first, drafted or not

The interval resamples prompts. With `claim: drafter` fewer than 50,000 completion tokens are INVALID: the difference
between two drafters is smaller than what fewer tokens can tell. A prompt that is sampled twice may find its own prefix
in the cache; that changes no acceptance and is in no time here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude, failures
from orchestrator.bench.divergence import RESAMPLES
from orchestrator.bench.gsm8k import template_options
from orchestrator.bench.load import MAX_LAG_P99_MS, lagged, watched_lag
from orchestrator.client import Client, Completion
from orchestrator.corpora import Prompt
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.metrics import (
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    DRAFTS,
    GENERATION_TOKENS,
    Snapshot,
    Speculation,
    growth,
    speculation,
)
from orchestrator.records import Measurement, Target, to_jsonable

CLAIM_TOKENS = 50_000
COUNTED = (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS)
COUNTER_TOLERANCE = 0.08  # share by which the counters and usage may disagree before it is noted
_POLL_S, _POLLS = 0.01, 100


@dataclass(frozen=True)
class Params:
    claim: Literal["drafter", "none"] = "drafter"
    path: str = ""  # JSON lines, {"prompt": ...} each; empty: the package's own held-out prompts
    prompts: int = 64
    samples_per_prompt: int = 2  # each with a seed of its own
    max_tokens: int = 512
    temperature: float = 0.7
    thinking: Literal["default", "on", "off"] = "default"
    max_error_share: float = 0.02
    max_client_lag_p99_ms: float = MAX_LAG_P99_MS  # above it this process was too slow to be the clock

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.samples_per_prompt < 1 or self.max_tokens < 8 or self.temperature < 0:
            raise ValueError("prompts and samples_per_prompt must be >= 1, max_tokens >= 8, temperature >= 0")

    @property
    def most_tokens(self) -> int:
        return self.prompts * self.samples_per_prompt * self.max_tokens


def expected_s(params: Params, rates: Rates) -> float:
    return 0.8 * params.most_tokens / rates.decode_tok_per_s  # some answers end before the bound


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the prompts lack, or could never give the tokens that the claim takes."""
    _prompts(params, context)
    context.require_room(params.max_tokens + 1, "benches.acceptance.max_tokens and a prompt")
    if params.claim == "drafter" and params.most_tokens < CLAIM_TOKENS:
        raise UsageError(
            f"benches.acceptance: {params.prompts} prompts x {params.samples_per_prompt} x {params.max_tokens} tokens "
            f"are at most {params.most_tokens:,}; a claim about a drafter takes {CLAIM_TOKENS:,}; raise one of them, "
            "or set claim: none"
        )


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    sha256, prompts = _prompts(params, context)
    jobs = [(prompt, number) for number in range(params.samples_per_prompt) for prompt in prompts]
    done: list[Completion] = []
    counted: list[Speculation | None] = []
    samples: list[dict[str, Any]] = []
    reason = ""
    async with Client(target) as client:
        before = await _at_rest(client)
        with watched_lag() as lag_ms:
            for at, (prompt, number) in enumerate(jobs):
                context.advance(at, len(jobs), f"acceptance, {prompt.id}")
                done.append(await _request(client, params, context, prompt, number))
                after = await _at_rest(client)
                counted.append(speculation(before, after))
                counts = to_jsonable(counted[-1] or Speculation(0.0, 0.0, 0.0, ()))
                samples.append(done[-1].sample(prompt_id=f"{prompt.id}/{number}", prompt=prompt.id, **counts))
                if reason := _not_alone(before, after, done[-1]):
                    break
                before = after
        context.advance(len(jobs), len(jobs), "acceptance")
    good = [(one, found) for one, found in zip(done, counted, strict=True) if not one.error]
    reason = reason or failures(done, params.max_error_share) or lagged(lag_ms, params.max_client_lag_p99_ms)
    tokens = sum(one.completion_tokens for one, _ in good)
    if not reason and not any(found for _, found in good):
        reason = "the server verified no draft; does the variant speculate?"
    if not reason and params.claim == "drafter" and tokens < CLAIM_TOKENS:
        reason = f"{tokens:,} completion tokens, a claim about a drafter takes {CLAIM_TOKENS:,}"
    metrics = {"acceptance.errors": float(len(done) - len(good))}
    notes = []
    if not reason:
        metrics |= summary(samples, context.seed_for("acceptance"))
        notes = _disagreement(good)
    return conclude(
        bench="acceptance",
        clock=clock,
        config={**to_jsonable(params), "seed": context.seed},
        metrics=metrics,
        samples=samples,
        reason=reason,
        notes=notes,
        corpora={"heldout": sha256},
    )


def summary(samples: Sequence[dict[str, Any]], seed: int) -> dict[str, float]:
    """Every metric, from the stored samples of the requests that did not fail."""
    good = [sample for sample in samples if not sample["error"]]
    counts = {
        name: numpy.array([sample[name] for sample in good]) for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    drafts, drafted, accepted = (float(values.sum()) for values in counts.values())
    length = 1.0 + accepted / drafts
    low, high = _interval(good, counts["drafts"], counts["accepted_tokens"], seed)
    per_position = [sample["accepted_per_position"] for sample in good if sample["drafts"]]
    at_position = numpy.sum(per_position, axis=0) / drafts
    updates_ms = [sample["update_ms"] for sample in good]
    tokens = sum(sample["completion_tokens"] for sample in good)
    return {
        "acceptance.acceptance_length": length,
        "acceptance.acceptance_length.ci_low": low,
        "acceptance.acceptance_length.ci_high": high,
        "acceptance.accepted_share": accepted / drafted if drafted else 0.0,
        **{f"acceptance.accepted_share.pos{n}": float(share) for n, share in enumerate(at_position)},
        "acceptance.tokens_per_step": sum(sum(sample["update_tokens"][1:]) for sample in good)
        / max(1, sum(len(at) - 1 for at in updates_ms)),
        "acceptance.ms_per_step": sum(at[-1] - at[0] for at in updates_ms)
        / max(1, sum(len(at) - 1 for at in updates_ms)),
        "acceptance.tok_per_s": 1e3 * tokens / sum(sample["end_ms"] for sample in good),
        "acceptance.tokens": float(tokens),
        "acceptance.prompts": float(len({sample["prompt"] for sample in good})),
    }


def _interval(
    good: Sequence[dict[str, Any]], drafts: numpy.ndarray, accepted: numpy.ndarray, seed: int
) -> tuple[float, float]:
    """95% percentile bootstrap of the acceptance length; a prompt's samples are drawn together."""
    prompts = sorted({sample["prompt"] for sample in good})
    of_prompt = numpy.array([prompts.index(sample["prompt"]) for sample in good])
    sums = [numpy.bincount(of_prompt, values, len(prompts)) for values in (drafts, accepted)]
    drawn = numpy.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))
    of_drafts, of_accepted = (values[drawn].sum(axis=1) for values in sums)
    low, high = numpy.percentile(1.0 + of_accepted / numpy.maximum(of_drafts, 1.0), [2.5, 97.5])
    return float(low), float(high)


async def _request(client: Client, params: Params, context: BenchContext, prompt: Prompt, number: int) -> Completion:
    return await client.chat(
        [{"role": "user", "content": prompt.prompt}],
        params.max_tokens,
        temperature=params.temperature,
        seed=context.seed_for("acceptance", prompt.id, number),
        **template_options(params.thinking),
    )


async def _at_rest(client: Client) -> Snapshot:
    """The counters once they stand still: the server counts a step a moment after it has sent its tokens."""
    last = await client.metrics()
    for _ in range(_POLLS):
        await asyncio.sleep(_POLL_S)
        now = await client.metrics()
        if all(growth(last, now, name) in (None, 0.0) for name in (GENERATION_TOKENS, *COUNTED)):
            return now
        last = now
    raise InvalidMeasurement("the server's counters do not come to rest: somebody else uses it")


def _not_alone(before: Snapshot, after: Snapshot, done: Completion) -> str:
    """A reason where the server generated more tokens than the request has."""
    generated = growth(before, after, GENERATION_TOKENS)
    if generated is not None and not done.error and generated > done.completion_tokens + 1:
        return (
            f"the server generated {generated:.0f} tokens during a request of {done.completion_tokens}: "
            "somebody else uses it"
        )
    return ""


def _disagreement(good: Sequence[tuple[Completion, Speculation | None]]) -> list[str]:
    drafted = sum(found.tokens for _, found in good if found)
    decoded = sum(one.decode_tokens for one, _ in good)
    if decoded and abs(drafted - decoded) > COUNTER_TOLERANCE * decoded:
        return [f"drafted steps made {drafted:.0f} of {decoded} decoded tokens"]
    return []


def _prompts(params: Params, context: BenchContext) -> tuple[str, tuple[Prompt, ...]]:
    """(SHA-256, `prompts` of them spread evenly over the file)."""
    sha256, prompts = context.corpora.heldout(params.path)
    if params.prompts > len(prompts):
        raise UsageError(f"benches.acceptance.prompts is {params.prompts}, there are {len(prompts)}")
    return sha256, tuple(prompts[n * len(prompts) // params.prompts] for n in range(params.prompts))
