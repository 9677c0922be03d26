"""Whether a server on the prod port is the one that was judged: evidence, smoke prompts, and a few of its own numbers.

A canary repeats what the boots behind a verdict measured, at their shortest contexts, with their prompts. It finds a
server that is not the judged one (cold, throttled, another plan), not a difference that a gate would look for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InvalidMeasurement, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.engines import Server
    from orchestrator.judging.gate import BootResult
    from orchestrator.progress import Progress
    from orchestrator.records import Target
    from orchestrator.schema import Suite
    from orchestrator.slot import Slot
    from orchestrator.stats.floor import Floor

FAMILIES = {  # metric without its place -> (bench, the parameter that has the places, how a place is written)
    "decode.ms_per_step": ("decode_ctx", "contexts_tokens", "ctx"),
    "prefill.ttft_ms": ("prefill", "lengths_tokens", "len"),
}
PLACES = 2  # of each family, the shortest
MOST_SLOWER = 0.5  # share by which a boot may be slower at most: above it nothing would be found any more
TAIL = 0.001  # one-sided chance that a boot like the others is slower than the limit, by their spread
LOG_WAIT_S = 10
TRIES = 3  # prod's clients are served meanwhile; a slow server is slow in all of them
SMOKE = {"max_tokens": 32, "contexts_tokens": [], "depths": [], "thinking": "off", "max_error_share": 0.0}


class CheckFailed(OrchestratorError):
    """The candidate serves, and is not what it should be."""

    exit_code = 1


@dataclass(frozen=True)
class Expected:
    """A number of the verdict: the geometric mean of its boots, and the `worst` that one more may show (lower is
    better)."""

    metric: str
    mean: float
    worst: float
    boots: int


@dataclass(frozen=True)
class Canary:
    """What to measure again: benches with their parameters, the seed of their prompts, and what is expected."""

    benches: Mapping[str, Mapping[str, Any]]
    seed: int
    expected: tuple[Expected, ...]


def of_boots(
    suite: Suite, boots: Sequence[BootResult], floors: Mapping[str, Floor], margin: float = 0.05
) -> Canary | None:
    """The canary that repeats the numbers of these boots of one arm; None where they have none that is short.

    `margin` is the share by which one boot more may be slower, where their spread allows no more. What the spread
    allows ends at MOST_SLOWER, which is also allowed where it is not known: a single boot without a floor.
    """
    from orchestrator.judging.comparison import metrics_of

    measured = [metrics_of(boot) for boot in boots]
    benches: dict[str, Mapping[str, Any]] = {}
    expected: list[Expected] = []
    for family, (bench, key, place) in FAMILIES.items():
        params = suite.benches.get(bench)
        common = set.intersection(*(set(metrics) for metrics in measured)) if measured else set()
        prefix = f"{family}.{place}"
        found = sorted(int(name.removeprefix(prefix)) for name in common if name.startswith(prefix))[:PLACES]
        if params is None or not found:
            continue
        benches[bench] = _short(params, {key: found})
        for number in found:
            metric = f"{prefix}{number}"
            values = [metrics[metric] for metrics in measured]
            expected.append(_expected(metric, values, floors.get(metric), margin))
    return Canary(benches, suite.seed, tuple(expected)) if expected else None


def _short(params: Mapping[str, Any], places: Mapping[str, Any]) -> Mapping[str, Any]:
    fewer = {name: min(params[name], most) for name, most in (("repeats", 2), ("runs", 2)) if name in params}
    return {**params, **fewer, **places}


def _expected(metric: str, values: Sequence[float], floor: Floor | None, margin: float) -> Expected:
    """The prediction limit of one more boot, log-normal: Hahn and Meeker, Statistical Intervals (1991), section 4.8."""
    from scipy import stats

    logs = [math.log(value) for value in values]
    mean, count = sum(logs) / len(logs), len(logs)
    spread, dof, most = 0.0, 0.0, math.log1p(MOST_SLOWER)
    if count > 1:
        spread, dof = math.sqrt(sum((log - mean) ** 2 for log in logs) / (count - 1)), float(count - 1)
    if floor is not None and floor.sd_between_log > spread:
        spread, dof = floor.sd_between_log, floor.dof
    reach = min(most, float(stats.t.ppf(1 - TAIL, dof)) * spread * math.sqrt(1 + 1 / count)) if dof else most
    return Expected(metric, math.exp(mean), math.exp(mean + max(math.log1p(margin), reach)), count)


def with_margin(canary: Canary, margin: float) -> Canary:
    """The canary with this margin at least, where the one that it was made with is narrower."""
    return replace(
        canary,
        expected=tuple(replace(one, worst=max(one.worst, one.mean * (1 + margin))) for one in canary.expected),
    )


def check(
    prod: Slot,
    server: Server,
    canary: Canary | None,
    compiled: Mapping[str, int],
    state: Path,
    cache: Path,
    progress: Progress,
) -> tuple[str, ...]:
    """What was proven of the slot's boot, a line each. Raises CheckFailed for what was not.

    `compiled` is what the compile cache had before the boot. Without a canary no number is compared, and the lines say
    so.
    """
    from orchestrator import compile_cache, prod_server, slot
    from orchestrator.probe import served_windows
    from orchestrator.records import Target

    window = served_windows(prod.base_url).get(prod.model)
    if window is None:
        raise CheckFailed(f"identity: {prod.base_url} does not answer for {prod.model}")
    lines = [f"identity: {prod.base_url} answers for {prod.model}"]
    lines.append(_evidence(prod, server, slot.directory(state, prod)))
    target = Target(prod.base_url, prod.model, window)
    with progress.stage(f"smoke prompts to {prod.plan.variant}"):
        lines.append(_smoke(target, cache, canary))
    if canary is None:
        lines.append("canary: none, no verdict has a number for this plan")
    else:
        with progress.stage(f"canary on {prod.plan.variant}") as stage:
            lines += _canary(target, canary, cache, stage.advance)
    if fresh := compile_cache.compiled_since(Path(prod.plan.cache_dir), compiled):
        raise CheckFailed(f"evidence: a warm boot compiled {len(fresh)} files, for example {fresh[0]}")
    if (died := server.exit_reason()) or not prod_server.is_healthy(prod):
        raise CheckFailed(f"health: the server {died or 'no longer answers for its boot'}")
    return tuple(lines)


def _evidence(prod: Slot, server: Server, directory: Path) -> str:
    from orchestrator import engines, evidence
    from orchestrator.boot import inspected
    from orchestrator.records import Boot

    log_path = str(directory / engines.LOG_NAME)
    deadline = time.monotonic() + LOG_WAIT_S
    while evidence.kv_tokens(Path(log_path).read_text(errors="replace")) is None and time.monotonic() < deadline:
        time.sleep(0.1)  # a container's log is followed, and comes a little later than its health
    boot = Boot(prod.nonce, "measured", prod.plan.fingerprint, "warm", prod.since_utc, log_path=log_path)
    found = inspected(prod.plan, boot, server, directory)
    if found.status != "ok":
        raise CheckFailed(f"evidence: {found.reasons[0]}", "\n".join(found.reasons[1:]))
    if found.kv_tokens is None:
        raise CheckFailed(f"evidence: the log has no line with the size of the KV cache; it is {log_path}")
    return (
        f"evidence: {len(found.processes)} processes and {len(found.attestations)} attestations are as planned, "
        f"{found.kv_tokens:,} KV tokens"
    )


def _context(cache: Path, seed: int) -> Any:
    from orchestrator.bench.context import BenchContext
    from orchestrator.corpora import Corpora

    return BenchContext(seed, Corpora(cache))


def _smoke(target: Target, cache: Path, canary: Canary | None) -> str:
    """Every prompt of the battery is answered with something, and not by a loop."""
    from orchestrator import bench

    context = _context(cache, canary.seed if canary else 0)
    found = bench.run(bench.measure_one("battery", target, SMOKE, context))
    if found.status != "ok":
        raise CheckFailed(f"smoke: {found.reason}")
    silent = [str(sample["id"]) for sample in found.samples if not str(sample["output"]).strip()]
    loops = [str(sample["id"]) for sample in found.samples if sample["period"]]
    if silent:
        raise CheckFailed(f"smoke: {len(silent)} of {len(found.samples)} prompts got an empty answer: {silent[0]}")
    if 2 * len(loops) > len(found.samples):
        raise CheckFailed(f"smoke: {len(loops)} of {len(found.samples)} answers repeat themselves: {loops[0]}")
    return f"smoke: {len(found.samples)} prompts answered, {len(loops)} of them by a loop"


def _canary(target: Target, canary: Canary, cache: Path, advance: Any) -> list[str]:
    from orchestrator import bench
    from orchestrator.bench.warm import warm

    context = replace(_context(cache, canary.seed), advance=advance)
    best: dict[str, float] = {}
    reason = ""
    for _ in range(TRIES):
        try:
            bench.run(warm(target, canary.benches, context))
            for name, params in canary.benches.items():
                found = bench.run(bench.measure_one(name, target, params, context))
                reason = found.reason or reason
                best |= {metric: min(value, best.get(metric, value)) for metric, value in found.metrics.items()}
        except InvalidMeasurement as error:
            reason = str(error)
        lines, failed = judged(canary, best, reason)
        if not failed:
            return lines
    hint = "box.canary_margin=1 lets it be twice as slow, as where prod's own clients take their share of the box"
    raise CheckFailed(f"canary: {failed[0]}", "\n".join([*failed[1:], hint]))


def judged(canary: Canary, measured: Mapping[str, float], reason: str = "") -> tuple[list[str], list[str]]:
    """(a line for each number that is as the verdict's, one for each that is not or is missing)."""
    good, bad = [], []
    for wanted in canary.expected:
        value = measured.get(wanted.metric)
        if value is None:
            bad.append(f"{wanted.metric} was not measured in {TRIES} tries: {reason or 'the bench gave no number'}")
            continue
        said = (
            f"{wanted.metric} {value:.4g}, the verdict's {wanted.boots} boots {wanted.mean:.4g}, "
            f"at most {wanted.worst:.4g}"
        )
        (good if value <= wanted.worst else bad).append(said)
    return [f"canary: {said}" for said in good], bad
