"""The documents of a KL: how a corpus is cut into them, and what a server says of each position of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy

from orchestrator.client import Client
from orchestrator.corpora import Corpus
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.reference import Document

if TYPE_CHECKING:
    from orchestrator.bench.kld import Params

SHORTEST_TOKENS = 16  # of a line of served traffic


async def pieces_of(client: Client, corpus: Corpus, params: Params) -> list[Document]:
    """Documents without scores. None overlaps another."""
    if corpus.parts and params.protocol == "documents":
        pieces = await _lines(client, corpus, params)
    else:
        tokens = numpy.array(await client.tokenize(corpus.text), dtype=numpy.int32)
        available = len(tokens) // params.document_tokens
        if available < params.documents:
            raise UsageError(
                f"corpus {corpus.name} has {len(tokens)} tokens: {available} documents of {params.document_tokens}, "
                f"benches.kld.documents is {params.documents}"
            )
        stride = len(tokens) // params.documents if params.protocol == "documents" else params.document_tokens
        pieces = [
            tokens[number * stride : number * stride + params.document_tokens] for number in range(params.documents)
        ]
    none = numpy.empty((0, 0))
    return [Document(corpus.name, token_ids, none, none, params.first) for token_ids in pieces]


async def _lines(client: Client, corpus: Corpus, params: Params) -> list[numpy.ndarray]:
    """The beginnings of lines, spread evenly over the file."""
    tokens = [numpy.array(await client.tokenize(part), dtype=numpy.int32) for part in corpus.parts]
    usable = [token_ids[: params.document_tokens] for token_ids in tokens if len(token_ids) >= SHORTEST_TOKENS]
    if len(usable) < params.documents:
        raise UsageError(
            f"corpus {corpus.name} has {len(usable)} lines of at least {SHORTEST_TOKENS} tokens, "
            f"benches.kld.documents is {params.documents}"
        )
    return [usable[number * len(usable) // params.documents] for number in range(params.documents)]


def scored(piece: Document, positions: Sequence[Mapping[int, float]], top_k: int) -> Document:
    """The server returns the actual token besides the top K: K or K + 1 entries, kept in order of probability."""
    top_ids = numpy.full((len(positions), top_k + 1), -1, dtype=numpy.int32)
    top_logprobs = numpy.full((len(positions), top_k + 1), -numpy.inf, dtype=numpy.float32)
    for row, entries in enumerate(positions):
        if len(entries) < top_k:
            raise InvalidMeasurement(f"prompt_logprobs: {len(entries)} tokens at a position instead of {top_k}")
        for column, (token, logprob) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1])[: top_k + 1]):
            top_ids[row, column], top_logprobs[row, column] = token, logprob
    return replace(piece, top_ids=top_ids, top_logprobs=top_logprobs)
