"""One thing that was looked at."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from pathlib import Path

ASK_S = 1.0  # for each thing that is asked over a socket or in a process


@dataclass(frozen=True)
class Check:
    """`mend` is the exact command that mends what is wrong; empty where nothing is."""

    name: str
    ok: bool
    found: str
    mend: str = ""


def existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def user() -> str:
    """The name of this user; the number where it has none, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
