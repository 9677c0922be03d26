"""Where a key of the composed configuration was written: on the command line, or in which file of conf/."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator import shipped

_BY_TYPE = re.compile(
    r"(?:extra fields found \((?P<extra>[\w-]+)[^)]*\) )?"
    r"@ (?P<kind>Experiment|ABTest|Machine|Gate)\b(?:\.(?P<key>[\w.\-\[\]]+))?"
)
_BY_KEY = re.compile(r"^(?:(gate): )?((?:(?:box|engine|suite|variant|a|b|gate|criteria)\.)?[\w.-]+): ")
_INNER = ("weights", "activation", "speculation")  # groups of a variant


def located(message: str, plain: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """A refusal of the configuration `plain`, with "in FILE: KEY" for a key that a file has, and "@ KEY" for others."""
    if _BY_TYPE.search(message):
        return _BY_TYPE.sub(lambda found: _place(found, plain, overrides), message).strip()
    if found := _BY_KEY.match(message):
        key = f"{found[1]}.{found[2]}" if found[1] else found[2]
        if place := file_of(key, plain, overrides):
            return f"{place}: {message[found.end() :]}"
    return message


def file_of(key: str, plain: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """ "in FILE: KEY" for a dotted key; None where it is the command line's, or in no file that was chosen."""
    bare = re.sub(r"\[\d+\]", "", key)
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if any(bare == of or bare.startswith(f"{of}.") or of.startswith(f"{bare}.") for of in given if "." in of):
        return None
    for path, rest in _files(bare, plain, overrides):
        if rest and _has(path, rest):
            shown = path.relative_to(shipped.conf_dir().parent)
            last = re.search(r"\[\d+\]$", key)  # of a list
            return f"in {shown}: {rest}{last[0] if last else ''}"
    return None


def _place(found: re.Match[str], plain: Mapping[str, Any], overrides: Sequence[str]) -> str:
    key = ".".join(filter(None, ("gate" if found["kind"] == "Gate" else "", found["key"], found["extra"])))
    said = "there is no such key " if found["extra"] else ""
    place = file_of(key, plain, overrides)
    return f"{said}({place})" if place else f"{said}@ {key}" if key else ""


def _files(key: str, plain: Mapping[str, Any], overrides: Sequence[str]) -> list[tuple[Path, str]]:
    """(a file that may have it, the key within it), the one that wins first."""
    head, _, rest = key.partition(".")
    conf, of = shipped.conf_dir(), plain.get(head)
    found = []
    for override in overrides:
        if override.startswith("+experiments="):
            path = shipped.experiments_dir() / f"{override.partition('=')[2]}.yaml"
            found.append((path, key))
            found += [(conf / head / f"{name}.yaml", rest) for name in _chosen(path, head)]
    if isinstance(of, Mapping):
        group = "variant" if head in ("a", "b") else head
        found.append((conf / group / f"{of.get('kind' if head == 'engine' else 'name')}.yaml", rest))
        inner, _, last = rest.partition(".")
        if group == "variant" and inner in _INNER and isinstance(of.get(inner), Mapping):
            found.append((conf / inner / f"{of[inner].get('name')}.yaml", last))
    return found


def _chosen(experiment: Path, group: str) -> list[str]:
    """What an experiment's defaults choose of the group."""
    defaults = _read(experiment).get("defaults", ())
    entries = [(key, name) for entry in defaults if isinstance(entry, Mapping) for key, name in entry.items()]
    return [name for key, name in entries if key.rpartition("/")[2].partition("@")[0] == group]


def _has(path: Path, key: str) -> bool:
    data: Any = _read(path)
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, Mapping) else {}
