"""What a person declares: variant, model, box, engine, suite. Plain values, no machine in a variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.judging.gate import Gate

Scalar = str | int | float | bool


@dataclass(frozen=True)
class Weights:
    """How the linear layers' weights are stored."""

    name: str
    format: Literal["bf16", "paroquant-int4", "paroquant-int4-lloyd", "int5-bitplane", "mxfp4-paro", "nvfp4"]
    bits: int

    @property
    def quantized(self) -> bool:
        return self.format != "bf16"


@dataclass(frozen=True)
class Activation:
    """How activations are quantized in front of a quantized linear layer.

    `prefill_scale` holds above the decode band; inside it a scale is always per group.
    `zero_point` is where the asymmetric weights' zero point is corrected.
    """

    name: str
    element: Literal["bf16", "e4m3", "int8"]
    prefill_scale: Literal["token", "group"]
    zero_point: Literal["loop", "epilogue"]


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: `tokens` drafted a step (SPEC) by `method`.

    `drafter` is a directory of the box's models, or "weights:bf16" for the served model's own unquantized form; null:
    the model's own one, where the method has a drafter.
    `options` are the further keys of vLLM's --speculative-config.
    """

    method: Literal["none", "ngram", "draft_model", "dflash"]
    tokens: int
    drafter: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drafts_with_a_model(self) -> bool:
        return self.method in ("draft_model", "dflash")


@dataclass(frozen=True)
class Variant:
    """What is served."""

    name: str
    weights: Weights
    activation: Activation
    speculation: Speculation
    knobs: Mapping[str, Any]
    serve: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Where the unquantized model comes from, pinned by content."""

    kind: Literal["gguf-in-package"]
    package: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Quantize:
    """How a checkpoint is made from the unquantized model."""

    seed: int
    steps: int


@dataclass(frozen=True)
class Model:
    """The model a box serves; `group_size` is in channels, `krot` counts rotation layers.

    Its checkpoints are either prepared here from `source`, as `quantize` says, or found: `checkpoints` then names
    the directory of each of conf/weights in the box's `models_dir`. `drafter` is found there too.
    """

    name: str
    group_size: int
    krot: int
    source: Source | None = None
    quantize: Quantize | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    drafter: str | None = None


@dataclass(frozen=True)
class Detect:
    """When `box=auto` takes a box: the present box of the highest priority wins."""

    priority: int
    always: bool = False
    pci: str | None = None  # "vendor:device" in hexadecimal
    count: int = 1


@dataclass(frozen=True)
class ContainerSpec:
    """What a box asks of a container engine. Names of groups become numbers for docker, keep-groups for podman."""

    image: str  # name, or name@sha256:...; the plan pins what it resolves to
    python: str  # interpreter inside the image
    path: str  # PATH inside the image
    devices: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    ipc: Literal["private", "host"] = "private"
    network: Literal["bridge", "host"] = "bridge"
    shm_size_mib: int = 512
    ulimits: Mapping[str, int] = field(default_factory=dict)
    cap_add: tuple[str, ...] = ()
    security_opt: tuple[str, ...] = ()
    memory_gib: float | None = None


@dataclass(frozen=True)
class Marker:
    """A line of the server's log. It counts where the weights' format is in `formats` (empty: any) and every knob
    of `knobs` has the value given. `says` is what it shows, for the person who reads that it is there or missing.
    """

    pattern: str  # regular expression, searched in the whole log
    says: str
    formats: tuple[str, ...] = ()
    knobs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Markers:
    """What the log of a good boot has, and what it has not."""

    required: tuple[Marker, ...] = ()
    forbidden: tuple[Marker, ...] = ()


NO_MARKERS = Markers()


@dataclass(frozen=True)
class Box:
    """Where a variant is served.

    `formats` are those of the weights that are served here; `default_engine` is taken where none is named.
    `env_secret` names variables that a boot passes on from the orchestrator's own environment, unrecorded.
    """

    name: str
    model: Model
    detect: Detect
    host: str
    port: int
    disk_free_gib: float
    formats: tuple[str, ...]
    serve: Mapping[str, Any]
    env: Mapping[str, str]
    env_secret: tuple[str, ...] = ()
    models_dir: str | None = None
    default_engine: Literal["process", "docker", "podman"] = "process"
    evidence: Markers = NO_MARKERS
    container: ContainerSpec | None = None
    prod_port: int | None = None  # None: prod serves on `port`
    drain_timeout_s: float = 120.0  # how long a run waits for prod's requests to end
    when_prod_fails: Literal["stop", "rollback"] = "stop"  # what the guard does when it gives a prod up
    canary_margin: float = 0.05  # share by which a promoted server may be slower than its verdict's boots were alone
    vram_clear_mib: float | None = None  # device memory a card may hold before a boot; None: not looked at
    clear_timeout_s: float = 30.0  # how long the driver may take to give memory back
    sampled_drafts: bool = True  # False: vLLM here takes any temperature above 0 for another one where it drafts


@dataclass(frozen=True)
class Engine:
    """How a server starts and ends. `socket` is docker's or podman's API socket; None: the usual place."""

    kind: Literal["process", "docker", "podman"]
    python: str | None
    ready_timeout_s: float
    stop_grace_s: float
    socket: str | None = None


@dataclass(frozen=True)
class Suite:
    """Which benches run, with which sizes; each bench checks its own parameters."""

    name: str
    seed: int
    benches: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Paths:
    """Where things are kept; None means the XDG default. `tracking_server` is the address of an MLflow server that gets
    a copy of every run; None: there is none."""

    cache: str | None
    state: str | None
    tracking: str
    tracking_server: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One run as declared."""

    variant: Variant
    box: Box
    engine: Engine
    suite: Suite
    paths: Paths


@dataclass(frozen=True)
class Machine:
    """Where things run and are kept, without a variant."""

    box: Box
    engine: Engine
    paths: Paths


@dataclass(frozen=True)
class Sweep:
    """Values of one key of the variant, as `speculation.tokens`; each is an A/B against the best so far."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class ABTest:
    """Two variants to be compared on one box, as declared. `about` is what the comparison is to find out.

    Kind `floor` has the same variant twice: it measures how far equal boots differ. `seed` orders the boots; None: it
    is drawn when the A/B starts.
    """

    kind: Literal["ab", "floor"]
    about: str
    a: Variant
    b: Variant
    gate: Gate
    seed: int | None
    sweep: Sweep | None
    box: Box
    engine: Engine
    suite: Suite
    paths: Paths

    def arm(self, name: str) -> Experiment:
        """What is measured on arm "a" or "b"."""
        variant = {"a": self.a, "b": self.b}[name]
        return Experiment(variant, self.box, self.engine, self.suite, self.paths)
