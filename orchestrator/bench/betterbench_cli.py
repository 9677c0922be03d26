"""betterbench_cli: runs an installed `betterbench` against the server and keeps its results.json as it is.

The figures are BetterBench's own and are computed from its file by its published definitions: a category's figure is
the median of its passes' `decode_tps`, the combined one their mean with the file's weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.bench.context import BenchContext, Clock, Rates, conclude
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.records import Measurement, Target, to_jsonable

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")  # of this process' environment


@dataclass(frozen=True)
class Params:
    executable: str = "betterbench"
    arguments: tuple[str, ...] = ()  # further ones of `betterbench run`, as in [--quick, --greedy]
    timeout_s: float = 7200.0
    max_error_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.executable.strip() or self.timeout_s <= 0:
            raise ValueError("executable must be given, timeout_s > 0")
        for taken in ("--endpoint", "--model", "--out"):
            if any(word.partition("=")[0] == taken for word in self.arguments):
                raise ValueError(f"arguments: {taken} is the bench's own; leave it out")


def expected_s(params: Params, rates: Rates) -> float:
    """Of BetterBench's defaults: 23 passes in 8 categories and 5 levels of 48 requests, about 300 tokens each."""
    single, levels = (3, 24) if "--quick" in params.arguments else (23, 48)
    tokens = 300.0
    return min(
        params.timeout_s,
        8 * single * tokens / rates.decode_tok_per_s
        + levels * tokens * (1 / rates.decode_tok_per_s + 4 / rates.batch_tok_per_s),
    )


def require(params: Params, context: BenchContext) -> None:
    """Raises UsageError where the executable is not there."""
    _executable(params)


async def measure(target: Target, params: Params, context: BenchContext) -> Measurement:
    clock = Clock.start()
    context.advance(0, 1, "betterbench")
    with tempfile.TemporaryDirectory(prefix="betterbench-") as directory:
        out = Path(directory) / "results.json"
        argv = [
            *(_executable(params), "run", "--endpoint", f"{target.base_url}/v1", "--model", target.model),
            *("--out", str(out), *params.arguments),
        ]
        # Its prefill prompts are the same on every call unless this differs: they would come from the prefix cache.
        seed = str(context.seed_for("betterbench_cli", target.model))
        said = await _run(argv, {"BETTERBENCH_HOME": directory, "BETTERBENCH_PREFILL_SEED": seed}, params.timeout_s)
        content = _read(out, said)
    context.advance(1, 1, "betterbench")
    found = _parsed(content, said)
    errors, requests = _errors(found)
    metrics = {"betterbench_cli.errors": float(errors)}
    reason = f"{errors} of {requests} requests failed" if errors > params.max_error_share * requests else ""
    reason = reason or ("" if requests else "its file has no request")
    if not reason:
        metrics |= metrics_of(found)
        reason = "" if "betterbench_cli.combined_tok_per_s" in metrics else "its file has no weighted category"
    return conclude(
        bench="betterbench_cli",
        clock=clock,
        config={**to_jsonable(params), "version": str(found.get("betterbench_version", "")), "argv": argv[1:]},
        metrics=metrics,
        samples=[{"output_tail": said[-4000:]}],
        reason=reason,
        corpora={"betterbench": str(found.get("env", {}).get("corpus_hash", ""))},
        files={"results.json": content},
    )


def metrics_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a results.json."""
    metrics: dict[str, float] = {}
    medians: dict[str, float] = {}
    for category, records in found.get("single_stream", {}).items():
        if rates := [record["decode_tps"] for record in records if record.get("ok") and record.get("decode_tps")]:
            medians[category] = statistics.median(rates)
            metrics[f"betterbench_cli.decode_tok_per_s.{category}"] = medians[category]
    weights = {name: weight for name, weight in found.get("config", {}).get("weights", {}).items() if name in medians}
    if total := sum(weights.values()):
        weighted = sum(weight * medians[name] for name, weight in weights.items())
        metrics["betterbench_cli.combined_tok_per_s"] = weighted / total
    for level in found.get("concurrency", ()):
        at = f"conc{level['level']}"
        metrics[f"betterbench_cli.aggregate_tok_per_s.{at}"] = float(level["aggregate_tps"])
        if level.get("ttft_ms"):
            metrics[f"betterbench_cli.ttft_ms.p50.{at}"] = statistics.median(level["ttft_ms"])
    for row in found.get("prefill", ()):
        if row.get("pp_tps"):
            metrics[f"betterbench_cli.prompt_tok_per_s.len{row['target_depth']}"] = statistics.median(row["pp_tps"])
    return metrics


def _errors(found: Mapping[str, Any]) -> tuple[int, int]:
    """(failed requests, requests) of streams and levels."""
    records = [record for group in found.get("single_stream", {}).values() for record in group]
    levels = found.get("concurrency", ())
    failed = sum(not record.get("ok") for record in records) + sum(one["requests"] - one["ok"] for one in levels)
    return failed, len(records) + sum(one["requests"] for one in levels)


def _executable(params: Params) -> str:
    path = shutil.which(params.executable)
    if path is None:
        raise UsageError(
            f"benches.betterbench_cli.executable: {params.executable} is not installed here; install BetterBench, "
            "set the key to its path, or leave the bench out with ~suite.benches.betterbench_cli"
        )
    return path


async def _run(argv: Sequence[str], extra: Mapping[str, str], timeout_s: float) -> str:
    """What the command wrote. Raises InvalidMeasurement where it fails or takes too long; its group is ended then."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**env, **extra},
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise InvalidMeasurement(f"betterbench did not end in {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    said = output.decode(errors="replace")
    if process.returncode:
        raise InvalidMeasurement(f"betterbench ended with status {process.returncode}: {_last_line(said)}")
    return said


def _read(path: Path, said: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise InvalidMeasurement(f"betterbench wrote no results.json: {_last_line(said)}") from None


def _parsed(content: bytes, said: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("single_stream"), dict):
        raise InvalidMeasurement(f"betterbench's results.json is of another shape: {_last_line(said)}")
    return found


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
