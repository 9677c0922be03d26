"""Which box this machine is, by the devices that are present."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from orchestrator import shipped
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable
from orchestrator.schema import Detect

PCI_DEVICES = Path("/sys/bus/pci/devices")


def detect_box() -> str:
    """The present box of the highest priority."""
    found = present()
    if not found:
        raise UsageError("box=auto: no box of conf/box/ matches this machine's devices; name one with box=NAME")
    return found[0]


def present() -> list[str]:
    """The boxes whose devices this machine has, the highest priority first."""
    found: list[tuple[int, str]] = []
    for name in shipped.names("box"):
        detect = _detect_of(name)
        if detect.always or count_pci(detect.pci) >= detect.count:
            found.append((detect.priority, name))
    return [name for _, name in sorted(found, reverse=True)]


def _detect_of(name: str) -> Detect:
    where = shipped.conf_dir() / "box" / f"{name}.yaml"
    try:
        detect = from_jsonable(Detect, raw_box(name)["detect"])
    except KeyError:
        raise UsageError(f"{where}: detect is missing; add it, as in detect: {{priority: 1, always: true}}") from None
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if detect.pci is not None and not re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}", detect.pci):
        raise UsageError(f'{where}: detect.pci is {detect.pci!r}; write "vendor:device", as in "1002:7551"')
    return detect


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


def raw_box(name: str) -> dict[str, Any]:
    """The box's own file: enough to choose by, before anything is composed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
    path = shipped.conf_dir() / "box" / f"{name}.yaml"
    try:
        raw = yaml.load(path.read_text("utf-8"), loader)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; choose box=NAME from: {', '.join(shipped.names('box'))}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise UsageError(f"{path}: no YAML ({said}); correct it") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: it is empty or no mapping; correct it, or remove it")
    return raw
