"""KL divergence between two models from the top of their next-token distributions, in float64.

With S the tokens that are in the reference's top K and that the candidate returned, p the reference, q the candidate:

    KL >= sum_{i in S} p_i ln(p_i / q_i) + P ln(P / Q),   P = 1 - sum_S p_i,  Q = 1 - sum_S q_i

The last term puts everything outside S into one bucket on both sides; by the log-sum inequality (Cover & Thomas,
theorem 2.7.1) merging outcomes never raises the divergence, so the result is a lower bound. Coverage is sum_S p_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from orchestrator.reference import Document, Reference

RESIDUAL_FLOOR = 1e-9  # a residual below the rounding of float32 log probabilities is not evidence of mass
RESAMPLES = 2000
MIN_INTERVAL_DOCUMENTS = 5  # fewer resample to too few different means; one document has no spread at all


@dataclass(frozen=True)
class DocumentDivergence:
    """Per position 1..T-1 of one document."""

    corpus: str
    kl_nats: numpy.ndarray  # float64
    coverage: numpy.ndarray  # float64, share of the reference's mass that was compared token by token
    top1_agrees: numpy.ndarray  # bool


@dataclass(frozen=True)
class Summary:
    """Over all positions of one corpus; `interval_nats` is None below MIN_INTERVAL_DOCUMENTS."""

    mean_nats: float
    interval_nats: tuple[float, float] | None
    median_nats: float
    p99_nats: float
    top1_agreement: float
    coverage: float
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
    if not numpy.array_equal(reference.token_ids, candidate.token_ids):
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
    )


def _top1(document: Document) -> numpy.ndarray:
    likeliest = document.top_logprobs.argmax(axis=1)
    return numpy.take_along_axis(document.top_ids, likeliest[:, None], axis=1)[:, 0]


def summarize(documents: Sequence[DocumentDivergence], seed: int) -> Summary:
    """Token-weighted: every position counts the same, whatever document it is in."""
    kl = numpy.concatenate([document.kl_nats for document in documents])
    return Summary(
        mean_nats=float(kl.mean()),
        interval_nats=interval(documents, seed),
        median_nats=float(numpy.median(kl)),
        p99_nats=float(numpy.percentile(kl, 99)),
        top1_agreement=float(numpy.concatenate([document.top1_agrees for document in documents]).mean()),
        coverage=float(numpy.concatenate([document.coverage for document in documents]).mean()),
        positions=len(kl),
    )


def interval(documents: Sequence[DocumentDivergence], seed: int) -> tuple[float, float] | None:
    """95% percentile bootstrap of the token-weighted mean, whole documents resampled; None of too few documents."""
    if len(documents) < MIN_INTERVAL_DOCUMENTS:
        return None
    sums = numpy.array([document.kl_nats.sum() for document in documents])
    counts = numpy.array([len(document.kl_nats) for document in documents])
    drawn = numpy.random.default_rng(seed).integers(len(documents), size=(RESAMPLES, len(documents)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = numpy.percentile(means, [2.5, 97.5])
    return float(low), float(high)
