"""Which process owns a record on disk, and whether it is still the same one: a pid alone is reused."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Owner:
    """`start_time_s` is the process's creation time since the epoch."""

    pid: int
    start_time_s: float
    host: str

    def alive(self) -> bool:
        """Whether this very process still runs. On another host it cannot be known and counts as alive."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.start_time_s) < 0.05
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def current() -> Owner:
    """The owner that this process is."""
    return Owner(os.getpid(), psutil.Process().create_time(), socket.gethostname())


def from_mapping(data: Mapping[str, Any]) -> Owner:
    """The owner in a record. Raises KeyError or ValueError where it is damaged."""
    return Owner(int(data["pid"]), float(data["start_time_s"]), str(data["host"]))
