"""systemd units for the guard of this installation, which keeps prod up: after a crash, a kill, a reboot.

Prod itself gets no unit of its own: each of its boots has a name of its own, which only the guard may hand out, and a
run that takes prod down for an hour must not fight with systemd over it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from orchestrator import config
from orchestrator.errors import UsageError
from orchestrator.records import write_bytes
from orchestrator.schema import Paths

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
ExecStart={python} -m orchestrator guard --quiet {places}
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
ExecStart={python} -m orchestrator serve fleet={fleet} {places}
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


def words(paths: Paths) -> list[str]:
    """The `paths.*` words with which another process, in another directory, finds the same places."""
    tracking = Path(paths.tracking).expanduser().resolve()
    found = {"state": config.state_dir(paths), "cache": config.cache_dir(paths), "tracking": tracking}
    if paths.tracking_server is not None:
        found["tracking_server"] = paths.tracking_server
    return [f"paths.{name}={place}" for name, place in found.items()]


def written_scheduler(directory: Path, paths: Paths, fleet: str, python: str = sys.executable) -> str:
    """Write the scheduler's unit into the directory; returns the line that says what to do with it.

    Relative paths of jobs are below the directory in which this is called.
    """
    where, places = Path.cwd(), words(paths)
    _require_plain(python, where, *places)
    content = SCHEDULER_SERVICE.format(python=python, places=" ".join(places), fleet=fleet, directory=where)
    path = directory.expanduser() / f"{SCHEDULER}.service"
    write_bytes(path, content.encode())
    return (
        f"unit: {path}; with the directory ~/.config/systemd/user, start it with "
        f"`systemctl --user daemon-reload && systemctl --user enable --now {SCHEDULER} && loginctl enable-linger`"
    )


def rendered(python: str, paths: Paths) -> dict[str, str]:
    """File name -> content. Raises UsageError for paths that a unit or an override would take for something else."""
    places = words(paths)
    _require_plain(python, *places)
    return {f"{NAME}.service": SERVICE.format(python=python, places=" ".join(places)), f"{NAME}.timer": TIMER}


def _require_plain(*paths: str | Path) -> None:
    for path in map(str, paths):
        if not re.fullmatch(r"(paths\.\w+=)?[\w./+@:-]+", path):
            raise UsageError(f"{path!r} cannot stand in a unit; use a directory without spaces and signs")


def written(directory: Path, paths: Paths, python: str = sys.executable) -> str:
    """Write the units into the directory; returns the line that says what to do with them."""
    directory = directory.expanduser()
    files = rendered(python, paths)
    for name, content in files.items():
        write_bytes(directory / name, content.encode())
    return (
        f"units: {directory}/{NAME}.service and .timer; with the directory ~/.config/systemd/user, start them with "
        f"`systemctl --user daemon-reload && systemctl --user enable --now {NAME}.timer && loginctl enable-linger`"
    )
