"""What every bench is given, and how it ends in a Measurement."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.bench.recount import SAMPLE, Recount, recount
from orchestrator.completion import Completion
from orchestrator.corpora import Corpora
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.metrics import PREFIX_CACHE_HITS, Snapshot, growth, speculation
from orchestrator.records import Measurement

if TYPE_CHECKING:
    from orchestrator.client import Client
    from orchestrator.reference import Reference


def _silent(_done: int, _total: int, _note: str) -> None:
    return None


@dataclass(frozen=True)
class BenchContext:
    seed: int
    corpora: Corpora
    advance: Callable[[int, int, str], None] = _silent  # done, total, what is being done
    reference: Reference | None = None  # kld only
    stack: str = ""  # fingerprint of what serves; kld refuses a reference of another one
    window_tokens: int | None = None  # the server's max-model-len, where `require` may know it before a boot
    max_logprobs: int | None = None  # the server's; negative is no bound
    batched_tokens: int | None = None  # the server's max-num-batched-tokens
    vocabulary: int | None = None  # of the served model; None where its config is not there to be read
    kv_capped: bool = True  # the KV cache has a size of its own and does not take whatever memory is left
    sampled_drafts: bool = True  # False: the server drafts, and takes a temperature above 0 for another one
    unfinished: Path | None = None  # where a bench keeps what it has of a measurement, for this plan; None: nowhere

    def require_room(self, tokens: int, what: str) -> None:
        """Raises UsageError where `tokens` of prompt and output are known not to fit the server's window."""
        if self.window_tokens is not None and tokens > self.window_tokens:
            raise UsageError(f"{what} take {tokens} tokens, the server's max-model-len is {self.window_tokens}")

    def seed_for(self, *labels: object) -> int:
        """A 31-bit seed that depends on the suite's seed and the labels only, so that both arms get the same."""
        digest = hashlib.sha256("/".join(map(str, (self.seed, *labels))).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Rates:
    """How fast the server is taken to be when a duration is estimated."""

    decode_tok_per_s: float = 30.0
    batch_tok_per_s: float = 100.0
    prefill_tok_per_s: float = 700.0
    logprob_tok_per_s: float | None = None  # at the suite's top K
    answer_tokens: float | None = None  # mean length of the answer to a word problem
    answers_tok_per_s: float | None = None  # of all word problems in flight
    window_tokens: int | None = None  # what is longer is skipped


@dataclass(frozen=True)
class Clock:
    started_at_utc: str
    started_s: float

    @staticmethod
    def start() -> Clock:
        return Clock(datetime.now(UTC).isoformat(timespec="milliseconds"), time.perf_counter())


def conclude(
    *,
    bench: str,
    clock: Clock,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
    reason: str = "",
    notes: Sequence[str] = (),
    corpora: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Measurement:
    """The Measurement; a `reason` makes it invalid and then only its counts remain as metrics. So does a metric that is
    no finite number: a counter of the server's was none."""
    if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
        reason = reason or f"{wrong[0]} is {metrics[wrong[0]]}, no finite number"
    counts = (".errors", ".skipped", ".truncated", ".short_outputs")
    kept = {name: value for name, value in metrics.items() if not reason or name.endswith(counts)}
    return Measurement(
        bench=bench,
        status="invalid" if reason else "ok",
        reason=" ".join(reason.split()),
        metrics=kept,
        samples=tuple(samples),
        config=config,
        corpora=corpora or {},
        notes=tuple(notes),
        started_at_utc=clock.started_at_utc,
        duration_s=time.perf_counter() - clock.started_s,
        files=files or {},
    )


def failures(completions: Sequence[Completion], max_error_share: float) -> str:
    """A reason where no request succeeded or too many failed, else empty."""
    errors = [completion.error for completion in completions if completion.error]
    if not completions:
        return "no request was made"
    if len(errors) == len(completions):
        return f"all {len(errors)} requests failed; the first: {errors[0]}"
    if len(errors) > max_error_share * len(completions):
        return f"{len(errors)} of {len(completions)} requests failed; the first: {errors[0]}"
    return ""


@dataclass(frozen=True)
class Window:
    """Requests between two looks at the server's counters, and whether they may be used."""

    before: Snapshot
    after: Snapshot
    reason: str  # empty where they may
    note: str
    lost: bool  # nothing can be measured after it: no request succeeded, or the server does not answer
    recount: Recount | None = None  # of a sample of the outputs; None where there is none


async def close_window(
    client: Client,
    before: Snapshot,
    completions: Sequence[Completion],
    max_error_share: float,
    recounted_outputs: int = SAMPLE,
) -> Window:
    """Look at the counters again, and tokenize up to `recounted_outputs` of the outputs.

    Too many failures, a restart, or a prompt from the prefix cache give a reason; a usage that its text does not bear
    out, or counters that prove nothing, a note.
    """
    reason = failures(completions, max_error_share)
    lost = all(completion.error for completion in completions)
    try:
        after = await client.metrics()
        speculation(before, after)  # for its refusal
        hits = growth(before, after, PREFIX_CACHE_HITS)
    except InvalidMeasurement as error:
        return Window(before, before, reason or str(error), "", lost=True)
    cached = max(hits or 0, sum(completion.cached_tokens or 0 for completion in completions))
    if cached:
        reason = reason or f"{cached:.0f} prompt tokens came from the prefix cache"
    notes = [] if hits is not None else [f"the server has no {PREFIX_CACHE_HITS}: a cold prefix cache is not proven"]
    counted = await recount(client, completions, recounted_outputs) if recounted_outputs and not lost else None
    if counted is not None:
        notes += [found] if (found := counted if isinstance(counted, str) else counted.note) else []
    return Window(before, after, reason, "; ".join(notes), lost, counted if isinstance(counted, Recount) else None)
