"""Boots of an A/B on records of real plans: what differs between two boots is what a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.judging.gate import BootResult
from orchestrator.records import Boot, Measurement

GOLDEN = Path(__file__).parents[1] / "golden"
WHEN = "2026-09-01T00:00:00+00:00"
ORDERS = ("abba", "baab")


def a_plan(variant: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"cpu-process-{variant}.json").read_text())


def a_measurement(bench: str, metrics: Mapping[str, float], samples: Sequence[Any] = (), **config: Any) -> Measurement:
    return Measurement(bench, "ok", "", metrics, tuple(samples), config, {}, (), WHEN, 1.0)


def attested(plan: Mapping[str, Any], nonce: str) -> dict[str, Any]:
    """What the plugin would attest of this plan, at this boot."""
    knobs = {name: value for name, value in plan["env"].items() if name.startswith("RADIANCE_")}
    return {
        "nonce": nonce,
        "pid": 1000 + len(nonce),
        "plugin_sha256": plan["plugin"]["sha256"],
        "knobs": knobs | {"RADIANCE_BOOT_NONCE": nonce, "RADIANCE_ATTEST_DIR": f"/state/{nonce}"},
        "layers": [{"name": "model.layers.0", "bits": plan["declared"]["weights"]["bits"]}],
    }


@pytest.fixture
def ab() -> Callable[..., list[BootResult]]:
    """Boots of int5 (arm a) against int5_i8 (arm b): `measure(arm, number)` gives each boot's measurements."""

    def make(
        measure: Callable[[str, int], Sequence[Measurement]],
        blocks: int = 2,
        a: str = "int5",
        b: str = "int5_i8",
    ) -> list[BootResult]:
        results = []
        seen = {"a": 0, "b": 0}
        for block in range(blocks):
            for position, arm in enumerate(ORDERS[block % 2]):
                plan = a_plan({"a": a, "b": b}[arm])
                name = f"{arm}{seen[arm]}"
                boot = Boot(
                    name,
                    "measured",
                    plan["fingerprint"],
                    "warm",
                    WHEN,
                    kv_tokens=100_000,
                    compiled_files=0,
                    attestations=(attested(plan, name),),
                )
                found = {m.bench: m for m in measure(arm, seen[arm])}
                results.append(BootResult(arm, block, position, name, plan, boot, found))
                seen[arm] += 1
        return results

    return make


@pytest.fixture
def changed() -> Callable[..., list[BootResult]]:
    """The boots with `change(boot result)` put in place of the one named."""

    def change(results: Sequence[BootResult], name: str, how: Callable[[BootResult], BootResult]) -> list[BootResult]:
        assert name in {result.run_id for result in results}
        return [how(deepcopy(result)) if result.run_id == name else result for result in results]

    return change


def with_boot(**fields: Any) -> Callable[[BootResult], BootResult]:
    return lambda result: replace(result, boot=replace(result.boot, **fields))


def with_measurement(bench: str, **fields: Any) -> Callable[[BootResult], BootResult]:
    def how(result: BootResult) -> BootResult:
        found = replace(result.measurements[bench], **fields)
        return replace(result, measurements={**result.measurements, bench: found})

    return how
