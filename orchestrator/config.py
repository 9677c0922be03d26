"""From command-line overrides to an Experiment: Hydra composes, cattrs checks the types."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable
from orchestrator.schema import Detect, Experiment, Machine, Paths, Variant

T = TypeVar("T")
PCI_DEVICES = Path("/sys/bus/pci/devices")


def conf_dir() -> Path:
    """The directory of the shipped configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


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
    overrides = list(overrides)
    _check_shape(overrides)
    if not any(override.partition("=")[0] in ("+variant", "variant") for override in overrides):
        raise UsageError(f"no variant given; add +variant=NAME, one of: {', '.join(_names('variant'))}")
    overrides = [f"+{o}" if o.startswith("variant=") else o for o in overrides]
    _check_group_choices(overrides)
    return _structure(_compose(_choose_box(overrides)))


def load_arm(text: str, shared: Sequence[str]) -> Experiment:
    """One side of a comparison: "VARIANT OVERRIDE...", over the overrides that both sides share."""
    words = shlex.split(text)
    if not words or "=" in words[0] or any(o.startswith(("+variant=", "variant=")) for o in shared):
        raise UsageError("--diff takes two variants, as in --diff int4 int5 box=cpu; leave +variant=NAME out")
    return load([f"+variant={words[0]}", *shared, *words[1:]])


def load_machine(overrides: Sequence[str]) -> Machine:
    """Box, engine and paths of the overrides, for the verbs that serve no variant of their own."""
    _check_shape(overrides)
    _check_group_choices(overrides)
    composed = _compose(_choose_box(list(overrides)))
    return _checked(Machine, {name: composed[name] for name in ("box", "engine", "paths")})


def load_variant(name: str, box: str) -> Variant:
    """A shipped variant by its name."""
    return _structure(_compose([f"+variant={name}", f"box={box}"])).variant


def _compose(overrides: Sequence[str]) -> Any:
    """The composed configuration as plain dicts and lists."""
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", list(overrides))
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_one_line(error)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"conf/: {' '.join(str(error).split())}") from None


def _check_shape(overrides: Sequence[str]) -> None:
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UsageError(f"{override!r} is no override; write KEY=VALUE, for example +variant=int5_i8_pg_zpe")


def _structure(plain: Any) -> Experiment:
    return _checked(Experiment, plain)


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
        detect = from_jsonable(Detect, _raw_box(name)["detect"])
        if detect.always or count_pci(detect.pci) >= detect.count:
            found.append((detect.priority, name))
    if not found:
        raise UsageError("box=auto: no box of conf/box/ matches this machine's devices; name one with box=NAME")
    return max(found)[1]


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
    vendor, device = wanted.split(":")
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
    return yaml.load((conf_dir() / "box" / f"{name}.yaml").read_text(), loader)


def box_was_detected(overrides: Sequence[str]) -> bool:
    """Whether the box was left to `box=auto`."""
    asked = [o for o in overrides if o.startswith("box=")]
    return not asked or asked[-1] == "box=auto"


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _check_group_choices(overrides: Sequence[str]) -> None:
    """Hydra's message for an unknown choice is several lines; ours is one, with the nearest name."""
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+").partition("@")[0]
        if group not in ("variant", "box", "engine", "suite", "weights", "activation", "speculation"):
            continue
        names = _names(group) + (["auto"] if group == "box" else [])
        if value not in names:
            near = difflib.get_close_matches(value, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{override}: there is no {group} {value!r}; {hint}choose from: {', '.join(names)}")


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"configuration: {' '.join(lines[:3])}"
