"""What is expected of a server before it is measured: its limits, and how long the suite will take on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator import bench, flags, labels
from orchestrator.bench import rates
from orchestrator.bench.context import BenchContext, Rates
from orchestrator.checkpoint import vocabulary
from orchestrator.corpora import Corpora
from orchestrator.errors import InvalidMeasurement
from orchestrator.inputs import Inputs
from orchestrator.progress import Progress, span
from orchestrator.records import Target, to_jsonable
from orchestrator.schema import Suite

VLLM_MAX_LOGPROBS = 20  # what vLLM allows where the flag is not given


def known(inputs: Inputs) -> BenchContext:
    """What the benches may know of the server without asking it."""
    experiment = inputs.experiment
    serve = flags.of(experiment.variant, experiment.box.serve)
    return BenchContext(
        experiment.suite.seed,
        Corpora(inputs.cache),
        window_tokens=serve.get("max-model-len"),
        max_logprobs=serve.get("max-logprobs", VLLM_MAX_LOGPROBS),
        batched_tokens=serve.get("max-num-batched-tokens"),
        vocabulary=vocabulary(Path(inputs.checkpoint(experiment.variant.weights).path)),
        sampled_drafts=experiment.box.sampled_drafts or experiment.variant.speculation.method == "none",
        kv_capped="gpu-memory-utilization" not in serve or "kv-cache-memory-bytes" in serve,
    )


def announced(
    suite: Suite, title: str, target: Target, context: BenchContext, progress: Progress, log: Any
) -> dict[str, float]:
    """Bench -> seconds it will take on this server, as a few requests show; said before the first one starts.

    `log` (tracking.RunLog) gets them and the rates as `expected_s.json`.
    """
    with progress.stage(f"time a few requests to {title}"):
        try:
            found = bench.run(rates.probe(target, suite.benches, context))
        except InvalidMeasurement as error:  # the benches will meet it too; here only the estimate suffers
            progress.note(f"{error}; expected times are those of a small CPU box")
            found = Rates()
    expected_s = rates.expected(suite.benches, found)
    parts = ", ".join(
        f"{labels.bench_name(name, suite.benches[name])} {span(seconds)}" for name, seconds in expected_s.items()
    )
    progress.note(f"suite {suite.name}: about {span(sum(expected_s.values()))} of measuring ({parts})")
    log.log_json("expected_s.json", {"rates": to_jsonable(found), "expected_s": expected_s})
    return expected_s
