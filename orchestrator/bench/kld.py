"""kld: KL divergence of the served model from a reference that the same stack served.

Documents are cut by tokens once, when the reference is made, and stored as token ids; the candidate scores the
same ids. Formulas are in `orchestrator.bench.divergence`. Protocols:

- documents: pieces spread evenly over a corpus, every position after the first scored. Served traffic is cut by its
  lines, a request each.
- halves: windows in a row from the corpus' start, of which the second half is scored, so that each scored position
  has at least half a window before it. Windows are of one length: the mean over positions is the mean of their means.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude
from orchestrator.bench.divergence import (
    MIN_INTERVAL_DOCUMENTS,
    STATISTICS,
    DocumentDivergence,
    compare,
    summarize,
)
from orchestrator.bench.documents import pieces_of, scored
from orchestrator.client import Client
from orchestrator.corpora import Corpus
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.records import Measurement, Target, to_jsonable
from orchestrator.reference import Document, Reference, require_stack

COPIES = 2  # the server holds the float32 logits of a batch and their log-softmax at the same time


@dataclass(frozen=True)
class Params:
    corpora: tuple[Literal["prose", "code", "wikitext", "traffic"], ...] = ("prose", "code")
    protocol: Literal["documents", "halves"] = "documents"
    documents: int = 8  # of each corpus
    document_tokens: int = 512
    top_k: int = 64
    wikitext_path: str = ""
    traffic_path: str = ""  # JSON lines, {"text": ...} each: what was served, as text with its template
    logprob_gib: float = 2.0  # what the server may need for log probabilities before the bench is refused

    def __post_init__(self) -> None:
        if not self.corpora or len(set(self.corpora)) < len(self.corpora):
            raise ValueError("corpora must name each corpus once")
        if self.documents < 1 or self.document_tokens < 2 or self.top_k < 1 or self.logprob_gib <= 0:
            raise ValueError("documents and top_k must be >= 1, document_tokens >= 2, logprob_gib > 0")
        if self.protocol == "halves" and (self.document_tokens < 4 or self.document_tokens % 2):
            raise ValueError("protocol halves wants an even document_tokens of at least 4")

    @property
    def first(self) -> int:
        """The first scored position of a document."""
        return 1 if self.protocol == "documents" else self.document_tokens // 2 + 1

    def label(self, corpus: str) -> str:
        """What a corpus is called in metrics: the two protocols' numbers are not to be mixed."""
        return corpus if self.protocol == "documents" else f"{corpus}_halves"


def expected_s(params: Params, rates: Rates) -> float:
    tokens = len(params.corpora) * params.documents * params.document_tokens
    if rates.logprob_tok_per_s:
        return tokens / rates.logprob_tok_per_s
    return tokens / rates.prefill_tok_per_s + tokens * params.top_k * 5e-5  # the server's work on log probabilities


def texts(params: Params, context: BenchContext) -> tuple[Corpus, ...]:
    loaders = {
        "prose": context.corpora.prose,
        "code": context.corpora.code,
        "wikitext": lambda: context.corpora.wikitext(params.wikitext_path),
        "traffic": lambda: context.corpora.traffic(params.traffic_path),
    }
    return tuple(loaders[name]() for name in params.corpora)


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where a corpus cannot be read, or the server is known to refuse the requests or die of them."""
    texts(params, context)
    context.require_room(params.document_tokens + 1, "benches.kld.document_tokens and the token that scoring generates")
    if context.max_logprobs is not None and 0 <= context.max_logprobs < params.top_k:
        raise UsageError(f"benches.kld.top_k is {params.top_k}, the server's max-logprobs is {context.max_logprobs}")
    require_memory(params, context)


def logprob_bytes(tokens: int, vocabulary: int) -> int:
    """What the server holds for the log probabilities of a batch of prompt tokens: float32 (tokens, vocabulary)."""
    return 4 * COPIES * tokens * vocabulary


def require_memory(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the log probabilities of one batch are larger than `logprob_gib`, or where the KV cache
    is sized to what memory is left and would leave no room for them.
    """
    if context.vocabulary is None:
        return
    batch = min(params.document_tokens, context.batched_tokens or params.document_tokens)
    wanted_gib = logprob_bytes(batch, context.vocabulary) / 2**30
    tensor = f"log probabilities of {batch} tokens over a vocabulary of {context.vocabulary} take {wanted_gib:.2f} GiB"
    if wanted_gib > params.logprob_gib:
        raise UsageError(
            f"benches.kld: {tensor}, benches.kld.logprob_gib allows {params.logprob_gib:g}; "
            "lower max-num-batched-tokens or document_tokens, or raise logprob_gib if the server has that room"
        )
    if not context.kv_capped:
        raise UsageError(
            f"benches.kld: {tensor}, and the KV cache takes all that gpu-memory-utilization allows; "
            "set +variant.serve.kv-cache-memory-bytes=BYTES so that they fit beside it"
        )


def reference_key(params: Params, context: BenchContext) -> str:
    """Names what a reference is of: the corpora's bytes, how they are cut, K. Computed without a server."""
    parts = [f"{corpus.name}={corpus.sha256}" for corpus in texts(params, context)]
    parts += [params.protocol, str(params.documents), str(params.document_tokens), str(params.top_k)]
    return f"{'-'.join(params.corpora)}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"


async def collect(target: Target, params: Params, context: BenchContext) -> Reference:
    """Cut the documents and score them twice on the served model: the reference and its floor against itself."""
    require_memory(params, context)
    sources = texts(params, context)
    async with Client(target) as client:
        cut = [piece for corpus in sources for piece in await pieces_of(client, corpus, params)]
        first_text = await client.detokenize(cut[0].token_ids.tolist())
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
    async with Client(target) as client:
        if await client.detokenize(reference.documents[0].token_ids.tolist()) != reference.first_text:
            raise InvalidMeasurement("the served model's tokenizer is not the reference's: token ids mean other text")
        documents = await _score(client, reference.documents, reference.top_k, context, 0, len(reference.documents))
    return replace(reference, documents=documents, floor_kl_nats=())


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    reference = context.reference
    if reference is None:
        raise UsageError("bench kld needs a reference: boot the reference model on this stack and collect one")
    if context.stack:
        require_stack(reference.stack, context.stack, "given to this bench")
    wanted = {corpus.name: corpus.sha256 for corpus in texts(params, context)}
    if dict(reference.corpora) != wanted or reference.top_k != params.top_k or not _as_cut(reference, params):
        raise UsageError("the KL reference is of other corpora, cut or top_k than benches.kld asks for")
    require_memory(params, context)
    candidate = await score(target, reference, context)
    divergences = compare(reference, candidate)
    metrics, notes = _metrics(divergences, reference, params, context)
    finite = all(numpy.isfinite(value) for value in metrics.values())
    return conclude(
        bench="kld",
        clock=clock,
        config={**to_jsonable(params), "reference_stack": reference.stack, "seed": context.seed},
        metrics=metrics,
        samples=[_sample(number, found, reference.documents[number]) for number, found in enumerate(divergences)],
        reason="" if finite else "a KL is not finite",
        notes=notes,
        corpora=wanted,
        files={"positions.npz": _positions(divergences, reference)},
    )


def _as_cut(reference: Reference, params: Params) -> bool:
    """Whether the reference's documents are of the wanted protocol and length; a line of traffic may be shorter."""
    return all(
        document.first == params.first
        and (len(document.token_ids) == params.document_tokens or document.corpus == "traffic")
        for document in reference.documents
    )


def _metrics(
    divergences: Sequence[DocumentDivergence], reference: Reference, params: Params, context: BenchContext
) -> tuple[dict[str, float], list[str]]:
    metrics = {"kl.errors": 0.0}  # one failed request leaves documents without scores and ends the bench
    notes: list[str] = []
    floors = reference.floor_nats
    for corpus in reference.corpora:
        name = params.label(corpus)
        documents = [divergence for divergence in divergences if divergence.corpus == corpus]
        summary = summarize(documents, context.seed_for("kld", corpus))
        metrics |= {f"kl.{what}.{name}": value for what, value in summary.values.items()}
        metrics[f"kl.positions.{name}"] = float(summary.positions)
        for what, (low, high) in summary.intervals.items():
            metrics |= {f"kl.{what}.{name}.ci_low": low, f"kl.{what}.{name}.ci_high": high}
        if not summary.intervals:
            notes.append(f"{name}: no interval of {len(documents)} documents, it takes {MIN_INTERVAL_DOCUMENTS}")
        if corpus in floors:
            metrics[f"kl.floor_nats.{name}"] = floors[corpus]
            if summary.values["mean_nats"] <= floors[corpus]:
                notes.append(f"{name}: at the reference's own floor of {floors[corpus]:.2g} nats")
        else:
            notes.append(f"{name}: the reference has no floor")
    return metrics, notes


def _sample(number: int, divergence: DocumentDivergence, document: Document) -> dict[str, Any]:
    """One document's own statistics; its positions are in positions.npz under its number."""
    return {
        "document": number,
        "corpus": divergence.corpus,
        "tokens": len(document.token_ids),
        "first": document.first,
        "positions": len(divergence.kl_nats),
        **{name: float(f"{statistic(divergence):.6g}") for name, statistic in STATISTICS.items()},
    }


def _positions(divergences: Sequence[DocumentDivergence], reference: Reference) -> bytes:
    """npz: `<document>.<what>` for each position, float64 and bool, beside the document's token ids."""
    arrays: dict[str, numpy.ndarray] = {}
    for number, (found, document) in enumerate(zip(divergences, reference.documents, strict=True)):
        arrays |= {
            f"{number}.token_ids": document.token_ids,
            f"{number}.kl_nats": found.kl_nats,
            f"{number}.coverage": found.coverage,
            f"{number}.top1_agrees": found.top1_agrees,
            f"{number}.delta_p": found.delta_p,
        }
        if reference.floor_kl_nats:  # the reference's second pass against its first
            arrays[f"{number}.floor_kl_nats"] = reference.floor_kl_nats[number]
    content = io.BytesIO()
    numpy.savez_compressed(content, **arrays)
    return content.getvalue()


async def _score(
    client: Client, cut: Sequence[Document], top_k: int, context: BenchContext, done: int, total: int
) -> tuple[Document, ...]:
    """One request at a time: the server holds a float32 (tokens, vocabulary) tensor for each."""
    scored_pieces = []
    for number, piece in enumerate(cut):
        context.advance(done + number, total, f"log probabilities, {piece.corpus}")
        positions = await client.prompt_logprobs(piece.token_ids.tolist(), top_k)
        scored_pieces.append(scored(piece, positions[piece.first - 1 :], top_k))
    context.advance(done + len(cut), total, "log probabilities")
    return tuple(scored_pieces)
