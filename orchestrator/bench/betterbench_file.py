"""What betterbench and prefill measured, as a results.json that BetterBench's own `report` and `compare` read.

The shape is BetterBench's results schema 2. What its fields mean there holds here with one difference: `decode_tps`
counts the tokens after the first update, whose time it is; with one token an update that is BetterBench's figure too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from orchestrator import __version__
from orchestrator.bench.betterbench import WEIGHTS
from orchestrator.records import Measurement

SCHEMA = 2


def results(betterbench: Measurement, prefill: Measurement | None, model: str) -> dict[str, Any]:
    """The file's content, from the stored samples alone."""
    config = betterbench.config
    requests = [sample for sample in betterbench.samples if "update_ms" in sample]
    levels = config["concurrency"]
    return {
        "schema": SCHEMA,
        "betterbench_version": f"none: written by paro-orchestrator {__version__}",
        "corpus_version": f"paro-orchestrator {betterbench.corpora.get('prompts', '')[:12]}",
        "config": {
            "temperature": config["temperature"],
            "greedy": config["temperature"] == 0,
            "warmup": 0,
            "runs_per_category": config["prompts_per_category"],
            "unique_nonce": True,
            "run_concurrency": True,
            "concurrency_levels": list(levels),
            "concurrency_requests": sum(sample["concurrency"] == levels[0] for sample in requests),
            "weights": dict(WEIGHTS),
        },
        "env": {
            "timestamp": betterbench.started_at_utc,
            "model": model,
            "notes": {"written_by": f"paro-orchestrator {__version__}", "status": betterbench.status},
        },
        "single_stream": _single_stream([sample for sample in requests if sample["concurrency"] == 1]),
        "prefill": _prefill(prefill) if prefill else [],
        "concurrency": [_level(level, [s for s in requests if s["concurrency"] == level]) for level in levels],
    }


def record(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One request. Times in ms, rates in tok/s; None where it failed or has no such figure."""
    ok = not sample["error"]
    at_ms, tokens = sample["update_ms"], sample["update_tokens"]
    gaps = [round(later - earlier, 4) for earlier, later in pairwise(at_ms)]
    batched = any(count > 1 for count in tokens)
    span_ms = at_ms[-1] - at_ms[0] if at_ms else 0.0
    completion_tokens = sample["completion_tokens"]
    return {
        "ok": ok,
        "category": sample.get("category", "prefill"),
        "prompt_id": sample.get("prompt_id", ""),
        "ttft_ms": at_ms[0] if ok else None,
        "update_gaps_ms": gaps if ok else [],
        "itl_ms": gaps if ok and not batched else [],
        "decode_tps": 1e3 * sum(tokens[1:]) / span_ms if ok and span_ms > 0 else None,
        "total_tps": 1e3 * completion_tokens / sample["end_ms"] if ok else None,
        "pp_tps": 1e3 * sample["prompt_tokens"] / at_ms[0] if ok and at_ms[0] > 0 else None,
        "prompt_tokens": sample["prompt_tokens"],
        "completion_tokens": completion_tokens,
        "n_chunks": len(at_ms),
        "tokens_per_update": completion_tokens / len(at_ms) if at_ms else None,
        "chunk_token_mismatch": batched,
        "finish_reason": sample["finish_reason"] or None,
        "wall_ms": sample["end_ms"],
        "error": sample["error"] or None,
    }


def _single_stream(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        found.setdefault(sample["category"], []).append(record(sample))
    return found


def _level(level: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    records = [record(sample) for sample in samples]
    good = [one for one in records if one["ok"]]
    first_ns = min((sample["sent_ns"] for sample in samples), default=0)
    last_ns = max((sample["sent_ns"] + 1e6 * sample["end_ms"] for sample in samples), default=0)
    wall_s = (last_ns - first_ns) / 1e9
    return {
        "level": level,
        "requests": len(records),
        "ok": len(good),
        "wall_s": wall_s,
        "aggregate_tps": sum(one["completion_tokens"] for one in good) / wall_s if wall_s else 0.0,
        "ttft_ms": [one["ttft_ms"] for one in good],
        "decode_tps": [one["decode_tps"] for one in good if one["decode_tps"]],
        "tokens_per_update": [one["tokens_per_update"] for one in good],
        "batched_runs": sum(one["chunk_token_mismatch"] for one in good),
    }


def _prefill(measurement: Measurement) -> list[dict[str, Any]]:
    rows = []
    for depth in measurement.config["lengths_tokens"]:
        samples = [s for s in measurement.samples if s.get("length_tokens") == depth and "update_ms" in s]
        good = [record(sample) for sample in samples if not sample["warmup"] and not sample["error"]]
        row: dict[str, Any] = {"target_depth": depth}
        if not samples:
            row |= {"skipped": True, "reason": "over the window"}
        rows.append(
            {
                **row,
                "prompt_tokens": [one["prompt_tokens"] for one in good],
                "ttft_ms": [one["ttft_ms"] for one in good],
                "pp_tps": [one["pp_tps"] for one in good if one["pp_tps"]],
                "tokens_per_update": [one["tokens_per_update"] for one in good],
                "batched_runs": 0,
            }
        )
    return rows
