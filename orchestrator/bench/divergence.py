"""KL divergence between two models from the top of their next-token distributions, in float64.

With S the tokens that are in the reference's top K and that the candidate returned, p the reference, q the candidate:

    KL >= sum_{i in S} p_i ln(p_i / q_i) + P ln(P / Q),   P = 1 - sum_S p_i,  Q = 1 - sum_S q_i

The last term puts everything outside S into one bucket on both sides; by the log-sum inequality (Cover & Thomas,
theorem 2.7.1) merging outcomes never raises the divergence, so the result is a lower bound. Coverage is sum_S p_i.

delta-p is q(actual) - p(actual), the change of the probability of the token that really follows, as llama.cpp's
`perplexity --kl-divergence` defines it; its RMS is over all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from orchestrator.reference import Document, Reference

RESIDUAL_FLOOR = 1e-9  # a residual below the rounding of float32 log probabilities is not evidence of mass
RESAMPLES = 2000
MIN_INTERVAL_DOCUMENTS = 5  # fewer resample to too few different means; one document has no spread at all


@dataclass(frozen=True)
class DocumentDivergence:
    """Per scored position of one document; all arrays have that length."""

    corpus: str
    kl_nats: numpy.ndarray  # float64
    coverage: numpy.ndarray  # float64, share of the reference's mass that was compared token by token
    top1_agrees: numpy.ndarray  # bool
    delta_p: numpy.ndarray  # float64, q(actual) - p(actual)


STATISTICS: Mapping[str, Callable[[DocumentDivergence], float]] = {
    "mean_nats": lambda found: float(found.kl_nats.mean()),
    "median_nats": lambda found: float(numpy.median(found.kl_nats)),
    "p95_nats": lambda found: float(numpy.percentile(found.kl_nats, 95)),
    "p99_nats": lambda found: float(numpy.percentile(found.kl_nats, 99)),
    "max_nats": lambda found: float(found.kl_nats.max()),
    "top1_agreement": lambda found: float(found.top1_agrees.mean()),
    "delta_p_rms": lambda found: float(numpy.sqrt((found.delta_p**2).mean())),
    "delta_p_mean": lambda found: float(found.delta_p.mean()),
    "coverage": lambda found: float(found.coverage.mean()),
}
WITH_INTERVAL = ("mean_nats", "p99_nats", "top1_agreement", "delta_p_rms")


@dataclass(frozen=True)
class Summary:
    """Over all positions of one corpus: each position counts the same, whatever document it is in.

    `intervals` are 95% bootstrap intervals of WITH_INTERVAL; empty below MIN_INTERVAL_DOCUMENTS documents.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    positions: int


def compare(reference: Reference, candidate: Reference) -> tuple[DocumentDivergence, ...]:
    """KL(reference || candidate) per document.

    Raises ValueError where the two did not score the same token ids.
    """
    if len(reference.documents) != len(candidate.documents):
        raise ValueError(f"{len(candidate.documents)} documents, the reference has {len(reference.documents)}")
    return tuple(
        compare_document(ours, theirs, reference.top_k)
        for ours, theirs in zip(reference.documents, candidate.documents, strict=True)
    )


def compare_document(reference: Document, candidate: Document, top_k: int) -> DocumentDivergence:
    """Over the `top_k` likeliest tokens of the reference and all that the candidate returned."""
    if not numpy.array_equal(reference.token_ids, candidate.token_ids) or reference.first != candidate.first:
        raise ValueError(f"corpus {reference.corpus}: reference and candidate scored different token ids")
    ids = reference.top_ids[:, :top_k]  # columns are in order of probability; the actual token may follow
    # (positions, reference K, candidate K + 1); an unused slot has token -1 and takes no part
    same = (ids[:, :, None] == candidate.top_ids[:, None, :]) & (ids[:, :, None] >= 0)
    shared = same.any(axis=2)
    log_p = reference.top_logprobs[:, :top_k].astype(numpy.float64)
    log_q = numpy.take_along_axis(candidate.top_logprobs.astype(numpy.float64), same.argmax(axis=2), axis=1)
    p = numpy.where(shared, numpy.exp(numpy.where(shared, log_p, 0.0)), 0.0)
    q = numpy.where(shared, numpy.exp(numpy.where(shared, log_q, 0.0)), 0.0)
    terms = numpy.where(shared, p * numpy.where(shared, log_p - log_q, 0.0), 0.0)
    rest_p = 1.0 - p.sum(axis=1)
    rest_q = numpy.maximum(1.0 - q.sum(axis=1), RESIDUAL_FLOOR)
    some = rest_p > RESIDUAL_FLOOR
    rest = numpy.where(some, rest_p * numpy.log(numpy.where(some, rest_p, 1.0) / rest_q), 0.0)
    return DocumentDivergence(
        corpus=reference.corpus,
        kl_nats=terms.sum(axis=1) + rest,
        coverage=p.sum(axis=1),
        top1_agrees=_top1(reference) == _top1(candidate),
        delta_p=_actual(candidate) - _actual(reference),
    )


def _top1(document: Document) -> numpy.ndarray:
    """The likeliest token of each position; of equals, which bf16 logits have, the lowest id."""
    tied = document.top_logprobs == document.top_logprobs.max(axis=1, keepdims=True)
    return numpy.where(tied, document.top_ids, numpy.iinfo(numpy.int32).max).min(axis=1)


def _actual(document: Document) -> numpy.ndarray:
    """Probability of the token that really follows, per scored position; the server returns it besides the top K."""
    is_actual = document.top_ids == document.token_ids[document.first :, None]
    if not is_actual.any(axis=1).all():
        raise ValueError(f"corpus {document.corpus}: a position lacks the log probability of its actual token")
    return numpy.exp(numpy.where(is_actual, document.top_logprobs.astype(numpy.float64), -numpy.inf).max(axis=1))


def joined(documents: Sequence[DocumentDivergence]) -> DocumentDivergence:
    """All positions of the documents in a row."""
    names = ("kl_nats", "coverage", "top1_agrees", "delta_p")
    return DocumentDivergence(
        documents[0].corpus, *(numpy.concatenate([getattr(found, name) for found in documents]) for name in names)
    )


def summarize(documents: Sequence[DocumentDivergence], seed: int) -> Summary:
    """Statistics of one corpus' documents; `seed` draws the bootstrap."""
    everything = joined(documents)
    return Summary(
        values={name: statistic(everything) for name, statistic in STATISTICS.items()},
        intervals=intervals(documents, seed),
        positions=len(everything.kl_nats),
    )


def intervals(documents: Sequence[DocumentDivergence], seed: int) -> dict[str, tuple[float, float]]:
    """95% percentile bootstrap of each statistic of WITH_INTERVAL, whole documents resampled; empty of too few."""
    if len(documents) < MIN_INTERVAL_DOCUMENTS:
        return {}
    drawn = numpy.random.default_rng(seed).integers(len(documents), size=(RESAMPLES, len(documents)))
    counts = numpy.array([len(found.kl_nats) for found in documents])
    sizes = counts[drawn].sum(axis=1)
    sums = {
        "mean_nats": [found.kl_nats.sum() for found in documents],
        "top1_agreement": [found.top1_agrees.sum() for found in documents],
        "delta_p_rms": [(found.delta_p**2).sum() for found in documents],
    }
    means = {name: numpy.array(values)[drawn].sum(axis=1) / sizes for name, values in sums.items()}
    means["delta_p_rms"] = numpy.sqrt(means["delta_p_rms"])
    means["p99_nats"] = _resampled_p99([found.kl_nats for found in documents], drawn)
    return {
        name: (float(low), float(high))
        for name in WITH_INTERVAL
        for low, high in [numpy.percentile(means[name], [2.5, 97.5])]
    }


def _resampled_p99(values: Sequence[numpy.ndarray], drawn: numpy.ndarray) -> numpy.ndarray:
    """numpy's linear 99th percentile of every resample, from one sort of all positions.

    A position counts as often as its document was drawn. Shapes: drawn (R, documents) -> (R,).
    """
    kl = numpy.concatenate(values)
    order = numpy.argsort(kl)
    owner = numpy.repeat(numpy.arange(len(values)), [len(part) for part in values])[order]
    kl = kl[order]
    found = numpy.empty(len(drawn))
    for number, draw in enumerate(drawn):
        reached = numpy.cumsum(numpy.bincount(draw, minlength=len(values))[owner])
        rank = 0.99 * (reached[-1] - 1)
        low, high = numpy.searchsorted(reached, [numpy.floor(rank), numpy.ceil(rank)], side="right")
        found[number] = kl[low] + (rank - numpy.floor(rank)) * (kl[high] - kl[low])
    return found
