"""Usage against the tokens seen: outputs tokenized again by the server, after the time that is measured.

A text tokenizes back to the tokens that made it but for little (halves of characters, a stop token without text, a
merge that the model did not take), so a count that is off by more is not the count of this text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.client import Client
from orchestrator.completion import Completion
from orchestrator.errors import InvalidMeasurement

TOLERANCE = 0.02
SLACK_TOKENS = 2  # of each output: a stop token, a channel's marker
SAMPLE = 4


@dataclass(frozen=True)
class Recount:
    """Outputs of one set of requests: tokens by usage, and the ids that their texts tokenize to."""

    usage_tokens: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def seen_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def note(self) -> str:
        """Empty where usage and texts agree to 2%."""
        said, seen = sum(self.usage_tokens), self.seen_tokens
        off = abs(said - seen)
        if off <= TOLERANCE * said or off <= SLACK_TOKENS * len(self.token_ids):
            return ""
        return (
            f"usage says {said} tokens, the texts of these {len(self.token_ids)} outputs are {seen} "
            f"({100 * (said - seen) / seen if seen else 100:+.1f}%)"
        )

    def sample(self, **labels: Any) -> dict[str, Any]:
        """The raw record that is stored."""
        said, seen = sum(self.usage_tokens), self.seen_tokens
        return {**labels, "recount": {"outputs": len(self.token_ids), "usage_tokens": said, "text_tokens": seen}}


async def recount(client: Client, completions: Sequence[Completion], most: int = SAMPLE) -> Recount | str:
    """Tokenize the outputs of up to `most` good requests, spread over all; or the reason why that cannot be done."""
    good = [done for done in completions if not done.error]
    chosen = good[:: max(1, math.ceil(len(good) / most))]
    try:
        texts = await asyncio.gather(*(client.tokenize(done.reasoning + done.text) for done in chosen))
    except InvalidMeasurement as error:
        return f"usage is not checked against the texts: {error}"
    return Recount(tuple(done.completion_tokens for done in chosen), tuple(map(tuple, texts)))


def repeats(token_ids: Sequence[int], size: int) -> tuple[int, int]:
    """(n-grams that stood before in the same text, all n-grams) of `size` tokens."""
    grams = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    return len(grams) - len(set(grams)), len(grams)
