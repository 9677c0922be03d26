"""decode_ctx: time of a decoding step against the length of the context, one stream.

ms/step = (last update - first update) / (updates - 1): the first update ends the prefill and is in neither the
time nor the count. tok/s = 1 / the median over repeats of the same time / the tokens after the first update, so that
it is 1 / (ms/step) wherever a step brings one token, also of an even number of repeats. Acceptance length = 1 +
accepted / drafts, and the share of the drafts accepted at each position, from the server's counters over the context's
requests. The repeated 8-gram share says how much of the output had stood in it before: a drafter is fast on repeats.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.bench.context import BenchContext, Clock, Rates, Window, close_window, conclude
from orchestrator.bench.load import MAX_LAG_P99_MS, lag_p99_ms, lagged, watched_lag
from orchestrator.bench.prompts import paragraphs, prose_prompt
from orchestrator.bench.recount import Recount, repeats
from orchestrator.client import Client, Completion
from orchestrator.corpora import Corpus
from orchestrator.metrics import Speculation, speculation
from orchestrator.records import Measurement, Target, to_jsonable

COUNTER_TOLERANCE = 0.08  # share by which the drafter's counters and usage may disagree before it is noted
SHORTEST_PROMPT_TOKENS = 16  # what context 0 is measured with: a server takes no empty prompt
REPEAT_TOKENS = 8


@dataclass(frozen=True)
class Params:
    contexts_tokens: tuple[int, ...] = (32, 512, 2048)  # prompt length; 0 is the shortest prompt
    over_window: Literal["skip", "cap"] = "skip"  # cap: the first context over the window is measured at its end
    generate_tokens: int = 128
    repeats: int = 3
    temperature: float = 0.0
    settle_s: float = 0.0  # pause before each request
    corpus: Literal["prose", "wikitext"] = "prose"  # a context longer than the corpus repeats its paragraphs
    wikitext_path: str = ""
    max_error_share: float = 0.34
    max_client_lag_p99_ms: float = MAX_LAG_P99_MS  # above it this process was too slow to be the clock

    def __post_init__(self) -> None:
        lengths = self.contexts_tokens
        if not lengths or any(0 < length < SHORTEST_PROMPT_TOKENS or length < 0 for length in lengths):
            raise ValueError(f"contexts_tokens must be 0 or >= {SHORTEST_PROMPT_TOKENS}, and at least one")
        if len(set(lengths)) < len(lengths):
            raise ValueError("contexts_tokens must not repeat")
        if self.generate_tokens < 3 or self.repeats < 1:
            raise ValueError("generate_tokens must be >= 3, repeats >= 1")


def contexts(params: Params, window_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(contexts that are measured on a server of this window, contexts that are skipped), tokens."""
    room = window_tokens - params.generate_tokens
    fitting = tuple(length for length in params.contexts_tokens if prompt_tokens(length) <= room)
    over = tuple(length for length in params.contexts_tokens if prompt_tokens(length) > room)
    if params.over_window == "cap" and over and room >= SHORTEST_PROMPT_TOKENS and room not in fitting:
        return (*fitting, room), over
    return fitting, over


def prompt_tokens(context_tokens: int) -> int:
    return max(context_tokens, SHORTEST_PROMPT_TOKENS)


def expected_s(params: Params, rates: Rates) -> float:
    measured, _ = contexts(params, rates.window_tokens or 2**31)
    return params.repeats * sum(
        params.settle_s + context / rates.prefill_tok_per_s + params.generate_tokens / rates.decode_tok_per_s
        for context in measured
    )


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpus cannot be read or not even the shortest context fits."""
    _corpus(params, context)
    context.require_room(
        prompt_tokens(0 if params.over_window == "cap" else min(params.contexts_tokens)) + params.generate_tokens,
        "the shortest of benches.decode_ctx.contexts_tokens and generate_tokens",
    )


def _corpus(params: Params, context: BenchContext) -> Corpus:
    corpora = context.corpora
    return corpora.prose() if params.corpus == "prose" else corpora.wikitext(params.wikitext_path)


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    corpus = _corpus(params, context)
    measured, skipped = contexts(params, target.max_model_len_tokens)
    metrics: dict[str, float] = {"decode.errors": 0.0, "decode.skipped": float(len(skipped))}
    samples: list[dict[str, object]] = [{"context_tokens": n, "skipped": "over the window"} for n in skipped]
    notes = [f"ctx{n} skipped: over the window of {target.max_model_len_tokens} tokens" for n in skipped]
    reasons = [] if measured else ["every context is over the window"]
    total = len(measured) * params.repeats
    async with Client(target) as client:
        pool = await paragraphs(client, corpus)
        if measured and max(measured) > (corpus_tokens := sum(map(len, pool))):
            notes.append(f"contexts over {corpus_tokens} tokens repeat paragraphs of corpus {corpus.name}")
        for number, length in enumerate(measured):
            where = f"ctx{length}"
            before = await client.metrics()
            done: list[Completion] = []
            with watched_lag() as lag_ms:
                for repeat in range(params.repeats):
                    context.advance(number * params.repeats + repeat, total, f"decode at {length} tokens")
                    await asyncio.sleep(params.settle_s)
                    prompt = _prompt(context, pool, length, repeat)
                    done.append(await _request(client, params, context, prompt, length, repeat))
                    samples.append(
                        done[-1].sample(context_tokens=length, repeat=repeat, prompt_sha256=_fingerprint(prompt))
                    )
            window = await close_window(client, before, done, params.max_error_share, params.repeats)
            drafter = speculation(window.before, window.after)
            reason = window.reason or lagged(lag_ms, params.max_client_lag_p99_ms)
            reasons += [f"{where}: {reason}"] if reason else []
            notes += [f"{where}: {note}" for note in (window.note, *_disagreements(drafter, done)) if note]
            samples.append(_context_sample(length, lag_ms, drafter, window))
            metrics["decode.errors"] += sum(bool(completion.error) for completion in done)
            if not reason:
                metrics |= _summary(length, [completion for completion in done if not completion.error])
                metrics |= _drafted(where, drafter)
                metrics |= _repeated(where, window.recount)
                metrics[f"decode.client_lag_ms.p99.{where}"] = lag_p99_ms(lag_ms)
            if window.lost:
                break
        context.advance(total, total, "decode")
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


def _prompt(context: BenchContext, pool: Sequence[Sequence[int]], length: int, repeat: int) -> list[int]:
    return prose_prompt(pool, prompt_tokens(length), context.seed_for("decode_ctx", length, repeat))


def _fingerprint(prompt: Sequence[int]) -> str:
    """Of the token ids, so that a reader sees that both arms were asked the same."""
    return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()[:16]


async def _request(
    client: Client, params: Params, context: BenchContext, prompt: Sequence[int], length: int, repeat: int
) -> Completion:
    completion = await client.complete(
        prompt,
        params.generate_tokens,
        temperature=params.temperature,
        seed=context.seed_for("sampling", length, repeat),
        ignore_eos=True,
        skip_special_tokens=False,  # the text then has every token, and can be counted again
    )
    return checked(completion, len(prompt), params.generate_tokens)


def checked(completion: Completion, prompt_tokens: int, generate_tokens: int) -> Completion:
    """The completion, as an error where prompt or output are not as long as asked."""
    if completion.error:
        return completion
    if completion.prompt_tokens != prompt_tokens:
        return replace(completion, error=f"the prompt was {completion.prompt_tokens} tokens, not {prompt_tokens}")
    if completion.completion_tokens != generate_tokens:
        return replace(completion, error=f"{completion.completion_tokens} tokens instead of {generate_tokens}")
    if not completion.decode_tok_per_s:
        return replace(completion, error="every token arrived at one time")
    return completion


def ms_per_step(completion: Completion) -> float:
    """Mean time between updates (one engine step each); the first update only starts the time."""
    return completion.decode_span_ms / (len(completion.update_ns) - 1)


def ms_per_token(completion: Completion) -> float:
    """Of the same time, for each token after the first update."""
    return completion.decode_span_ms / completion.decode_tokens


def _summary(length: int, good: list[Completion]) -> dict[str, float]:
    """Medians over the repeats, and the longest gap of all."""
    return {
        f"decode.ms_per_step.ctx{length}": statistics.median(map(ms_per_step, good)),
        f"decode.tok_per_s.ctx{length}": 1e3 / statistics.median(map(ms_per_token, good)),
        f"decode.ttft_ms.ctx{length}": statistics.median(done.ttft_ms for done in good),
        f"decode.longest_gap_ms.ctx{length}": max(done.longest_gap_ms for done in good),
    }


def _drafted(where: str, drafter: Speculation | None) -> dict[str, float]:
    """What the server's counters say of its drafter; nothing where it verified no draft."""
    if drafter is None:
        return {}
    found = {f"decode.acceptance_length.{where}": drafter.acceptance_length}
    if drafter.draft_tokens:
        found[f"decode.accepted_share.{where}"] = drafter.accepted_tokens / drafter.draft_tokens
    for position, share in enumerate(drafter.accepted_shares):
        found[f"decode.accepted_share.pos{position}.{where}"] = share
    return found


def _repeated(where: str, recount: Recount | None) -> dict[str, float]:
    """Of all 8-grams of the outputs, the share that stood earlier in the same output."""
    found = [repeats(output, REPEAT_TOKENS) for output in recount.token_ids] if recount else []
    whole = sum(grams for _, grams in found)
    return {f"decode.repeated_8gram_share.{where}": sum(again for again, _ in found) / whole} if whole else {}


def _context_sample(
    length: int, lag_ms: Sequence[float], drafter: Speculation | None, window: Window
) -> dict[str, object]:
    """What a context's metrics need besides its requests."""
    sample: dict[str, object] = {
        "context_tokens": length,
        "client_lag_ms": [round(late_ms, 4) for late_ms in lag_ms],
        "speculation": to_jsonable(drafter) if drafter else None,
    }
    if window.recount:
        sample |= window.recount.sample(output_token_ids=[list(output) for output in window.recount.token_ids])
    return sample


def _disagreements(drafter: Speculation | None, done: Sequence[Completion]) -> list[str]:
    """Where the drafter's counters and the updates tell different stories."""
    good = [completion for completion in done if not completion.error]
    decoded = sum(completion.decode_tokens for completion in good)
    if len(good) < len(done) or not decoded:
        return []  # the counters have the failed requests' work too
    if drafter is None:
        several = sum(tokens > 1 for completion in good for tokens in completion.update_tokens[1:])
        updates = sum(len(completion.update_tokens) - 1 for completion in good)
        if several > COUNTER_TOLERANCE * updates:
            return [
                f"{several} of {updates} updates brought several tokens and no draft was counted: steps were merged"
            ]
        return []
    if abs(drafter.tokens - decoded) > COUNTER_TOLERANCE * decoded:
        return [f"drafted steps made {drafter.tokens:.0f} of {decoded} decoded tokens"]
    return []
