"""vLLM's serve flags: those of the box with the variant's own over them, as an argv."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.schema import Variant

OF_THE_PLAN = ("model", "served-model-name", "host", "port", "speculative-config", "shutdown-timeout")
REFUSED: Mapping[str, str] = {
    "api-key": "the benches send none; remove it",
    "hf-token": "a secret has no place in an argv; name HF_TOKEN in box.env_secret",
    "config": "a file would set what the plan does not show; write its flags here",
    "uds": "the benches speak to box.host and box.port; remove it",
    "root-path": "the benches speak to the plain paths; remove it",
    "ssl-keyfile": "the benches speak plain HTTP; remove it",
    "ssl-certfile": "the benches speak plain HTTP; remove it",
}
COUNTS = frozenset(
    (
        *("max-num-seqs", "max-model-len", "max-num-batched-tokens", "max-logprobs", "block-size"),
        *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"),
    )
)
FRACTIONS = frozenset({"gpu-memory-utilization"})


def of(variant: Variant, box_serve: Mapping[str, Any]) -> dict[str, Any]:
    """Flag -> value, without the dashes; of a mapping, the variant's keys win one by one.

    Raises UsageError for a flag that the plan sets, one that is there twice, or a value that cannot be.
    """
    own = _normal(variant.serve, f"variant.serve (variant {variant.name})")
    box_serve = _normal(box_serve, "box.serve")
    serve = {**box_serve, **own}
    for name in box_serve.keys() & own.keys():
        if isinstance(box_serve[name], Mapping) and isinstance(own[name], Mapping):
            serve[name] = {**box_serve[name], **own[name]}
    return serve


def _normal(serve: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The flags as vLLM spells them: it takes max_num_seqs for max-num-seqs, and a start of a name for the name."""
    normal: dict[str, Any] = {}
    for written, value in serve.items():
        head, dot, rest = str(written).partition(".")  # compilation-config.mode is a key of a JSON flag
        head = head.replace("_", "-")
        name = head + dot + rest
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", head):
            raise UsageError(f"{where}: {written!r} is no flag; write its name without the leading dashes")
        if name in normal:
            raise UsageError(f"{where}: {name} is there twice, as {written} too; keep one")
        if any(flag.startswith(head) for flag in OF_THE_PLAN):
            raise UsageError(f"{where}: {written} is the plan's to set; remove it")
        if head in REFUSED:
            raise UsageError(f"{where}: {written} is refused: {REFUSED[head]}")
        _check_value(name, value, where)
        normal[name] = value
    return normal


def _check_value(name: str, value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str | int | float | bool | Mapping) or (number and not math.isfinite(value)):
        raise UsageError(f"{where}: {name}={value!r} is not a plain value; write a text, a number, true or false")
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise UsageError(f"{where}: {name} is empty; write a value, or remove it")
    if name in COUNTS and not (number and isinstance(value, int) and value >= 1):
        raise UsageError(f"{where}: {name}={value!r} is no count; write a whole number of at least 1")
    if name in FRACTIONS and not (number and 0 < value <= 1):
        raise UsageError(f"{where}: {name}={value!r} is no fraction; write a number above 0, up to 1")


def argv(serve: Mapping[str, Any]) -> tuple[str, ...]:
    """A boolean becomes --flag or --no-flag, a mapping JSON."""
    words: list[str] = []
    for name, value in sorted(serve.items()):
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value, sort_keys=True)]
        else:
            words += [f"--{name}", str(value)]
    return tuple(words)


def speculative(variant: Variant, drafter: str) -> tuple[str, ...]:
    """vLLM's --speculative-config; empty without speculation. `drafter` is its path, for the methods that have one.

    Raises UsageError for speculation that cannot be.
    """
    speculation = variant.speculation
    where = f"variant.speculation (variant {variant.name})"
    if speculation.method == "none":
        if speculation.tokens or speculation.drafter:
            raise UsageError(f"{where}: tokens or a drafter without a method; set method")
        return ()
    if speculation.tokens < 1:
        raise UsageError(f"variant.speculation.tokens (variant {variant.name}): {speculation.method} needs at least 1")
    if set(speculation.options) & {"method", "num_speculative_tokens", "model"}:
        raise UsageError(f"{where}: options may not repeat method, tokens or drafter; take them out of options")
    config = {**speculation.options, "method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.drafts_with_a_model:
        config["model"] = drafter
    return ("--speculative-config", json.dumps(config, sort_keys=True))
