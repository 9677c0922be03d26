"""What metrics are called for people: the words, the unit and the place in a metric's name, and numbers as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.records import Boot, Measurement

TITLES = {
    "decode_ctx": "Decode",
    "prefill": "Prefill",
    "betterbench": "BetterBench-style",
    "betterbench_cli": "BetterBench",
    "acceptance": "Acceptance",
    "greedy": "Greedy outputs",
    "battery": "Battery",
    "word_problems": "Word problems",
    "gsm8k": "GSM8K",
    "kld": "KL divergence",
}
BENCHES = ("decode_ctx", "prefill", "betterbench", "greedy", "battery", "gsm8k", "kld")  # of every shipped suite
PLACES = {"ctx": "Context tokens", "len": "Prompt tokens", "conc": "Concurrency"}
WORDS = {  # `<what>` of a metric's name -> (words, unit)
    "ms_per_step": ("Time per step", "ms/step"),
    "tok_per_s": ("Decode", "tok/s"),
    "ttft_ms": ("TTFT", "ms"),
    "ttft_ms.p50": ("TTFT p50", "ms"),
    "ttft_ms.p99": ("TTFT p99", "ms"),
    "itl_ms.p50": ("ITL p50", "ms"),
    "itl_ms.p99": ("ITL p99", "ms"),
    "update_ms.p50": ("Update p50", "ms"),
    "update_ms.p99": ("Update p99", "ms"),
    "low1_tok_per_s": ("1% low", "tok/s"),
    "longest_gap_ms": ("Longest gap", "ms"),
    "client_lag_ms.p99": ("Client lag p99", "ms"),
    "acceptance_length": ("Acceptance length", "tok/step"),
    "accepted_share": ("Accepted drafts", "%"),
    "tokens_per_step": ("Tokens per step", "tok/step"),
    **{f"accepted_share.pos{position}": (f"Accepted at {position}", "%") for position in range(16)},
    "repeated_8gram_share": ("Repeated 8-grams", "%"),
    "prompt_tok_per_s": ("Prefill", "tok/s"),
    "prompt_tok_per_s.best": ("Prefill, best", "tok/s"),
    "aggregate_tok_per_s": ("Aggregate", "tok/s"),
    "achieved_concurrency": ("Achieved concurrency", ""),
    "offered_share": ("Offered load", "%"),
    "cell_tok_per_s": ("Decode", "tok/s"),
    "cell_ttft_ms": ("TTFT p50", "ms"),
    "combined_tok_per_s": ("Combined", "tok/s"),
    "decode_tok_per_s": ("Decode", "tok/s"),
    "accuracy_flexible": ("Accuracy, flexible", "%"),
    "accuracy_strict": ("Accuracy, strict", "%"),
    "mean_nats": ("Mean KL", "nats"),
    "median_nats": ("Median KL", "nats"),
    "p95_nats": ("KL p95", "nats"),
    "p99_nats": ("KL p99", "nats"),
    "max_nats": ("KL max", "nats"),
    "delta_p_rms": ("RMS delta-p", "%"),
    "delta_p_mean": ("Mean delta-p", "%"),
    "floor_nats": ("Floor", "nats"),
    "top1_agreement": ("Top-1 agreement", "%"),
    "coverage": ("Reference mass covered", "%"),
    "positions": ("Positions", ""),
    "tokens": ("Completion tokens", ""),
    "prompts": ("Prompts", ""),
    "self_agreement": ("Outputs reproduced", "%"),
    "cold_warm_agreement": ("Cold and warm prefix agree", "%"),
    "warm_agreement": ("Warm passes agree", "%"),
    "first_difference_tokens": ("First difference at token", ""),
    "requests": ("Requests", ""),
    "stopped": ("Stopped by itself", ""),
    "runaway": ("Runaway", ""),
    "empty": ("Empty", ""),
    "attractor": ("Repetition attractor", ""),
    "needles": ("Needles", ""),
    "retrieval": ("Needles found", "%"),
    "retrieval_miss": ("Needles missed", ""),
    "errors": ("Errors", ""),
    "skipped": ("Skipped", ""),
    "truncated": ("Truncated", ""),
    "short_outputs": ("Short outputs", ""),
}
COUNTS = ("errors", "truncated", "short_outputs", "skipped")
_ON_A_CURVE = re.compile(r"^(?P<name>\w+\..+)\.(?P<place>ctx|len|conc|pos)(?P<at>\d+)$")
_PLACED = re.compile(r"^(?P<bench>\w+)\.(?P<what>.+)\.(?P<place>ctx|len|conc)(?P<at>\d+)$")


@dataclass(frozen=True)
class Pivot:
    """Metrics at places of one kind as a table: `heads` names the columns after the first; None is a missing value."""

    place: str
    heads: tuple[str, ...]
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]


def bench_name(bench: str, params: Mapping[str, Any]) -> str:
    """What a suite's bench with these parameters is called before it has a Measurement."""
    return "word_problems" if bench == "gsm8k" and params.get("source", "own") == "own" else bench


def bench_key(measurement: Measurement) -> str:
    """The key of TITLES: own word problems are never called GSM8K, also where they have no result."""
    own = measurement.config.get("source") == "own" or any(n.startswith("word_problems.") for n in measurement.metrics)
    return "word_problems" if measurement.bench == "gsm8k" and own else measurement.bench


def title(measurement: Measurement) -> str:
    return TITLES.get(bench_key(measurement), measurement.bench)


def words(what: str) -> tuple[str, str]:
    """(words, unit) of a metric; an unknown one keeps its name."""
    return WORDS.get(what, (what.replace("_", " "), ""))


def unit_of(metric: str) -> str:
    """The unit of a whole metric's name, whatever place or corpus it is of; empty where it has none that is known."""
    parts = metric.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if (known := WORDS.get(".".join(parts[:end]))) is not None:
            return known[1]
    return {"ready_s": "s", "kv_tokens": "tokens", "other_cpu_share": "%"}.get(parts[0] if parts else "", "")


def by_number(name: str) -> tuple[Any, ...]:
    """A key that sorts ctx512 before ctx2048."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def head(what: str) -> str:
    text, unit = words(what)
    return f"{text} ({unit})" if unit else text


def series(metrics: Mapping[str, float], name: str, place: str) -> list[tuple[int, float]]:
    """The (place, value) pairs of `name`, ascending: series(m, "decode.ms_per_step", "ctx")."""
    pattern = re.compile(rf"^{re.escape(name)}\.{place}(\d+)$")
    return sorted((int(found[1]), value) for key, value in metrics.items() if (found := pattern.match(key)))


def by_name(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The values of `name.<one word>`, in the order of the metrics: by_name(m, "kl.mean_nats")."""
    start = f"{name}."
    return {
        key[len(start) :]: v for key, v in metrics.items() if key.startswith(start) and "." not in key[len(start) :]
    }


def pivot(metrics: Mapping[str, float], place: str) -> Pivot | None:
    """Every metric at the places of one kind ("ctx", "len", "conc"); None where there is none."""
    cells: dict[tuple[int, str], float] = {}
    for name, value in metrics.items():
        if (found := _PLACED.match(name)) and found["place"] == place:
            cells[int(found["at"]), found["what"]] = value
    if not cells:
        return None
    order = {what: n for n, what in enumerate(WORDS)}
    whats = sorted({what for _, what in cells}, key=lambda what: (order.get(what, len(order)), what))
    rows = tuple((at, tuple(cells.get((at, what)) for what in whats)) for at in sorted({at for at, _ in cells}))
    return Pivot(PLACES[place], tuple(whats), rows)


def curves(metrics: Mapping[str, float]) -> dict[str, list[tuple[int, float]]]:
    """Metrics at numbered places as curves: `decode.ms_per_step.ctx512` is in "decode.ms_per_step.by_ctx" at 512.

    Places are tokens of context (ctx) or prompt (len), requests at once (conc), drafted positions (pos). What has one
    place only is no curve.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for key, value in metrics.items():
        if place := _ON_A_CURVE.match(key):
            found.setdefault(f"{place['name']}.by_{place['place']}", []).append((int(place["at"]), value))
    return {name: sorted(points) for name, points in found.items() if len(points) > 1}


def text(value: float | None, unit: str = "") -> str:
    """A number for people: about four digits, thousands apart; shares become percent; None is "missing"."""
    if value is None:
        return "missing"
    if not math.isfinite(value):
        return str(value)
    if unit == "%":
        return f"{100 * value:.1f}"
    size = abs(value)
    if size >= 1000 or (value == int(value) and not unit):
        return f"{value:,.0f}"
    if size < 1:
        return f"{value:.3g}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}"


def is_count(name: str) -> bool:
    """Whether a metric counts requests that gave no number or half of one."""
    return name.rsplit(".", 1)[-1] in COUNTS


def counted(number: int, noun: str) -> str:
    """A number of things: "1 boot", "2 boots"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def counts(measurement: Measurement) -> list[str]:
    """Errors, truncations and the like that are not zero, as words."""
    found = []
    for kind in COUNTS:
        number = sum(value for name, value in measurement.metrics.items() if name.endswith(f".{kind}"))
        if number:
            found.append(f"{number:.0f} {words(kind)[0].lower()}")
    return found


def faults(measurements: Iterable[Measurement], boots: Sequence[Boot]) -> list[str]:
    """Why the numbers may not be used; empty where they may."""
    found = [
        f"boot {boot.nonce}: {reason}"
        for boot in boots
        if boot.status != "ok"
        for reason in boot.reasons or ("invalid",)
    ]
    return found + [f"{title(m)}: {m.reason or 'invalid'}" for m in measurements if m.status != "ok"]
