"""From what is declared to what is started: a pure function of variant, box, engine, plugin build and stack."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import digest, knobs
from orchestrator.checkpoint import Checkpoint
from orchestrator.errors import UsageError
from orchestrator.plugin_build import PACKAGE, PluginBuild
from orchestrator.records import to_jsonable
from orchestrator.schema import Experiment, Variant
from orchestrator.stack import Stack

NONCE_VARIABLE = "RADIANCE_BOOT_NONCE"
ATTEST_VARIABLE = "RADIANCE_ATTEST_DIR"


@dataclass(frozen=True)
class Mount:
    """A directory of this machine inside the container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Container:
    """What a container engine is asked for, beside argv and env. `image_id` is what `image` resolved to."""

    image: str
    image_id: str
    mounts: tuple[Mount, ...]
    devices: tuple[str, ...]
    groups: tuple[str, ...]
    ipc: str
    network: str
    shm_size_mib: int
    ulimits: Mapping[str, int]
    cap_add: tuple[str, ...]
    security_opt: tuple[str, ...]
    memory_gib: float | None


@dataclass(frozen=True)
class ServePlan:
    """One server, completely: the argv, the whole environment and where its compiled graphs are kept.

    A boot adds only its nonce: a served model name, and the two variables of `with_nonce`.
    """

    variant: str
    box: str
    engine: str
    image: str
    served_model: str
    host: str
    port: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    checkpoint: Checkpoint
    quantized: bool
    plugin: PluginBuild
    stack: Stack
    cache_dir: str
    fingerprint: str
    declared: Mapping[str, Any]  # the variant as it was declared
    container: Container | None = None  # None: the engine is `process`


def render(
    experiment: Experiment, checkpoint: Checkpoint, plugin: PluginBuild, site: Path, stack: Stack, cache: Path
) -> ServePlan:
    """The plan of `experiment`. `site` is the plugin's directory, `cache` the root of all caches.

    Raises UsageError for knobs, serve flags or speculation that cannot be.
    """
    variant, box, engine = experiment.variant, experiment.box, experiment.engine
    serve = _serve_flags(variant, box.serve)
    knob_values = knobs.resolve(variant, int(serve.get("max-num-seqs", 1)))
    python = engine.python or sys.executable
    flags = _argv_of(serve) + _speculation(variant)
    key = {
        "stack": stack.fingerprint,
        "plugin": plugin.sha256,
        "checkpoint": checkpoint.recipe_id,
        "flags": flags,
        "knobs": {name: value for name, value in knob_values.items() if knobs.REGISTRY[name].graph},
    }
    cache_dir = cache / "serve" / digest.of_value(key)[:16]
    argv = (
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", checkpoint.path, "--served-model-name", box.model.name),
        *("--host", box.host, "--port", str(box.port)),
        *flags,
    )
    env = _base_env(python, site, cache_dir) | {name: str(value) for name, value in box.env.items()} | knob_values
    plan = ServePlan(
        variant=variant.name,
        box=box.name,
        engine=engine.kind,
        image=f"{engine.kind}:{python}",
        served_model=box.model.name,
        host=box.host,
        port=box.port,
        argv=argv,
        env=dict(sorted(env.items())),
        checkpoint=checkpoint,
        quantized=variant.weights.quantized,
        plugin=plugin,
        stack=stack,
        cache_dir=str(cache_dir),
        fingerprint="",
        declared=to_jsonable(variant),
    )
    return replace(plan, fingerprint=digest.of_value(to_jsonable(plan))[:16])


def with_nonce(plan: ServePlan, nonce: str, attest_dir: Path) -> tuple[tuple[str, ...], dict[str, str], str]:
    """argv and env of one boot of the plan, and the served name that only this boot answers to."""
    name = f"{plan.served_model}@{nonce}"
    at = plan.argv.index("--served-model-name") + 2
    argv = (*plan.argv[:at], name, *plan.argv[at:])
    return argv, {**plan.env, NONCE_VARIABLE: nonce, ATTEST_VARIABLE: str(attest_dir)}, name


def as_json(plan: ServePlan) -> str:
    """The plan for `plan --json` and for the record."""
    return json.dumps(to_jsonable(plan), indent=2, sort_keys=True)


def as_text(plan: ServePlan) -> str:
    """The plan for a person: what is served and where, the environment, and a command line that can be pasted."""
    lines = [
        f"variant      {plan.variant} on box {plan.box}, engine {plan.engine}",
        f"checkpoint   {plan.checkpoint.path}",
        f"cache        {plan.cache_dir}",
        f"plugin       {plan.plugin.version} {plan.plugin.sha256[:16]}",
        f"stack        {plan.stack.fingerprint}",
        f"fingerprint  {plan.fingerprint}",
        "",
        "env -i \\",
        *(f"  {name}={shlex.quote(value)} \\" for name, value in plan.env.items()),
        f"  {shlex.join(plan.argv)}",
    ]
    return "\n".join(lines)


def _base_env(python: str, site: Path, cache_dir: Path) -> dict[str, str]:
    """What any server needs of its surroundings: nothing is inherited from the orchestrator's own environment."""
    return {
        "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(cache_dir / "home"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(site),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": PACKAGE,
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "TRITON_CACHE_DIR": str(cache_dir / "triton"),
        "SPT_NOENV": "1",  # setproctitle would otherwise overwrite the environment that the proof reads
    }


def _serve_flags(variant: Variant, box_serve: Mapping[str, Any]) -> dict[str, Any]:
    serve = {**box_serve, **variant.serve}
    for name, value in serve.items():
        if not isinstance(value, str | int | float | bool):
            raise UsageError(f"variant.serve (variant {variant.name}): {name}={value!r} is not a plain value")
        if name in ("model", "served-model-name", "host", "port", "speculative-config"):
            raise UsageError(f"variant.serve (variant {variant.name}): {name} is the plan's to set; remove it")
    return serve


def _argv_of(serve: Mapping[str, Any]) -> tuple[str, ...]:
    argv: list[str] = []
    for name, value in sorted(serve.items()):
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", str(value)]
    return tuple(argv)


def _speculation(variant: Variant) -> tuple[str, ...]:
    speculation = variant.speculation
    if speculation.method == "none":
        if speculation.tokens or speculation.drafter:
            raise UsageError(
                f"variant.speculation (variant {variant.name}): tokens or a drafter without a method; set method"
            )
        return ()
    if speculation.tokens < 1:
        raise UsageError(f"variant.speculation.tokens (variant {variant.name}): {speculation.method} needs at least 1")
    config: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
    if speculation.drafter:
        config["model"] = speculation.drafter
    return ("--speculative-config", json.dumps(config, sort_keys=True))
