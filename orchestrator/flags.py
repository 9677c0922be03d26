"""vLLM's serve flags: those of the box with the variant's own over them, as an argv."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.schema import Variant

OF_THE_PLAN = ("model", "served-model-name", "host", "port", "speculative-config")


def of(variant: Variant, box_serve: Mapping[str, Any]) -> dict[str, Any]:
    """Flag -> value, without the dashes; of a mapping, the variant's keys win one by one.

    Raises UsageError for a flag that the plan sets, or a value that is a list.
    """
    serve = {**box_serve, **variant.serve}
    for name in box_serve.keys() & variant.serve.keys():
        if isinstance(box_serve[name], Mapping) and isinstance(variant.serve[name], Mapping):
            serve[name] = {**box_serve[name], **variant.serve[name]}
    for name, value in serve.items():
        if not isinstance(value, str | int | float | bool | Mapping):
            raise UsageError(f"variant.serve (variant {variant.name}): {name}={value!r} is not a plain value")
        if name in OF_THE_PLAN:
            raise UsageError(f"variant.serve (variant {variant.name}): {name} is the plan's to set; remove it")
    return serve


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
