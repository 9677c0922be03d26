"""Device memory as amdgpu's sysfs has it: which cards still hold some, how much, and by which processes.

Paths are below `sys_root` (/sys): `class/drm/cardN/device/mem_info_vram_used` in bytes, the card's render node, and
the KFD's `class/kfd/kfd/topology/nodes/*/{gpu_id,properties}` and `class/kfd/kfd/proc/PID/vram_GPUID`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.schema import Box

SYS = Path("/sys")
AMD = "0x1002"
MIB = 2**20
POLL_S = 0.2


@dataclass(frozen=True)
class Card:
    """One amdgpu card. `holders` maps a pid to the MiB that it holds, where the KFD says so."""

    name: str
    device: str  # PCI device id in hexadecimal, without 0x
    used_mib: float
    total_mib: float
    holders: dict[int, float]

    def __str__(self) -> str:
        by = ", ".join(f"pid {pid} ({mib:,.0f} MiB)" for pid, mib in sorted(self.holders.items()))
        return f"{self.name} has {self.used_mib:,.0f} of {self.total_mib:,.0f} MiB in use" + (f" by {by}" if by else "")


def cards(sys_root: Path = SYS) -> list[Card]:
    """Every AMD card, in the order of its number."""
    found = []
    for entry in (sys_root / "class" / "drm").glob("card*"):
        device = entry / "device"
        if not re.fullmatch(r"card\d+", entry.name) or _read(device / "vendor") != AMD:
            continue
        used = _read(device / "mem_info_vram_used")
        if used is None:
            continue
        total = _read(device / "mem_info_vram_total") or "0"
        model = (_read(device / "device") or "").removeprefix("0x")
        found.append(Card(entry.name, model, int(used) / MIB, int(total) / MIB, _holders(device, sys_root)))
    return sorted(found, key=lambda card: int(card.name.removeprefix("card")))


def held(box: Box, sys_root: Path = SYS) -> list[Card]:
    """The box's cards that hold more than `box.vram_clear_mib`; none where the box declares no such limit."""
    if box.vram_clear_mib is None:
        return []
    wanted = (box.detect.pci or "").lower().partition(":")[2]
    return [
        card for card in cards(sys_root) if card.used_mib > box.vram_clear_mib and (not wanted or card.device == wanted)
    ]


def require_clear(box: Box, sys_root: Path = SYS) -> None:
    """Wait up to `box.clear_timeout_s` for the driver to give memory back; raises UsageError naming what holds it."""
    deadline = time.monotonic() + box.clear_timeout_s
    while full := held(box, sys_root):
        if time.monotonic() > deadline:
            raise UsageError(
                f"device memory is not clear: {'; '.join(map(str, full))}; box {box.name} wants at most "
                f"{box.vram_clear_mib:,.0f} MiB: end those processes, or set box.vram_clear_mib"
            )
        time.sleep(POLL_S)


@contextmanager
def clear(box: Box, sys_root: Path = SYS) -> Iterator[None]:
    """The devices are clear before the block, and again after one that ended well."""
    require_clear(box, sys_root)
    yield
    require_clear(box, sys_root)


def _holders(device: Path, sys_root: Path) -> dict[int, float]:
    kfd = sys_root / "class" / "kfd" / "kfd"
    minors = {node.name.removeprefix("renderD") for node in (device / "drm").glob("renderD*")}
    gpu_ids = {
        _read(node / "gpu_id")
        for node in (kfd / "topology" / "nodes").glob("*")
        if _property(node / "properties", "drm_render_minor") in minors
    }
    holders = {}
    for gpu_id in gpu_ids - {None, "0"}:
        for path in (kfd / "proc").glob(f"*/vram_{gpu_id}"):
            mib = int(_read(path) or 0) / MIB
            if mib >= 1:
                holders[int(path.parent.name)] = mib
    return holders


def _property(path: Path, name: str) -> str | None:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return value.strip()
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
