"""From command-line overrides to an Experiment: Hydra composes, cattrs checks the types."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator import gate as gate_of
from orchestrator import plain_yaml
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable
from orchestrator.schema import ABTest, Detect, Experiment, Machine, Paths, Variant

T = TypeVar("T")
PCI_DEVICES = Path("/sys/bus/pci/devices")
GROUPS = ("variant", "box", "engine", "suite", "gate", "experiments", "weights", "activation", "speculation")
ARMS = ("a", "b")
BITS = {"bf16": 16, "paroquant-int4": 4, "paroquant-int4-lloyd": 4, "int5-bitplane": 5, "mxfp4-paro": 4, "nvfp4": 4}
PORT = (1, 65535)
ABOVE_ZERO = (math.ulp(0.0), math.inf)
# What a number may be, by its key; null, where the key allows it, is not looked at.
RANGES: Mapping[str, tuple[float, float]] = {
    "box.port": PORT,
    "box.prod_port": PORT,
    "box.disk_free_gib": (0, math.inf),
    "box.vram_clear_mib": (0, math.inf),
    "box.drain_timeout_s": ABOVE_ZERO,
    "box.clear_timeout_s": ABOVE_ZERO,
    "box.detect.count": (1, math.inf),
    "box.model.group_size": (1, math.inf),
    "box.model.krot": (0, math.inf),
    "box.model.quantize.steps": (0, math.inf),
    "box.container.shm_size_mib": (0, math.inf),
    "box.container.memory_gib": ABOVE_ZERO,
    "engine.ready_timeout_s": ABOVE_ZERO,
    "engine.stop_grace_s": (0, math.inf),
    "suite.seed": (0, math.inf),
}
NEVER_EMPTY = ("box.host", "box.name", "box.models_dir", "engine.python", "engine.socket")
NEVER_EMPTY += (
    "box.container.image",
    "box.container.python",
    "box.container.path",
    "paths.cache",
    "paths.state",
    "paths.tracking",
    "paths.tracking_server",
    "variant.name",
    "suite.name",
)


def conf_dir() -> Path:
    """The directory of the shipped configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    for path in (package / "conf", package.parent / "conf"):
        if (path / "config.yaml").is_file():
            return path
    raise UsageError(f"{package.parent / 'conf'}: the shipped configuration is missing; install the package again")


def experiments_dir() -> Path:
    """The directory of the declared A/Bs, and of the ledger."""
    return conf_dir().parent / "experiments"


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for each job of a multirun (`a=1,2` gives two)."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise UsageError(_one_line(error)) from None
    return [list(job) for job in jobs]


def load(overrides: Sequence[str]) -> Experiment:
    """The experiment that the overrides declare. Raises UsageError with one line for anything wrong in them."""
    overrides = _normal(overrides)
    asked = [o for o in overrides if o.startswith("+variant=")]
    if not asked:
        raise UsageError(f"no variant given; add +variant=NAME, one of: {', '.join(_names('variant'))}")
    if len(asked) > 1:
        raise UsageError(f"{' '.join(asked)}: more than one variant; keep one, or -m +variant=A,B runs both")
    _check_group_choices(overrides)
    chosen = _choose_box(overrides)
    plain_yaml.require([conf_dir()], chosen)
    return _structure(_compose(chosen))


def load_arm(text: str, shared: Sequence[str]) -> Experiment:
    """One side of a comparison: "VARIANT OVERRIDE...", over the overrides that both sides share."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--diff {text}: {error}; close the quotes") from None
    if not words or "=" in words[0] or any(o.startswith("+variant=") for o in _normal(shared)):
        raise UsageError("--diff takes two variants, as in --diff int4 int5 box=cpu; leave +variant=NAME out")
    return load([f"+variant={words[0]}", *shared, *words[1:]])


def is_ab(overrides: Sequence[str]) -> bool:
    """Whether the overrides declare an A/B rather than one variant."""
    return any(re.match(r"\+?(experiments?=|variant@[ab]=)", override) for override in overrides)


def load_ab(overrides: Sequence[str]) -> ABTest:
    """The A/B that the overrides declare, by name (+experiment=NAME) or by its arms (+variant@a=X +variant@b=Y).

    Raises UsageError with one line for anything wrong in them.
    """
    overrides = _normal(overrides)
    named = any(o.startswith("+experiments=") for o in overrides)
    missing = [arm for arm in ARMS if not any(o.startswith(f"+variant@{arm}=") for o in overrides)]
    if any(o.startswith("+variant=") for o in overrides):
        raise UsageError("+variant=NAME is one variant; an A/B has two: +variant@a=NAME +variant@b=NAME")
    if missing and not named:
        raise UsageError(
            f"no variant for arm {missing[0]}; add +variant@{missing[0]}=NAME, one of: {', '.join(_names('variant'))}; "
            f"or +experiment=NAME, one of: {', '.join(_names('experiments'))}"
        )
    _check_group_choices(overrides)
    chosen = _choose_box(overrides)
    plain_yaml.require([conf_dir(), experiments_dir().parent], chosen)
    if "kind=floor" in chosen and not any(o.startswith("gate=") for o in chosen):
        chosen.append("gate=floor")
    if not named and not any(o.startswith("gate=") for o in chosen):
        raise UsageError(f"no gate given; add gate=NAME, one of: {', '.join(_names('gate'))}")
    root = str(experiments_dir().parent).replace("\\", "\\\\").replace("'", "\\'")
    composed = _compose([f"hydra.searchpath=['file://{root}']", *chosen], "ab")
    gate_of.parse(composed["gate"])  # its own rules, in its own words
    declared = _in_range(_checked(ABTest, composed))
    for arm in ARMS:
        _check_bits(getattr(declared, arm), arm)
    return declared


def load_machine(overrides: Sequence[str]) -> Machine:
    """Box, engine and paths of the overrides, for the verbs that serve no variant of their own."""
    overrides = _normal(overrides)
    _check_group_choices(overrides)
    composed = _compose(_choose_box(overrides))
    return _in_range(_checked(Machine, {name: composed[name] for name in ("box", "engine", "paths")}))


def load_variant(name: str, box: str) -> Variant:
    """A shipped variant by its name."""
    return _structure(_compose([f"+variant={name}", f"box={box}"])).variant


def _compose(overrides: Sequence[str], primary: str = "config") -> Any:
    """The composed configuration as plain dicts and lists; `primary` is a file of conf/."""
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose(primary, list(overrides))
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_one_line(error)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"conf/: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{_no_text()}: it is no UTF-8 text ({error.reason}); correct it") from None


def _no_text() -> Path:
    """The file of conf/ that is no UTF-8 text; Hydra does not tell."""
    for path in sorted(conf_dir().rglob("*.yaml")):
        try:
            path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return path
    return conf_dir()


def _normal(overrides: Sequence[str]) -> list[str]:
    """The overrides with a group's choice spelt in the one way that the rest looks for: +variant=, box=, engine=.

    Raises UsageError for what has not the shape of an override.
    """
    normal = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not re.fullmatch(r"~?[^~+\s]+" if not equals or key.startswith("~") else r"\+{0,2}[^~+\s]+", key) or (
            not equals and not key.startswith("~")
        ):
            raise UsageError(f"{override!r} is no override; write KEY=VALUE, for example +variant=int5_i8_pg_zpe")
        if not override.isprintable():
            raise UsageError(
                f"{override!r}: these letters are not in the locale; write plain ones, or set LC_ALL=C.UTF-8"
            )
        if re.search(r"=[+-]?0\d+$", override):
            raise UsageError(f"{override}: a leading zero means octal to YAML; write it without, or in quotes")
        group = key.lstrip("+")
        if group in ("variant", "box", "engine", "suite", "gate", "experiment"):
            override = override.lstrip("+")
        if group == "experiment":  # the directory that Hydra looks in
            override = override.replace("experiment", "experiments", 1)
        normal.append(f"+{override}" if group in ("variant", "experiment") else override)
    return normal


def _structure(plain: Any) -> Experiment:
    experiment = _in_range(_checked(Experiment, plain))
    _check_bits(experiment.variant, "variant")
    return experiment


def _check_bits(variant: Variant, where: str) -> None:
    weights = variant.weights
    if weights.bits != BITS[weights.format]:
        raise UsageError(
            f"{where}.weights.bits: {weights.format} has {BITS[weights.format]} bits, not {weights.bits}; "
            f"choose weights@{where}.weights=NAME"
        )


def _in_range(declared: T) -> T:
    """Raises UsageError for the first number that is out of its range, or text that is empty."""
    for key, (low, high) in RANGES.items():
        value = _at(declared, key)
        if value is not None and not low <= value <= high:
            if high < math.inf:
                wanted = f"from {low} to {high}"
            else:
                wanted = "above 0" if low == ABOVE_ZERO[0] else f"of at least {low}"
            raise UsageError(f"{key}: {value} is out of range; write a number {wanted}")
    for key in NEVER_EMPTY:
        value = _at(declared, key)
        if value is not None and (not value.strip() or "\0" in value):
            raise UsageError(f"{key}: it is empty or no plain text; write a value, or leave it out")
    if re.search(r"[\s/:]", _at(declared, "box.host")):
        raise UsageError(f"box.host: {_at(declared, 'box.host')!r} is no host; write a name or an IPv4 address")
    python = declared.engine.python
    if found := python and shutil.which(str(Path(python).expanduser().absolute()) if "/" in python else python):
        # From here and on this PATH: the server has a directory and a PATH of its own. Links of a venv stay.
        return replace(declared, engine=replace(declared.engine, python=str(Path(found).absolute())))
    return declared


def _at(declared: Any, key: str) -> Any:
    """The value at a dotted key; None where a part of it is not there."""
    for name in key.split("."):
        declared = getattr(declared, name, None)
    return declared


def _checked(kind: type[T], plain: Any) -> T:
    try:
        return from_jsonable(kind, plain)
    except ValueError as error:
        raise UsageError(f"configuration: {error}") from None


def cache_dir(paths: Paths) -> Path:
    """Where prepared models, compile caches and references live."""
    return _directory(paths.cache, "XDG_CACHE_HOME", ".cache")


def state_dir(paths: Paths) -> Path:
    """Where leases, the boot journal and server logs live."""
    return _directory(paths.state, "XDG_STATE_HOME", ".local/state")


def detect_box() -> str:
    """The present box of the highest priority."""
    found: list[tuple[int, str]] = []
    for name in _names("box"):
        detect = _detect_of(name)
        if detect.always or count_pci(detect.pci) >= detect.count:
            found.append((detect.priority, name))
    if not found:
        raise UsageError("box=auto: no box of conf/box/ matches this machine's devices; name one with box=NAME")
    return max(found)[1]


def _detect_of(name: str) -> Detect:
    where = conf_dir() / "box" / f"{name}.yaml"
    try:
        detect = from_jsonable(Detect, _raw_box(name)["detect"])
    except KeyError:
        raise UsageError(f"{where}: detect is missing; add it, as in detect: {{priority: 1, always: true}}") from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if detect.pci is not None and not re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}", detect.pci):
        raise UsageError(f'{where}: detect.pci is {detect.pci!r}; write "vendor:device", as in "1002:7551"')
    return detect


def _directory(configured: str | None, variable: str, default: str) -> Path:
    if configured:
        return Path(configured).expanduser().resolve()
    root = os.environ.get(variable) or str(Path.home() / default)
    return Path(root).resolve() / "paro-orchestrator"


def boxes() -> list[str]:
    """The names of conf/box."""
    return _names("box")


def count_pci(wanted: str | None) -> int:
    """How many PCI devices "vendor:device" (hexadecimal) this machine has."""
    if wanted is None or not PCI_DEVICES.is_dir():
        return 0
    vendor, device = wanted.lower().split(":")
    return sum(
        (entry / "vendor").read_text().strip() == f"0x{vendor}"
        and (entry / "device").read_text().strip() == f"0x{device}"
        for entry in PCI_DEVICES.iterdir()
    )


def _choose_box(overrides: list[str]) -> list[str]:
    asked = [o for o in overrides if o.startswith("box=")]
    rest = [o for o in overrides if not o.startswith("box=")]
    name = asked[-1].removeprefix("box=") if asked else "auto"
    name = detect_box() if name == "auto" else name
    if not any(o.startswith("engine=") for o in rest):
        rest.append(f"engine={_raw_box(name).get('default_engine', 'process')}")
    return [f"box={name}", *rest]


def _raw_box(name: str) -> dict[str, Any]:
    """The box's own file: enough to choose by, before anything is composed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
    path = conf_dir() / "box" / f"{name}.yaml"
    try:
        raw = yaml.load(path.read_text("utf-8"), loader)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; choose box=NAME from: {', '.join(_names('box'))}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise UsageError(f"{path}: no YAML ({said}); correct it") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: it is empty or no mapping; correct it, or remove it")
    return raw


def box_was_detected(overrides: Sequence[str]) -> bool:
    """Whether the box was left to `box=auto`."""
    asked = [o for o in _normal(overrides) if o.startswith("box=")]
    return not asked or asked[-1] == "box=auto"


def _names(group: str) -> list[str]:
    directory = experiments_dir() if group == "experiments" else conf_dir() / group
    return sorted(path.stem for path in directory.glob("*.yaml"))


def _check_group_choices(overrides: Sequence[str]) -> None:
    """Hydra's message for an unknown choice is several lines; ours is one, with the nearest name."""
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+").partition("@")[0]
        if group not in GROUPS:
            continue
        if "," in value:
            raise UsageError(f"{override}: a list is one run for each of its values; add -m to run them, or choose one")
        names = _names(group) + (["auto"] if group == "box" else [])
        if value not in names:
            near = difflib.get_close_matches(value, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            group = group.removesuffix("s") if group == "experiments" else group
            override = f"+{group}={value}" if group == "experiment" else override
            raise UsageError(f"{override}: there is no {group} {value!r}; {hint}choose from: {', '.join(names)}")


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Ambiguous value"):
        return f"configuration: {lines[0]}: add -m for one run with each value, or write a list as KEY=[A,B]"
    if lines and lines[0].startswith("LexerNoViableAlt"):
        override = lines[0].partition(": ")[2] or lines[min(1, len(lines) - 1)]
        return f"configuration: {override}: Hydra cannot read this; put the value in quotes of its own: \"KEY='VALUE'\""
    return f"configuration: {' '.join(lines[:3])}"
