"""Whether two arms differ, where they may, and nowhere else: pure functions of recorded plans and attestations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.judging.gate import BootResult, Gate
from orchestrator.plan import ATTEST_VARIABLE, NONCE_VARIABLE
from orchestrator.plan_text import fields

DERIVED = ("fingerprint", "variant", "cache_dir")  # these follow from the rest
EACH_PROCESS = ("nonce", "pid", "check")  # of an attestation; check has measured errors
SHOWN = 6


def faults(gate: Gate, results: Sequence[BootResult]) -> list[str]:
    """Why the arms may not be compared, a line for each field; empty where they may."""
    found = []
    plans = {}
    for arm in ("a", "b"):
        boots = [result for result in results if result.arm == arm]
        if not boots:
            return [f"arm {arm}: no boot of it is recorded"]
        plans[arm] = flat(boots[0].plan)
        for boot in boots[1:]:
            differing = differences(plans[arm], flat(boot.plan))
            found += [
                f"{name}: boots {boots[0].run_id} and {boot.run_id} of arm {arm} differ in it" for name in differing
            ]
    if found:
        return found
    differing = differences(plans["a"], plans["b"])
    found = [
        f"{name}: {_shown(plans['a'].get(name))} in arm a, {_shown(plans['b'].get(name))} in arm b, "
        + ("an A/A has equal arms" if gate.kind == "aa" else f"gate {gate.name} does not declare that it may differ")
        for name in differing
        if gate.kind == "aa" or not any(_matches(name, allowed) for allowed in gate.allowed_differences)
    ]
    if len(found) > SHOWN:
        found[SHOWN:] = [f"and {len(found) - SHOWN} more fields"]
    if gate.kind == "ab" and not differing:
        found.append("plan: it is the same in both arms; nothing would be compared")
    return found or _attestation_faults(gate, results, differing)


def flat(plan: Mapping[str, Any]) -> dict[str, str]:
    """The plan's fields; where others name the place of checkpoint, drafter, caches or plugin, they name its role."""
    roles = {str(plan["cache_dir"]): "<cache>", str(plan["checkpoint"]["path"]): "<checkpoint>"}
    if plan.get("drafter"):
        roles[str(plan["drafter"]["path"])] = "<drafter>"
    sha256 = plan["plugin"]["sha256"][:16]  # names the directory of the plugin
    shown = {}
    for name, value in fields(plan).items():
        if name not in ("checkpoint path", "drafter path"):
            for path, role in sorted(roles.items(), key=lambda item: -len(item[0])):
                value = value.replace(path, role)
        shown[name] = value if name.startswith("plugin ") else re.sub(rf"/{re.escape(sha256)}\b", "/<plugin>", value)
    return {name: value for name, value in shown.items() if name not in DERIVED}


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return [name for name in [*a, *(name for name in b if name not in a)] if a.get(name) != b.get(name)]


def _matches(name: str, allowed: str) -> bool:
    """`*` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, allowed.split("*"))), name) is not None


def _attestation_faults(gate: Gate, results: Sequence[BootResult], differing: Sequence[str]) -> list[str]:
    """Boots of one arm must attest the same; arms whose plans differ in what the plugin attests, different things."""
    for arm in ("a", "b"):
        first, *others = [result for result in results if result.arm == arm]
        for boot in others:
            if found := _differing_parts(first, boot):
                return [
                    f"attestation: boots {first.run_id} and {boot.run_id} of arm {arm} differ in {', '.join(found)}"
                ]
    attested = [
        name
        for name in differing
        if name.startswith(("env RADIANCE_", "plugin sha256")) or name in ("checkpoint recipe bits", "quantized")
    ]
    a, b = (_attested([r for r in results if r.arm == arm]) for arm in ("a", "b"))
    if attested and a == b:
        said = ", ".join(attested[:SHOWN])
        return [f"attestation: the servers of both arms attest the same, though the plans differ in {said}"]
    if gate.kind == "aa" and a != b:
        return ["attestation: the servers of an A/A attest different things"]
    return []


def _differing_parts(one: BootResult, other: BootResult) -> list[str]:
    """The keys of the attestations in which the processes of two boots differ."""
    parts = [
        {key: {json.dumps(said.get(key), sort_keys=True) for said in _said(result)} for key in _keys(one, other)}
        for result in (one, other)
    ]
    return [key for key in parts[0] if parts[0][key] != parts[1][key]]


def _keys(*results: BootResult) -> list[str]:
    return list(dict.fromkeys(key for result in results for said in _said(result) for key in said))


def _attested(results: Sequence[BootResult]) -> frozenset[str]:
    return frozenset(json.dumps(said, sort_keys=True) for result in results for said in _said(result))


def _said(result: BootResult) -> list[dict[str, Any]]:
    """What the processes of a boot attest, without what is another thing at each boot."""
    found = []
    for attestation in result.boot.attestations:
        said = {key: value for key, value in attestation.items() if key not in EACH_PROCESS}
        knobs = said.get("knobs") or {}
        found.append({**said, "knobs": {k: v for k, v in knobs.items() if k not in (NONCE_VARIABLE, ATTEST_VARIABLE)}})
    return found


def _shown(value: str | None) -> str:
    if value is None:
        return "missing"
    return repr(value if len(value) <= 80 else f"{value[:77]}...")
