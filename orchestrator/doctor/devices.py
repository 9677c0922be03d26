"""The devices that a box declares: present, open to this user, and with their memory clear."""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator import detection
from orchestrator.devices import held
from orchestrator.doctor.check import Check, user
from orchestrator.schema import Box


def checks(box: Box, sys_root: Path, dev_root: Path) -> Iterator[Check]:
    """Only for a box that declares its devices."""
    if box.detect.pci is None:
        return
    present = detection.count_pci(box.detect.pci)
    enough = present >= box.detect.count
    found = f"{present} of {box.detect.count} devices {box.detect.pci}"
    yield Check("devices", enough, found, "" if enough else "lspci -nn | grep -i amd; or choose another box=")
    nodes = [dev_root / "kfd", *sorted((dev_root / "dri").glob("renderD*"))]
    for node in nodes if len(nodes) > 1 else [*nodes, dev_root / "dri" / "renderD128"]:
        yield _node(node)
    full = held(box, sys_root)
    pids = " ".join(str(pid) for card in full for pid in sorted(card.holders))
    limit = (
        "not limited" if box.vram_clear_mib is None else f"at most {box.vram_clear_mib:,.0f} MiB in use on each card"
    )
    mend = "" if not full else (f"ps -fp {pids}" if pids else "sudo fuser -v /dev/kfd")
    yield Check("device memory", not full, "; ".join(map(str, full)) or limit, mend)


def _node(node: Path) -> Check:
    name = f"access to {node}"
    try:
        status = node.stat()
    except OSError:
        return Check(name, False, "is missing", "sudo modprobe amdgpu")
    if os.access(node, os.R_OK | os.W_OK):
        return Check(name, True, "may be read and written")
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    mend = f"sudo usermod -aG {group} {user()}  # then log in again"
    return Check(name, False, f"belongs to group {group}, which you are not in", mend)
