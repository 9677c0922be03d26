"""From command-line overrides to an Experiment: Hydra composes, cattrs checks the types."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator import plain_yaml, shipped, written_at
from orchestrator.detection import detect_box, raw_box
from orchestrator.errors import UsageError
from orchestrator.judging import gate as gate_of
from orchestrator.ranges import check_bits, in_range
from orchestrator.records import from_jsonable
from orchestrator.schema import ABTest, Experiment, Machine, Paths, Variant

T = TypeVar("T")
GROUPS = ("variant", "box", "engine", "suite", "gate", "experiments", "weights", "activation", "speculation")
ARMS = ("a", "b")
HYDRA = threading.Lock()  # Hydra composes one configuration at a time: its search path is the process's


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for each job of a multirun (`a=1,2` gives two)."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise UsageError(_one_line(error)) from None
    return [list(job) for job in jobs]


def _is_nearly(word: str, written: str) -> bool:
    return bool(difflib.get_close_matches(written, [word], cutoff=0.75))


def load(overrides: Sequence[str]) -> Experiment:
    """The experiment that the overrides declare. Raises UsageError with one line for anything wrong in them."""
    overrides = _normal(overrides)
    asked = [o for o in overrides if o.startswith("+variant=")]
    if not asked:
        near = next((o for o in overrides if _is_nearly("variant", o.lstrip("+").partition("=")[0])), None)
        meant = f"; {near}: did you mean +variant={near.partition('=')[2]}?" if near else "; add +variant=NAME,"
        raise UsageError(f"no variant given{meant} one of: {', '.join(shipped.names('variant'))}")
    if len(asked) > 1:
        raise UsageError(f"{' '.join(asked)}: more than one variant; keep one, or -m +variant=A,B runs both")
    of_ab = [o for o in overrides if re.match(r"\+?(gate|[ab])[.=]", o)]
    if of_ab:
        raise UsageError(f"{of_ab[0]}: that is of an A/B, not of one run; add +variant@a=NAME +variant@b=NAME")
    _check_group_choices(overrides)
    chosen = _choose_box(overrides)
    plain_yaml.require([shipped.conf_dir()], chosen)
    return _structure(_compose(chosen), chosen)


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
    if of_one := [o for o in overrides if re.match(r"[~+]*variant\.", o)]:
        rest = of_one[0].partition("variant.")[2]
        raise UsageError(f"{of_one[0]}: an A/B has two variants; write +a.{rest} or +b.{rest}")
    if missing and not named:
        raise UsageError(
            f"no variant for arm {missing[0]}; add +variant@{missing[0]}=NAME, one of: "
            f"{', '.join(shipped.names('variant'))}; or +experiment=NAME, "
            f"one of: {', '.join(shipped.names('experiments'))}"
        )
    _check_group_choices(overrides)
    chosen = _choose_box(overrides)
    plain_yaml.require([shipped.conf_dir(), shipped.experiments_dir().parent], chosen)
    if "kind=floor" in chosen and not any(o.startswith("gate=") for o in chosen):
        chosen.append("gate=floor")
    if not named and not any(o.startswith("gate=") for o in chosen):
        raise UsageError(f"no gate given; add gate=NAME, one of: {', '.join(shipped.names('gate'))}")
    root = str(shipped.experiments_dir().parent).replace("\\", "\\\\").replace("'", "\\'")
    composed = _compose([f"hydra.searchpath=['file://{root}']", *chosen], "ab")
    with _located(composed, chosen):
        gate_of.parse(composed["gate"])  # its own rules, in its own words
        declared = in_range(_checked(ABTest, composed))
        for arm in ARMS:
            check_bits(getattr(declared, arm), arm)
    return declared


def load_machine(overrides: Sequence[str]) -> Machine:
    """Box, engine and paths of the overrides, for the verbs that serve no variant of their own."""
    overrides = _normal(overrides)
    _check_group_choices(overrides)
    chosen = _choose_box(overrides)
    composed = _compose(chosen)
    with _located(composed, chosen):
        return in_range(_checked(Machine, {name: composed[name] for name in ("box", "engine", "paths")}))


def load_variant(name: str, box: str) -> Variant:
    """A shipped variant by its name."""
    chosen = [f"+variant={name}", f"box={box}"]
    return _structure(_compose(chosen), chosen).variant


def _compose(overrides: Sequence[str], primary: str = "config") -> Any:
    """The composed configuration as plain dicts and lists; `primary` is a file of conf/."""
    try:
        with HYDRA, initialize_config_dir(str(shipped.conf_dir()), version_base="1.3"):
            composed = compose(primary, list(overrides))
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        unknown = re.match(r"Could not override '([\w.-]+)'", str(error))
        raise UsageError(_no_such_key(unknown[1], overrides, primary) if unknown else _one_line(error)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"conf/: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{_no_text()}: it is no UTF-8 text ({error.reason}); correct it") from None


def _no_text() -> Path:
    """The file of conf/ that is no UTF-8 text; Hydra does not tell."""
    for path in sorted(shipped.conf_dir().rglob("*.yaml")):
        try:
            path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return path
    return shipped.conf_dir()


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


def _structure(plain: Any, overrides: Sequence[str]) -> Experiment:
    with _located(plain, overrides):
        experiment = in_range(_checked(Experiment, plain))
        check_bits(experiment.variant, "variant")
    return experiment


@contextmanager
def _located(plain: Any, overrides: Sequence[str]) -> Iterator[None]:
    """What is refused of the composed configuration, with the file that it was written in."""
    try:
        yield
    except UsageError as error:
        raise UsageError(written_at.located(str(error), plain, overrides)) from None


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


def _directory(configured: str | None, variable: str, default: str) -> Path:
    if configured:
        return Path(configured).expanduser().resolve()
    root = os.environ.get(variable) or str(Path.home() / default)
    return Path(root).resolve() / "paro-orchestrator"


def _choose_box(overrides: list[str]) -> list[str]:
    asked = [o for o in overrides if o.startswith("box=")]
    rest = [o for o in overrides if not o.startswith("box=")]
    name = asked[-1].removeprefix("box=") if asked else "auto"
    name = detect_box() if name == "auto" else name
    if not any(o.startswith("engine=") for o in rest):
        rest.append(f"engine={raw_box(name).get('default_engine', 'process')}")
    return [f"box={name}", *rest]


def box_was_detected(overrides: Sequence[str]) -> bool:
    """Whether the box was left to `box=auto`."""
    asked = [o for o in _normal(overrides) if o.startswith("box=")]
    return not asked or asked[-1] == "box=auto"


def _check_group_choices(overrides: Sequence[str]) -> None:
    """Hydra's message for an unknown choice is several lines; ours is one, with the nearest name."""
    for override in overrides:
        key, _, value = override.partition("=")
        group = key.lstrip("+").partition("@")[0]
        if group not in GROUPS:
            continue
        if "," in value:
            raise UsageError(f"{override}: a list is one run for each of its values; add -m to run them, or choose one")
        known = shipped.names(group) + (["auto"] if group == "box" else [])
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            group = group.removesuffix("s") if group == "experiments" else group
            override = f"+{group}={value}" if group == "experiment" else override
            raise UsageError(f"{override}: there is no {group} {value!r}; {hint}choose from: {', '.join(known)}")


def _no_such_key(key: str, overrides: Sequence[str], primary: str) -> str:
    """What to write in place of a key that the configuration does not have: the nearest of its neighbours."""
    composed: Any = _compose([o for o in overrides if o.partition("=")[0] != key], primary)
    path, _, last = key.rpartition(".")
    for part in path.split(".") if path else []:
        composed = composed.get(part) if isinstance(composed, dict) else None
    known = sorted(map(str, composed)) if isinstance(composed, dict) else []
    if near := difflib.get_close_matches(last, known, n=1):
        return f"{key}: there is no such key; did you mean {'.'.join(filter(None, (path, near[0])))}?"
    there = f" ({path or 'the configuration'} has: {', '.join(known)})" if known else ""
    return f"{key}: there is no such key{there}; one that is new, such as a flag of vLLM, is written +{key}=VALUE"


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Ambiguous value"):
        return f"configuration: {lines[0]}: add -m for one run with each value, or write a list as KEY=[A,B]"
    if lines and lines[0].startswith("LexerNoViableAlt"):
        override = lines[0].partition(": ")[2] or lines[min(1, len(lines) - 1)]
        return f"configuration: {override}: Hydra cannot read this; put the value in quotes of its own: \"KEY='VALUE'\""
    return f"configuration: {' '.join(lines[:3])}"
