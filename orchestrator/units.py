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
SCHEDULER = "paro-orchestrator"
SCHEDULER_SERVICE = """\
# The queue of A/Bs and the windows in which they run.
[Unit]
Description=Run queued A/Bs while nobody needs prod
After=network-online.target
Wants=network-online.target

[Service]
# XDG_CACHE_HOME, HF_TOKEN and the like, where they are not the defaults
EnvironmentFile=-%E/paro-orchestrator/environment
WorkingDirectory={directory}
ExecStart={python} -m orchestrator serve fleet={fleet} paths.state={state}
Restart=always
RestartSec=10
# It ends its A/B and brings prod back first; prod as processes has to outlive it.
KillMode=process
TimeoutStopSec=20min
# so it says that a signal ended it
SuccessExitStatus=130

[Install]
WantedBy=default.target
"""


def written_scheduler(directory: Path, state: Path, fleet: str, python: str = sys.executable) -> str:
    """Write the scheduler's unit into the directory; returns the line that says what to do with it.

    Relative paths of jobs, such as paths.tracking, are below the directory in which this is called.
    """
    where = Path.cwd()
    _require_plain(python, state, where)
    content = SCHEDULER_SERVICE.format(python=python, state=state, fleet=fleet, directory=where)
    path = directory.expanduser() / f"{SCHEDULER}.service"
    write_bytes(path, content.encode())
    return (
        f"unit: {path}; with the directory ~/.config/systemd/user, start it with "
        f"`systemctl --user daemon-reload && systemctl --user enable --now {SCHEDULER} && loginctl enable-linger`"
    )


def rendered(python: str, state: Path) -> dict[str, str]:
    """File name -> content. Raises UsageError for paths that a unit or an override would take for something else."""
    _require_plain(python, state)
    return {f"{NAME}.service": SERVICE.format(python=python, state=state), f"{NAME}.timer": TIMER}


def _require_plain(*paths: str | Path) -> None:
    for path in map(str, paths):
        if not re.fullmatch(r"[\w./+@:-]+", path):
            raise UsageError(f"{path!r} cannot stand in a unit; use a directory without spaces and signs")


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
