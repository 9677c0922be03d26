"""Prompts exact in tokens: the same token ids for the same seed, none with the start of another."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from orchestrator.client import Client
from orchestrator.corpora import Corpus
from orchestrator.errors import InvalidMeasurement

HEADER_TOKENS = 8  # the prefix cache's first block differs when any of its tokens does


async def paragraphs(client: Client, corpus: Corpus) -> tuple[tuple[int, ...], ...]:
    """The corpus' paragraphs as token ids of the served model, blank line included."""
    parts = [part for part in re.split(r"\n\s*\n", corpus.text) if part.strip()]
    tokens = [tuple(await client.tokenize(part + "\n\n")) for part in parts]
    if not any(tokens):
        raise InvalidMeasurement(f"corpus {corpus.name}: the server's tokenizer gave no tokens")
    return tuple(tokens)


def prose_prompt(pool: Sequence[Sequence[int]], length_tokens: int, seed: int) -> list[int]:
    """`length_tokens` ids: a header of random ids, then paragraphs in random order, repeated when they run out."""
    generator = random.Random(seed)
    prompt = _header(pool, generator)
    while len(prompt) < length_tokens:
        for paragraph in generator.sample(list(pool), len(pool)):
            prompt.extend(paragraph)
            if len(prompt) >= length_tokens:
                break
    return prompt[:length_tokens]


def random_prompt(pool: Sequence[Sequence[int]], length_tokens: int, seed: int) -> list[int]:
    """`length_tokens` ids drawn from the pool's distinct ids, independently."""
    generator = random.Random(seed)
    return generator.choices(_vocabulary(pool), k=length_tokens)


def _header(pool: Sequence[Sequence[int]], generator: random.Random) -> list[int]:
    return generator.choices(_vocabulary(pool), k=HEADER_TOKENS)


def _vocabulary(pool: Sequence[Sequence[int]]) -> list[int]:
    return sorted({token for paragraph in pool for token in paragraph})
