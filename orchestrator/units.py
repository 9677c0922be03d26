"""systemd units for the guard of this installation, which keeps prod up: after a crash, a kill, a reboot.

Prod itself gets no unit of its own: each of its boots has a name of its own, which only the guard may hand out, and a
run that takes prod down for an hour must not fight with systemd over it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.records import write_bytes

NAME = "paro-orchestrator-guard"
SERVICE = """\
# One pass of the guard: prod that a crash, a killed run or a reboot left down is brought back.
[Unit]
Description=Bring prod back on this box
After=network.target

[Service]
Type=oneshot
# XDG_CACHE_HOME, HF_TOKEN and the like, where they are not the defaults
EnvironmentFile=-%E/paro-orchestrator/environment
ExecStart={python} -m orchestrator guard --quiet paths.state={state}
# A prod that runs as processes is started by the guard and has to outlive it.
KillMode=process
# The longest boot, twice.
TimeoutStartSec=40min
"""
TIMER = """\
[Unit]
Description=Bring prod back on this box, every minute

[Timer]
OnBootSec=30s
OnUnitInactiveSec=60s
AccuracySec=5s

[Install]
WantedBy=timers.target
"""


def rendered(python: str, state: Path) -> dict[str, str]:
    """File name -> content. Raises UsageError for paths that a unit or an override would take for something else."""
    for path in (python, str(state)):
        if not re.fullmatch(r"[\w./+@:-]+", path):
            raise UsageError(f"{path!r} cannot stand in a unit; use a directory without spaces and signs")
    return {f"{NAME}.service": SERVICE.format(python=python, state=state), f"{NAME}.timer": TIMER}


def written(directory: Path, state: Path, python: str = sys.executable) -> str:
    """Write the units into the directory; returns the line that says what to do with them."""
    directory = directory.expanduser()
    files = rendered(python, state)
    for name, content in files.items():
        write_bytes(directory / name, content.encode())
    return (
        f"units: {directory}/{NAME}.service and .timer; with the directory ~/.config/systemd/user, start them with "
        f"`systemctl --user daemon-reload && systemctl --user enable --now {NAME}.timer && loginctl enable-linger`"
    )
