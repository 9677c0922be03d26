"""The benches. Each module has `Params`, `expected_s(params, rates)`, `require(params, context)` and
`async measure(target, params, context)`.

Importing this package loads none of them.
"""

from __future__ import annotations

import asyncio
import importlib
import traceback
from collections.abc import Coroutine, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.records import Measurement, Target, from_jsonable, to_jsonable

if TYPE_CHECKING:
    from orchestrator.bench.context import BenchContext, Rates

T = TypeVar("T")

REGISTRY: Mapping[str, str] = {  # bench name in a suite -> module, in the order a suite runs them
    "decode_ctx": "orchestrator.bench.decode_ctx",
    "prefill": "orchestrator.bench.prefill",
    "betterbench": "orchestrator.bench.betterbench",
    "betterbench_cli": "orchestrator.bench.betterbench_cli",
    "acceptance": "orchestrator.bench.acceptance",
    "greedy": "orchestrator.bench.greedy",
    "battery": "orchestrator.bench.battery",
    "gsm8k": "orchestrator.bench.gsm8k",
    "kld": "orchestrator.bench.kld",
}


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on libuv's loop: half the CPU time for each chunk that arrives, so half the wait of the others."""
    import uvloop

    return uvloop.run(work)


def module_of(name: str) -> ModuleType:
    if name not in REGISTRY:
        raise UsageError(f"suite key benches.{name}: no such bench; there are {', '.join(REGISTRY)}")
    return importlib.import_module(REGISTRY[name])


def params_of(name: str, raw_params: Mapping[str, Any]) -> Any:
    """The bench's typed `Params`; raises UsageError that names the key which is wrong."""
    try:
        return from_jsonable(module_of(name).Params, dict(raw_params))
    except ValueError as error:
        refusals = [str(leaf) for leaf in getattr(error.__cause__, "exceptions", ()) if type(leaf) is ValueError]
        raise UsageError(f"suite key benches.{name}: {'; '.join(refusals) or error}") from error


def expected_s(name: str, raw_params: Mapping[str, Any], rates: Rates | None = None) -> float:
    """About how long the bench takes on a server of these rates (default: a small CPU box)."""
    from orchestrator.bench.context import Rates

    return module_of(name).expected_s(params_of(name, raw_params), rates or Rates())


def require_suite(suite_params: Mapping[str, Mapping[str, Any]], context: BenchContext) -> None:
    """Raises UsageError where a bench's parameters are wrong or its corpora lack what it needs; starts nothing."""
    for name, raw_params in suite_params.items():
        params = params_of(name, raw_params)
        if getattr(params, "temperature", 0.0) > 0 and not context.sampled_drafts:
            raise UsageError(
                f"benches.{name}.temperature: {params.temperature:g}; this box's vLLM samples drafted tokens at a "
                "temperature that nobody set (box.sampled_drafts is false), so the outputs would mean nothing; write 0"
            )
        module_of(name).require(params, context)


async def measure_one(name: str, target: Target, raw_params: Mapping[str, Any], context: BenchContext) -> Measurement:
    """Run one bench. Whatever breaks it gives a Measurement of status "invalid" with the reason, never a pass.

    Wrong parameters and missing files raise UsageError: nothing was measured.
    """
    from orchestrator.bench.context import Clock, conclude
    from orchestrator.labels import bench_name

    params = params_of(name, raw_params)
    clock = Clock.start()
    try:
        return await module_of(name).measure(target, params, context)
    except (UsageError, asyncio.CancelledError):
        raise
    except InvalidMeasurement as error:
        reason, notes = str(error), ()
    except Exception as error:  # a defect of a bench must invalidate its numbers, and stay findable
        shown = bench_name(name, raw_params)
        reason, notes = f"{shown} crashed: {type(error).__name__}: {error}", (traceback.format_exc(),)
    return conclude(
        bench=name, clock=clock, config=to_jsonable(params), metrics={}, samples=(), reason=reason, notes=notes
    )
