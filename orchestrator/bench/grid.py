"""The prompts of a betterbench on the published grid of input and output lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.bench.context import BenchContext
from orchestrator.bench.prompts import paragraphs
from orchestrator.client import Client
from orchestrator.corpora import Prompt
from orchestrator.records import Target

OUTPUT_TOKENS = {"short": 64, "medium": 512, "long": 2048}
OF_CODE = ("code", "json", "file_edit")  # categories whose material is code
TEMPLATE_TOKENS = 96  # what the chat template, the system message and the words around the material may take


@dataclass(frozen=True)
class Job:
    """One prompt to send: `material` stands before it; `cell` is its place in the grid, empty without one."""

    prompt: Prompt
    material: str = ""
    cell: str = ""


async def jobs(
    client: Client,
    target: Target,
    context: BenchContext,
    chosen: Sequence[Prompt],
    material_tokens: Mapping[str, int],
    max_tokens: int,
) -> tuple[list[Job], list[Job]]:
    """(jobs, those that do not fit the server's window). `material_tokens` by input length: before the prompt."""
    grid, corpora = context.corpora.grid(), context.corpora
    pools = {corpus.name: await paragraphs(client, corpus) for corpus in (corpora.prose(), corpora.code())}
    fitting, skipped = [], []
    for prompt in chosen:
        wanted, produced = grid[prompt.id]
        length = material_tokens[wanted]
        job = Job(replace(prompt, max_tokens=OUTPUT_TOKENS[produced]), "", f"{wanted}_{produced}")
        taken = length + len(await client.tokenize(prompt.prompt)) + TEMPLATE_TOKENS
        if taken + min(job.prompt.max_tokens, max_tokens) > target.max_model_len_tokens:
            skipped.append(job)
            continue
        if length:
            pool = pools["code" if prompt.category in OF_CODE else "prose"]
            token_ids = _material(pool, length, context.seed_for("betterbench material", prompt.id))
            job = replace(job, material=await client.detokenize(token_ids))
        fitting.append(job)
    return fitting, skipped


def _material(pool: Sequence[Sequence[int]], length_tokens: int, seed: int) -> list[int]:
    """Paragraphs in random order, repeated in another order when they run out."""
    generator, token_ids = random.Random(seed), []
    while len(token_ids) < length_tokens:
        for paragraph in generator.sample(list(pool), len(pool)):
            token_ids.extend(paragraph)
    return token_ids[:length_tokens]
