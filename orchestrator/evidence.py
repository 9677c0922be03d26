"""What a server's log and processes prove about a boot: pure functions of text and readings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.plan import ATTEST_VARIABLE, NONCE_VARIABLE, ServePlan
from orchestrator.records import EnvReading

_KV_LINE = re.compile(r"KV cache size: ([\d,]+) tokens")
_NOISE = re.compile(r"^\s*$|^\s*\^+\s*$")
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"operator torchvision::nms does not exist|libc10_cuda|libtorchcodec",
        "torchvision, torchaudio or torchcodec is a CUDA build: pip uninstall them",
    ),
    (r"[Aa]ddress already in use|port .* is already", "the port is taken: stop its owner or set box.port"),
    (r"No space left on device", "the disk is full: free some space, or set paths.cache and paths.state elsewhere"),
    (
        r"[Oo]ut of memory|MemoryError|Cannot allocate memory",
        "memory ran out: lower max-model-len, max-num-seqs or VLLM_CPU_KVCACHE_SPACE",
    ),
    (
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        "the KV cache is too small for max-model-len: raise VLLM_CPU_KVCACHE_SPACE or lower max-model-len",
    ),
    (
        r"No HIP GPUs are available|no ROCm-capable device|hipErrorNoDevice|Unable to open /dev/kfd|No CUDA GPUs",
        "the server sees no GPU: check box.container.devices and groups with `python -m orchestrator doctor`",
    ),
    (
        r"No available shared memory broadcast block|collective operation timeout|NCCL .*(?:timed out|timeout)",
        "a worker hangs, with several GPUs most often in RCCL: set NCCL_PROTO=Simple in box.env",
    ),
    (
        r"Memory access fault by GPU|HIP error|hipErrorIllegalAddress|HSA_STATUS_ERROR",
        "the GPU faulted: look at `dmesg`, and boot once more before you believe a number",
    ),
    (r"Model architectures? .* (?:is|are) not supported", "this vLLM does not know the model's architecture"),
    (r"PluginError: |Value error, .*(?:paroquant|RADIANCE_)", "the plugin refused the model or a knob"),
    (r"unrecognized arguments|invalid choice", "this vLLM does not know a flag of box.serve or variant.serve"),
    (r"Python\.h: No such file|fatal error: Python", "the compiler needs Python's headers: install python3-dev"),
    (r"InvalidCxxCompiler|No working C\+\+ compiler", "torch.compile needs a C++ compiler: install g++"),
)


def kv_tokens(log: str) -> int | None:
    """Tokens that fit in the KV cache, from vLLM's own line."""
    found = _KV_LINE.search(log)
    return int(found.group(1).replace(",", "")) if found else None


def hint(log: str) -> str:
    """The known cause that the log names, or an empty string."""
    return next((text for pattern, text in _HINTS if re.search(pattern, log)), "")


def last_useful_lines(log: str, count: int = 12) -> str:
    """The end of the log without blank and caret lines."""
    lines = [line for line in log.splitlines() if not _NOISE.match(line)]
    return "\n".join(lines[-count:])


def engine_failed(log: str) -> bool:
    """Whether vLLM says that its engine did not start; the server may live on without one."""
    return "EngineCore failed to start" in log


def env_faults(
    plan: ServePlan,
    readings: Sequence[EnvReading],
    attestations: Sequence[Mapping[str, Any]],
    inspected: Mapping[str, str] | None = None,
) -> list[str]:
    """Where planned, given by the container engine, held by each process and attested by the plugin are not one value.

    Each line names the variable and every value; of processes that agree with the plan, only that they do.
    `inspected` is None where there is no container.
    """
    faults = [] if readings else ["the environment of no server process could be read"]
    for name, planned in plan.env.items():
        given = [] if inspected is None else [("the container's inspect says", inspected.get(name))]
        held = [(f"process {r.pid} ({r.role}) has", r.env.get(name)) for r in readings]
        seen = []
        if name.startswith("RADIANCE_"):
            seen = [(f"the plugin in process {a.get('pid')} attests", _knobs(a).get(name)) for a in attestations]
        if any(value != planned for _, value in (*given, *held, *seen)):
            said = [f"{who} {_quoted(value)}" for who, value in given]
            said += _differing(held, planned, "every process has") + _differing(seen, planned, "the plugin attests")
            faults.append(f"{name}: the plan says {planned!r}, {', '.join(said)}")
    extra = sorted(name for name in (inspected or {}) if name.startswith("RADIANCE_") and name not in _known(plan))
    faults += [f"{name}: the image sets it to {inspected[name]!r}, the plan has no such knob" for name in extra]
    for a in attestations:
        more = sorted(name for name in _knobs(a) if name not in _known(plan) and name not in extra)
        faults += [
            f"{name}: the plugin in process {a.get('pid')} attests {_knobs(a)[name]!r}, the plan has no such knob"
            for name in more
        ]
    return faults


def _differing(found: Sequence[tuple[str, str | None]], planned: str, all_agree: str) -> list[str]:
    """Who has another value than the planned one, and which; one line where all agree with it."""
    differing = [f"{who} {_quoted(value)}" for who, value in found if value != planned]
    return differing or ([f"{all_agree} {planned!r}"] if found else [])


def _quoted(value: str | None) -> str:
    return repr("none" if value is None else value)


def _known(plan: ServePlan) -> frozenset[str]:
    return frozenset({*plan.env, NONCE_VARIABLE, ATTEST_VARIABLE})


def attestation_faults(plan: ServePlan, nonce: str, attestations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where what the plugin attests is not what the plan asks for."""
    if not attestations:
        return ["the plugin attested nothing: it was not loaded by the server"]
    faults = []
    planned = plan.plugin.sha256
    for attestation in attestations:
        where = f"the plugin in process {attestation.get('pid')}"
        if attestation.get("nonce") != nonce:
            faults.append(f"{where} attests boot {attestation.get('nonce')!r}, this one is {nonce!r}")
        if attestation.get("plugin_sha256") != planned:
            faults.append(
                f"{where} is build {str(attestation.get('plugin_sha256'))[:12]}, the plan's is {planned[:12]}"
            )
        faults += [
            f"{where} requantized {counts.get('done')} of {counts.get('expected')} {kind} layers"
            for kind, counts in (attestation.get("requantized") or {}).items()
            if counts.get("done") != counts.get("expected")
        ]
    layers = [layer for attestation in attestations for layer in attestation.get("layers", ())]
    if plan.quantized and not layers:
        faults.append("no layer runs on the plugin's path, though the weights are quantized")
    if not plan.quantized and layers:
        faults.append(f"{len(layers)} layers run on the plugin's path, though the weights are not quantized")
    bits = plan.declared["weights"]["bits"]
    faults += [
        f"layer {layer['name']} has {layer['bits']} bits, the plan says {bits}"
        for layer in layers
        if layer["bits"] != bits
    ]
    return faults


def marker_faults(plan: ServePlan, log: str) -> list[str]:
    """Where the log lacks a line that a good boot of this plan writes, or has one that a good boot does not."""
    faults = [
        f"the log does not show that {marker.says}: no line matches {marker.pattern!r}"
        for marker in plan.evidence.required
        if not re.search(marker.pattern, log)
    ]
    for marker in plan.evidence.forbidden:
        if found := re.search(marker.pattern, log):
            start, end = log.rfind("\n", 0, found.start()) + 1, log.find("\n", found.end())
            line = log[start : end if end >= 0 else None].strip()
            faults.append(f"the log shows that {marker.says}: {line[:200]!r}")
    return faults


def _knobs(attestation: Mapping[str, Any]) -> Mapping[str, str]:
    return attestation.get("knobs", {})
