"""Whether recorded boots may be judged at all: a pure check of what they are, not of what they measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator import arms
from orchestrator.gate import BootResult, Gate
from orchestrator.records import Measurement


def faults(gate: Gate, results: Sequence[BootResult]) -> list[str]:
    """Why nothing may be concluded, each line beginning with the field; empty where something may."""
    if not results:
        return ["boots: none is recorded"]
    found = _boot_faults(results)
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
