"""prefill: prompt tokens per second against the length of the prompt, cold prefix cache, one token out.

prompt tok/s = prompt tokens / TTFT of one request; the metric is the median over the runs, `.best` the fastest.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from orchestrator.bench.context import BenchContext, Clock, Rates, close_window, conclude
from orchestrator.bench.load import MAX_LAG_P99_MS, lag_p99_ms, lagged, watched_lag
from orchestrator.bench.prompts import paragraphs, random_prompt
from orchestrator.client import Client, Completion
from orchestrator.records import Measurement, Target, to_jsonable


@dataclass(frozen=True)
class Params:
    lengths_tokens: tuple[int, ...] = (256, 1024, 3072)
    runs: int = 3
    warmup_runs: int = 1
    max_error_share: float = 0.34
    max_client_lag_p99_ms: float = MAX_LAG_P99_MS  # above it this process was too slow to be the clock

    def __post_init__(self) -> None:
        if min(self.lengths_tokens, default=0) < 16 or self.runs < 1 or self.warmup_runs < 0:
            raise ValueError("lengths_tokens must be >= 16, runs >= 1, warmup_runs >= 0")


def expected_s(params: Params, rates: Rates) -> float:
    fitting = [n for n in params.lengths_tokens if rates.window_tokens is None or n < rates.window_tokens]
    return (params.runs + params.warmup_runs) * sum(fitting) / rates.prefill_tok_per_s


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the corpus cannot be read or not even the shortest prompt fits."""
    context.corpora.prose()
    context.require_room(min(params.lengths_tokens) + 1, "the shortest of benches.prefill.lengths_tokens and a token")


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    corpus = context.corpora.prose()
    metrics: dict[str, float] = {"prefill.errors": 0.0, "prefill.skipped": 0.0}
    samples: list[dict[str, object]] = []
    notes: list[str] = []
    reasons: list[str] = []
    tries = params.warmup_runs + params.runs
    async with Client(target) as client:
        pool = await paragraphs(client, corpus)
        for number, length in enumerate(params.lengths_tokens):
            if length + 1 > target.max_model_len_tokens:
                metrics["prefill.skipped"] += 1
                samples.append({"length_tokens": length, "skipped": "over the window"})
                notes.append(f"len{length} skipped: over the window of {target.max_model_len_tokens} tokens")
                continue
            before = await client.metrics()
            done: list[Completion] = []
            with watched_lag() as lag_ms:
                for run in range(tries):
                    context.advance(
                        number * tries + run, len(params.lengths_tokens) * tries, f"prefill {length} tokens"
                    )
                    prompt = random_prompt(pool, length, context.seed_for("prefill", length, run))
                    done.append(_checked(await client.complete(prompt, 1, temperature=0.0, ignore_eos=True), length))
                    samples.append(done[-1].sample(length_tokens=length, run=run, warmup=run < params.warmup_runs))
            samples.append({"length_tokens": length, "client_lag_ms": [round(late_ms, 4) for late_ms in lag_ms]})
            window = await close_window(client, before, done, params.max_error_share, recounted_outputs=0)
            measured = [completion for completion in done[params.warmup_runs :] if not completion.error]
            reason = (
                window.reason
                or ("" if measured else "every measured run failed")
                or lagged(lag_ms, params.max_client_lag_p99_ms)
            )
            reasons += [f"len{length}: {reason}"] if reason else []
            notes += [f"len{length}: {window.note}"] if window.note else []
            metrics["prefill.errors"] += sum(bool(completion.error) for completion in done)
            if window.lost:
                break
            if not reason:
                ttfts_ms = [completion.ttft_ms for completion in measured]
                metrics[f"prefill.prompt_tok_per_s.len{length}"] = 1e3 * length / statistics.median(ttfts_ms)
                metrics[f"prefill.prompt_tok_per_s.best.len{length}"] = 1e3 * length / min(ttfts_ms)
                metrics[f"prefill.ttft_ms.len{length}"] = statistics.median(ttfts_ms)
                metrics[f"prefill.client_lag_ms.p99.len{length}"] = lag_p99_ms(lag_ms)
        context.advance(1, 1, "prefill")
    if not reasons and not any(name.startswith("prefill.ttft_ms") for name in metrics):
        reasons.append("every length is over the window")
    return conclude(
        bench="prefill",
        clock=clock,
        config=to_jsonable(params),
        metrics=metrics,
        samples=samples,
        reason="; ".join(reasons),
        notes=notes,
        corpora={corpus.name: corpus.sha256},
    )


def _checked(completion: Completion, length: int) -> Completion:
    """The completion, as an error where the server did not read `length` prompt tokens."""
    if not completion.error and completion.prompt_tokens != length:
        return replace(completion, error=f"the prompt was {completion.prompt_tokens} tokens, not {length}")
    return completion
