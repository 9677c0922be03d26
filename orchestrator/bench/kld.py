"""kld: KL divergence of the served model from a reference that the same stack served.

Documents are cut by tokens once, when the reference is made, and stored as token ids; the candidate scores the
same ids. Formulas are in `orchestrator.bench.divergence`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude
from orchestrator.bench.divergence import MIN_INTERVAL_DOCUMENTS, DocumentDivergence, compare, summarize
from orchestrator.client import Client
from orchestrator.corpora import Corpus
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.records import Measurement, Target, to_jsonable
from orchestrator.reference import Document, Reference, require_stack


@dataclass(frozen=True)
class Params:
    corpora: tuple[Literal["prose", "code", "wikitext"], ...] = ("prose", "code")
    documents: int = 8  # of each corpus
    document_tokens: int = 512
    top_k: int = 64
    wikitext_path: str = ""

    def __post_init__(self) -> None:
        if not self.corpora or len(set(self.corpora)) < len(self.corpora):
            raise ValueError("corpora must name each corpus once")
        if self.documents < 1 or self.document_tokens < 2 or self.top_k < 1:
            raise ValueError("documents and top_k must be >= 1, document_tokens >= 2")


def expected_s(params: Params, rates: Rates) -> float:
    tokens = len(params.corpora) * params.documents * params.document_tokens
    return tokens / rates.prefill_tok_per_s + tokens * params.top_k * 1.5e-5  # the server's work on log probabilities


def texts(params: Params, context: BenchContext) -> tuple[Corpus, ...]:
    loaders = {
        "prose": context.corpora.prose,
        "code": context.corpora.code,
        "wikitext": lambda: context.corpora.wikitext(params.wikitext_path),
    }
    return tuple(loaders[name]() for name in params.corpora)


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where a corpus cannot be read, or the server is known to refuse the requests."""
    texts(params, context)
    context.require_room(params.document_tokens + 1, "benches.kld.document_tokens and the token that scoring generates")
    if context.max_logprobs is not None and 0 <= context.max_logprobs < params.top_k:
        raise UsageError(f"benches.kld.top_k is {params.top_k}, the server's max-logprobs is {context.max_logprobs}")


def reference_key(params: Params, context: BenchContext) -> str:
    """Names what a reference is of: the corpora's bytes, how they are cut, K. Computed without a server."""
    parts = [f"{corpus.name}={corpus.sha256}" for corpus in texts(params, context)]
    parts += [str(params.documents), str(params.document_tokens), str(params.top_k)]
    return f"{'-'.join(params.corpora)}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"


async def collect(target: Target, params: Params, context: BenchContext) -> Reference:
    """Cut the documents and score them twice on the served model: the reference and its floor against itself."""
    sources = texts(params, context)
    async with Client(target) as client:
        cut = [piece for corpus in sources for piece in await _cut(client, corpus, params)]
        first_text = await client.detokenize(cut[0][1].tolist())
        total = 2 * len(cut)
        once = await _score(client, cut, params.top_k, context, 0, total)
        again = await _score(client, cut, params.top_k, context, len(cut), total)
    reference = Reference(
        documents=once,
        top_k=params.top_k,
        corpora={corpus.name: corpus.sha256 for corpus in sources},
        first_text=first_text,
        stack=context.stack,
    )
    divergences = compare(reference, replace(reference, documents=again))
    return replace(reference, floor_kl_nats=tuple(divergence.kl_nats for divergence in divergences))


async def score(target: Target, reference: Reference, context: BenchContext) -> Reference:
    """The served model's scores of the reference's token ids, in the reference's order.

    Raises InvalidMeasurement where the server's tokenizer is not the reference's.
    """
    cut = [(document.corpus, document.token_ids) for document in reference.documents]
    async with Client(target) as client:
        if await client.detokenize(cut[0][1].tolist()) != reference.first_text:
            raise InvalidMeasurement("the served model's tokenizer is not the reference's: token ids mean other text")
        documents = await _score(client, cut, reference.top_k, context, 0, len(cut))
    return replace(reference, documents=documents, floor_kl_nats=())


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    reference = context.reference
    if reference is None:
        raise UsageError("bench kld needs a reference: boot the reference model on this stack and collect one")
    if context.stack:
        require_stack(reference.stack, context.stack, "given to this bench")
    wanted = {corpus.name: corpus.sha256 for corpus in texts(params, context)}
    if dict(reference.corpora) != wanted or reference.top_k != params.top_k:
        raise UsageError("the KL reference is of other corpora or another top_k than benches.kld asks for")
    candidate = await score(target, reference, context)
    divergences = compare(reference, candidate)
    metrics, notes = _metrics(divergences, reference, context)
    finite = all(numpy.isfinite(value) for value in metrics.values())
    return conclude(
        bench="kld",
        clock=clock,
        config={**to_jsonable(params), "reference_stack": reference.stack, "seed": context.seed},
        metrics=metrics,
        samples=[_sample(number, divergence, reference) for number, divergence in enumerate(divergences)],
        reason="" if finite else "a KL is not finite",
        notes=notes,
        corpora=wanted,
    )


def _metrics(
    divergences: Sequence[DocumentDivergence], reference: Reference, context: BenchContext
) -> tuple[dict[str, float], list[str]]:
    metrics = {"kl.errors": 0.0}  # one failed request leaves documents without scores and ends the bench
    notes: list[str] = []
    floors = reference.floor_nats
    for name in reference.corpora:
        documents = [divergence for divergence in divergences if divergence.corpus == name]
        summary = summarize(documents, context.seed_for("kld", name))
        metrics |= {
            f"kl.mean_nats.{name}": summary.mean_nats,
            f"kl.median_nats.{name}": summary.median_nats,
            f"kl.p99_nats.{name}": summary.p99_nats,
            f"kl.top1_agreement.{name}": summary.top1_agreement,
            f"kl.coverage.{name}": summary.coverage,
            f"kl.positions.{name}": float(summary.positions),
        }
        if summary.interval_nats:
            low, high = summary.interval_nats
            metrics |= {f"kl.mean_nats.{name}.ci_low": low, f"kl.mean_nats.{name}.ci_high": high}
        else:
            notes.append(f"{name}: no interval of {len(documents)} documents, it takes {MIN_INTERVAL_DOCUMENTS}")
        if name in floors:
            metrics[f"kl.floor_nats.{name}"] = floors[name]
            if summary.mean_nats <= floors[name]:
                notes.append(f"{name}: at the reference's own floor of {floors[name]:.2g} nats")
        else:
            notes.append(f"{name}: the reference has no floor")
    return metrics, notes


def _sample(number: int, divergence: DocumentDivergence, reference: Reference) -> dict[str, Any]:
    floor = reference.floor_kl_nats[number] if reference.floor_kl_nats else ()
    return {
        "document": number,
        "corpus": divergence.corpus,
        "kl_nats": _rounded(divergence.kl_nats),
        "floor_kl_nats": _rounded(floor),  # the reference's second pass against its first
        "coverage": [round(float(value), 6) for value in divergence.coverage],
        "top1_agrees": [bool(value) for value in divergence.top1_agrees],
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


async def _cut(client: Client, corpus: Corpus, params: Params) -> list[tuple[str, numpy.ndarray]]:
    """Documents of equal length, spread evenly over the corpus, none overlapping."""
    tokens = numpy.array(await client.tokenize(corpus.text), dtype=numpy.int32)
    available = len(tokens) // params.document_tokens
    if available < params.documents:
        raise UsageError(
            f"corpus {corpus.name} has {len(tokens)} tokens: {available} documents of {params.document_tokens}, "
            f"benches.kld.documents is {params.documents}"
        )
    stride = len(tokens) // params.documents
    return [
        (corpus.name, tokens[number * stride : number * stride + params.document_tokens])
        for number in range(params.documents)
    ]


async def _score(
    client: Client, cut: Sequence[tuple[str, numpy.ndarray]], top_k: int, context: BenchContext, done: int, total: int
) -> tuple[Document, ...]:
    """One request at a time: the server holds a float32 (tokens, vocabulary) tensor for each."""
    documents = []
    for number, (corpus, token_ids) in enumerate(cut):
        context.advance(done + number, total, f"log probabilities, {corpus}")
        positions = await client.prompt_logprobs(token_ids.tolist(), top_k)
        documents.append(_document(corpus, token_ids, positions, top_k))
    context.advance(done + len(cut), total, "log probabilities")
    return tuple(documents)


def _document(corpus: str, token_ids: numpy.ndarray, positions: Sequence[Mapping[int, float]], top_k: int) -> Document:
    """The server returns the actual token besides the top K: K or K + 1 entries, kept in order of probability."""
    top_ids = numpy.full((len(positions), top_k + 1), -1, dtype=numpy.int32)
    top_logprobs = numpy.full((len(positions), top_k + 1), -numpy.inf, dtype=numpy.float32)
    for row, entries in enumerate(positions):
        if len(entries) < top_k:
            raise InvalidMeasurement(f"prompt_logprobs: {len(entries)} tokens at a position instead of {top_k}")
        for column, (token, logprob) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1])[: top_k + 1]):
            top_ids[row, column], top_logprobs[row, column] = token, logprob
    return Document(corpus, token_ids, top_ids, top_logprobs)
