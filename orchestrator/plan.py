"""From what is declared to what is started: a pure function of variant, box, engine, plugin build and stack."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import digest, flags, knobs, places
from orchestrator.checkpoint import Checkpoint
from orchestrator.errors import UsageError
from orchestrator.places import ATTEST, UNRESOLVED, Container, Mount, Places, Resolved
from orchestrator.plugin_build import PACKAGE, PluginBuild
from orchestrator.records import to_jsonable
from orchestrator.schema import NO_MARKERS, Box, Engine, Experiment, Markers, Variant
from orchestrator.stack import Stack

NONCE_VARIABLE = "RADIANCE_BOOT_NONCE"
ATTEST_VARIABLE = "RADIANCE_ATTEST_DIR"
PROD_DRAIN = 0.75  # share of the stop's grace in which prod's requests may finish; the rest is for its own end
KNOB_FAMILIES = ("RADIANCE_PAROQUANT", "RADIANCE_PQ", "RADIANCE_MXFP4_", "RADIANCE_NVFP4_")  # read by the plugin alone
SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")
MASK = "***"  # what stands for the value of a secret

__all__ = ["Container", "Mount", "Resolved", "ServePlan", "as_json", "render", "secrets_of", "with_nonce"]


@dataclass(frozen=True)
class ServePlan:
    """One server, completely: the argv, the whole environment and where its compiled graphs are kept.

    A boot adds only its nonce, as the served model name and in the two variables of `with_nonce`, and the values of
    `secrets`. Prod keeps the plan's own name besides, and finishes its requests when it is stopped.
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
    drafter: Checkpoint | None = None
    secrets: tuple[str, ...] = ()  # names of variables that are taken from the orchestrator's environment at boot
    evidence: Markers = NO_MARKERS  # those of the box that apply to this variant


def render(
    experiment: Experiment,
    checkpoint: Checkpoint,
    plugin: PluginBuild,
    site: Path,
    stack: Stack,
    cache: Path,
    drafter: Checkpoint | None = None,
    resolved: Resolved = UNRESOLVED,
) -> ServePlan:
    """The plan of `experiment`. `site` is the plugin's directory, `cache` the root of all caches.

    Raises UsageError for knobs, serve flags, speculation or secrets that cannot be, and for weights that the box cannot
    serve.
    """
    variant, box, engine = experiment.variant, experiment.box, experiment.engine
    _check_box(variant, box, engine)
    serve = flags.of(variant, box.serve)
    if variant.weights.quantized and "max-num-seqs" not in serve:
        raise UsageError("box.serve.max-num-seqs: it is not set, so the decode band's rows are not known; write it")
    knob_values = knobs.resolve(variant, int(serve.get("max-num-seqs", 1)))
    key = {
        "stack": stack.fingerprint,
        "plugin": plugin.sha256,
        "checkpoint": checkpoint.recipe_id,
        "drafter": drafter.recipe_id if drafter else None,
        "flags": flags.argv(serve) + flags.speculative(variant, "drafter"),
        "knobs": {name: value for name, value in knob_values.items() if knobs.REGISTRY[name].graph},
    }
    cache_dir = cache / "serve" / digest.of_value(key)[:16]
    directories = places.Directories(checkpoint.path, drafter.path if drafter else None, str(site), str(cache_dir))
    at = places.of(box, engine, directories)
    argv = (
        *(at.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", at.model, "--served-model-name", box.model.name),
        *("--host", at.host, "--port", str(box.port)),
        *flags.argv(serve),
        *flags.speculative(variant, at.drafter),
    )
    env = _base_env(at) | {name: str(value) for name, value in box.env.items()} | knob_values
    container = places.container(box, engine, at, directories, resolved)
    plan = ServePlan(
        variant=variant.name,
        box=box.name,
        engine=engine.kind,
        image=container.image if container else f"{engine.kind}:{at.python}",
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
        container=container,
        drafter=drafter,
        secrets=box.env_secret,
        evidence=_markers(box, variant, knob_values),
    )
    return replace(plan, fingerprint=digest.of_value(to_jsonable(plan))[:16])


def drain_s(grace_s: float) -> int:
    """Seconds in which prod's requests may finish when it is stopped with this grace."""
    return int(PROD_DRAIN * grace_s)


def with_nonce(
    plan: ServePlan,
    nonce: str,
    attest_dir: Path,
    secrets: Mapping[str, str] | None = None,
    prod_grace_s: float | None = None,
) -> tuple[tuple[str, ...], dict[str, str], str]:
    """argv and env of one boot of the plan, and the served name that only this boot answers to.

    `attest_dir` is on this machine; a container gets it mounted at places.ATTEST. `secrets`: see `secrets_of`.
    `prod_grace_s`, how long a stop waits, makes it a boot of prod: it answers to the plain name as well, and when it is
    stopped its requests may finish. A measured boot answers to no name that a client of prod could know.
    """
    name = f"{plan.served_model}@{nonce}"
    at = plan.argv.index("--served-model-name") + 1
    names, drain = (name,), ()
    if prod_grace_s is not None:
        names = (plan.served_model, name)
        drain = ("--shutdown-timeout", str(drain_s(prod_grace_s)))
    argv = (*plan.argv[:at], *names, *plan.argv[at + 1 :], *drain)
    seen = ATTEST if plan.container else str(attest_dir)
    return argv, {**plan.env, **(secrets or {}), NONCE_VARIABLE: nonce, ATTEST_VARIABLE: seen}, name


def secrets_of(plan: ServePlan, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of the plan's secrets. Raises UsageError, naming it, for one that is unset or empty."""
    for name in plan.secrets:
        if not environment.get(name):
            raise UsageError(f"box.env_secret: {name} is not set here; export {name}, or take it out of box.env_secret")
    return {name: environment[name] for name in plan.secrets}


def masked(text: str, secrets: Mapping[str, str]) -> str:
    """The text without the values of secrets, which a server may print; the log goes to the terminal and to MLflow."""
    for value in sorted(secrets.values(), key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def as_json(plan: ServePlan) -> str:
    """The plan for `plan --json` and for the record."""
    return json.dumps(to_jsonable(plan), indent=2, sort_keys=True)


def _check_box(variant: Variant, box: Box, engine: Engine) -> None:
    """Raises UsageError for what the box cannot serve, or says twice."""
    if variant.weights.format not in box.formats:
        raise UsageError(
            f"box.formats: box {box.name} cannot serve {variant.weights.format} weights (variant {variant.name}); "
            f"it serves {', '.join(box.formats)}"
        )
    if engine.kind != "process" and box.container is None:
        raise UsageError(f"box.container: box {box.name} has no image; choose engine=process")
    if engine.kind != "process" and engine.python is not None:
        raise UsageError("engine.python: a container's interpreter is box.container.python; set that")
    if engine.kind != "process" and box.container.network == "bridge" and not _is_ipv4(box.host):
        raise UsageError(
            f"box.host: a container's port is published on an address, and {box.host!r} is a name; write the IPv4 "
            "address, as in 127.0.0.1"
        )
    for name, value in box.env.items():
        _check_name("box.env", name)
        if name in knobs.REGISTRY:
            raise UsageError(f"box.env: {name} is a knob; set it with +variant.knobs.{name}=VALUE")
        if name.startswith(KNOB_FAMILIES):
            raise UsageError(f"box.env: there is no knob {name}; {knobs.meant(name)}")
        if any(part.endswith(SECRET_ENDINGS) for part in name.upper().split("_")):
            raise UsageError(f"box.env: {name} looks like a secret; export it and name it in box.env_secret instead")
        if not value.strip() or "\0" in value:
            raise UsageError(f"box.env: {name} is empty; write a value, or remove it")
        if name == "VLLM_PLUGINS" and PACKAGE not in value.split(","):
            raise UsageError(
                f"box.env: VLLM_PLUGINS={value} does not load {PACKAGE}; name it too, with a comma between"
            )
    for n, name in enumerate(box.env_secret):
        _check_name("box.env_secret", name)
        if name in box.env or name in knobs.REGISTRY or name.startswith("RADIANCE_"):
            raise UsageError(f"box.env_secret: {name} is recorded elsewhere in plain; take it out of one of the two")
        if name in box.env_secret[:n]:
            raise UsageError(f"box.env_secret: {name} is there twice; keep one")
        if name == "VLLM_API_KEY":
            raise UsageError("box.env_secret: the benches send no key, so VLLM_API_KEY would shut them out; remove it")


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
        return True
    except ValueError:
        return False


def _check_name(where: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{where}: {name!r} is no name of a variable; correct it")
    if name in OF_THE_PLAN:
        raise UsageError(f"{where}: {name} is the plan's to set; remove it")


def _markers(box: Box, variant: Variant, knob_values: Mapping[str, str]) -> Markers:
    """The box's markers that apply to these weights and knobs. Raises UsageError for a pattern that is none."""

    def chosen(kind: str) -> tuple:
        found = []
        for n, marker in enumerate(getattr(box.evidence, kind)):
            try:
                re.compile(marker.pattern)
            except re.error as error:
                raise UsageError(f"box.evidence.{kind}[{n}].pattern: no regular expression ({error})") from None
            fits = not marker.formats or variant.weights.format in marker.formats
            if fits and all(knob_values.get(name) == value for name, value in marker.knobs.items()):
                found.append(marker)
        return tuple(found)

    return Markers(chosen("required"), chosen("forbidden"))


def _base_env(at: Places) -> dict[str, str]:
    """What any server needs of its surroundings: nothing is inherited from the orchestrator's own environment."""
    return {
        "PATH": at.path,
        "HOME": f"{at.cache}/home",
        "LANG": "C.UTF-8",
        "PYTHONPATH": at.plugin,
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": PACKAGE,
        "VLLM_CACHE_ROOT": f"{at.cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{at.cache}/inductor",
        "TRITON_CACHE_DIR": f"{at.cache}/triton",
        "AITER_ROOT_DIR": f"{at.cache}/aiter",
        "SPT_NOENV": "1",  # setproctitle would otherwise overwrite the environment that the proof reads
    }


OF_THE_PLAN = frozenset({NONCE_VARIABLE, ATTEST_VARIABLE, *_base_env(Places(*[""] * 7))} - {"VLLM_PLUGINS"})
