"""Which process owns a record on disk, and whether it is still the same one: a pid alone is reused."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROC = Path("/proc")
START_FIELD = 22 - 3  # of /proc/PID/stat, counted from the state, which follows the name's last ")"


@dataclass(frozen=True)
class Owner:
    """`start_time_s` is when the process was created, in seconds since the machine's boot `boot_id`.

    Not since the epoch: a clock that is set would make every process another one than the one recorded.
    """

    pid: int
    start_time_s: float
    host: str
    boot_id: str = ""

    def alive(self) -> bool:
        """Whether this very process still runs. On another host it cannot be known and counts as alive."""
        if self.host != socket.gethostname():
            return True
        if self.boot_id != _boot_id():
            return False
        try:
            state, start_time_s = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return abs(start_time_s - self.start_time_s) < 0.005 and state not in "ZX"


def current() -> Owner:
    """The owner that this process is."""
    return of(os.getpid())


def of(pid: int) -> Owner:
    """The owner that a process is. Raises ProcessLookupError where there is none."""
    try:
        return Owner(pid, _stat(pid)[1], socket.gethostname(), _boot_id())
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


def from_mapping(data: Mapping[str, Any]) -> Owner:
    """The owner in a record. Raises KeyError or ValueError where it is damaged."""
    pid = int(data["pid"])
    if pid <= 0:
        raise ValueError(f"{pid} is no process")
    return Owner(pid, float(data["start_time_s"]), str(data["host"]), str(data.get("boot_id", "")))


def to_tags(found: Owner) -> dict[str, str]:
    """The owner as tags of an MLflow run."""
    return {
        "owner.pid": str(found.pid),
        "owner.start_time": repr(found.start_time_s),
        "owner.host": found.host,
        "owner.boot_id": found.boot_id,
    }


def from_tags(tags: Mapping[str, str]) -> Owner | None:
    """The process that a run belongs to; None where its tags do not say."""
    try:
        names = {"pid": "owner.pid", "start_time_s": "owner.start_time", "host": "owner.host"}
        found = {field: tags[tag] for field, tag in names.items()}
        return from_mapping({**found, "boot_id": tags.get("owner.boot_id", "")})
    except (KeyError, ValueError):
        return None


def user() -> str:
    """The name of who runs this process."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _stat(pid: int) -> tuple[str, float]:
    """State and creation time of a process."""
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")


@cache
def _boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
