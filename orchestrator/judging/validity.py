"""Whether recorded boots may be judged at all: a pure check of what they are, not of what they measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from orchestrator.judging import arms
from orchestrator.judging.gate import BootResult, Gate
from orchestrator.labels import is_count
from orchestrator.records import Measurement


def faults(gate: Gate, results: Sequence[BootResult]) -> list[str]:
    """Why nothing may be concluded, each line beginning with the field; empty where something may."""
    if not results:
        return ["boots: none is recorded"]
    found = _boot_faults(results)
    found += _proof_faults(results)
    found += _number_faults(results)
    found += _stack_faults(results)
    found += arms.faults(gate, results)
    for result in results:
        found += [
            f"{m.bench}.status: {m.reason or 'invalid'} (boot {result.run_id}, arm {result.arm})"
            for m in result.measurements.values()
            if m.status != "ok"
        ]
    return found + _bench_faults(results)


def _boot_faults(results: Sequence[BootResult]) -> list[str]:
    found = []
    for result in results:
        boot, who = result.boot, f"(boot {result.run_id}, arm {result.arm})"
        if boot.status != "ok":
            found.append(f"boot.status: {'; '.join(boot.reasons) or 'invalid'} {who}")
        if boot.cache_state != "warm":
            found.append(f"boot.cache_state: {boot.cache_state}; only warm boots are measured {who}")
        if boot.purpose != "measured":
            found.append(f"boot.purpose: a {boot.purpose} boot is no sample {who}")
        if boot.compiled_files:
            found.append(f"boot.compiled_files: {boot.compiled_files} graphs were compiled while it was measured {who}")
        if not result.measurements:
            found.append(f"measurements: none was made {who}")
    places = Counter((result.block, result.position) for result in results)
    found += [f"position: {n} boots are at position {p} of block {b}" for (b, p), n in places.items() if n > 1]
    lives = Counter(result.boot.nonce for result in results)
    found += [f"boot.nonce: boot {nonce} is there {n} times" for nonce, n in lives.items() if n > 1]
    return found


def _proof_faults(results: Sequence[BootResult]) -> list[str]:
    """What shows that a record is of the server that its plan declares."""
    found = []
    for result in results:
        boot, who = result.boot, f"(boot {result.run_id}, arm {result.arm})"
        if boot.status != "ok":
            continue  # said already; what did not come up proves nothing
        if not boot.attestations:
            found.append(f"attestation: the boot has none, so nothing proves what was served {who}")
        elif others := {said.get("nonce") for said in boot.attestations} - {boot.nonce}:
            found.append(f"attestation.nonce: {', '.join(map(str, others))} is not the boot's own {boot.nonce} {who}")
        if not _is_time(boot.started_at_utc):
            found.append(f"boot.started_at_utc: {boot.started_at_utc!r} is no time with its zone {who}")
        if boot.plan_fingerprint != result.plan.get("fingerprint"):
            found.append(f"boot.plan_fingerprint: {boot.plan_fingerprint} is not the plan's own {who}")
    runs = Counter(result.run_id for result in results)
    return found + [f"run_id: {run_id} is there {n} times" for run_id, n in runs.items() if n > 1]


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _number_faults(results: Sequence[BootResult]) -> list[str]:
    """Numbers that are none, and items that are there twice."""
    found = []
    for result in results:
        who = f"(boot {result.run_id}, arm {result.arm})"
        for measurement in result.measurements.values():
            for name, value in measurement.metrics.items():
                if not math.isfinite(value) or (is_count(name) and value < 0):
                    found.append(f"{name}: {value} is no number that a bench gives {who}")
            twice = [name for name, n in Counter(_item_names(measurement)).items() if n > 1]
            found += [f"{measurement.bench}.samples: {name} is there twice {who}" for name in twice[:1]]
    return found


def _item_names(measurement: Measurement) -> list[str]:
    """What each item is paired by, of the benches that have any."""
    keys = ("corpus", "document") if measurement.bench == "kld" else ("id",)
    return [
        "/".join(str(sample[key]) for key in keys)
        for sample in measurement.samples
        if all(key in sample for key in keys)
    ]


def _stack_faults(results: Sequence[BootResult]) -> list[str]:
    found = []
    for field, values in (
        ("stack.fingerprint", {(r.plan.get("stack") or {}).get("fingerprint") for r in results}),
        ("box", {r.plan.get("box") for r in results}),
    ):
        if None in values or "" in values:
            found.append(f"{field}: a boot's plan does not say it")
        elif len(values) > 1:
            found.append(f"{field}: the boots are of {len(values)} of them ({', '.join(sorted(values))})")
    for result in results:
        stack = (result.plan.get("stack") or {}).get("fingerprint")
        for measurement in result.measurements.values():
            if measurement.bench != "kld":
                continue
            of = measurement.config.get("reference_stack")
            if of != stack:
                found.append(
                    f"reference_stack: the KL reference is of stack {of}, the server of {stack} "
                    f"(boot {result.run_id}, arm {result.arm})"
                )
    return found


def _bench_faults(results: Sequence[BootResult]) -> list[str]:
    """The same bench, parameters and bytes on every boot of a block, and the same parameters over all of them."""
    found = []
    for bench in dict.fromkeys(name for result in results for name in result.measurements):
        having = [result for result in results if bench in result.measurements]
        first = having[0].measurements[bench]
        for result in having[1:]:
            found += _unequal(first, result.measurements[bench], f"boots {having[0].run_id} and {result.run_id}")
        blocks = {result.block for result in having}
        found += [
            f"{bench}: not measured on boot {result.run_id} of arm {result.arm}, but on others of its block"
            for result in results
            if result.block in blocks and bench not in result.measurements
        ]
    return list(dict.fromkeys(found))


def _unequal(first: Measurement, other: Measurement, who: str) -> list[str]:
    """Names of parameters and texts that two measurements of one bench do not share."""
    found = []
    for what, left, right in (("config", first.config, other.config), ("corpora", first.corpora, other.corpora)):
        found += [
            f"{first.bench}.{what}.{key}: {left.get(key)!r} and {right.get(key)!r} on {who}"
            for key in {**left, **right}
            if left.get(key) != right.get(key) and key != "reference_stack"
        ]
    return found
