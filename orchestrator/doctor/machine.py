"""Limits, disk, port, clock and the tracking directory of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import orchestrator
from orchestrator import prod_server, slot
from orchestrator.boot import check_port
from orchestrator.doctor.check import ASK_S, Check, existing, user
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.schema import Machine

NOFILE = 4096


def checks(machine: Machine, state: Path, cache: Path) -> Iterator[Check]:
    """Raises nothing: what cannot be known is no check."""
    yield from _limits(machine)
    yield _disk(machine, cache)
    yield _port(machine, state)
    yield from _clock()
    yield _tracking(machine)


def _limits(machine: Machine) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft == resource.RLIM_INFINITY or soft >= NOFILE
    mend = f"ulimit -n {NOFILE}"
    if hard != resource.RLIM_INFINITY and hard < NOFILE:
        mend = _limits_conf("nofile", str(NOFILE))
    yield Check("open files (ulimit -n)", ok, _limit(soft), "" if ok else mend)
    if machine.box.detect.pci is not None:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        ok = soft == resource.RLIM_INFINITY
        mend = "" if ok else _limits_conf("memlock", "unlimited")
        yield Check("locked memory (ulimit -l)", ok, _limit(soft), mend)


def _disk(machine: Machine, cache: Path) -> Check:
    place = existing(cache)
    free, wanted = shutil.disk_usage(place).free / 2**30, machine.box.disk_free_gib
    mend = "" if free >= wanted else f"python -m orchestrator cache prune paths.cache={cache}"
    return Check("disk for the caches", free >= wanted, f"{free:.1f} GiB free at {place}, {wanted:g} wanted", mend)


def _port(machine: Machine, state: Path) -> Check:
    host, port = machine.box.host, machine.box.port
    name = f"port {port}"
    try:
        check_port(host, port)
        return Check(name, True, "free")
    except UsageError:
        mend = f"ss -ltnp 'sport = :{port}'; or set box.port=N"
    try:
        prod = slot.load(state, machine.box.name)
        if prod and prod.plan.port == port and prod_server.is_healthy(prod):
            return Check(name, True, f"prod serves {prod.plan.variant} there; a run takes it down and brings it back")
    except OrchestratorError:
        pass  # said by the check of what is left over
    return Check(name, False, f"{host}:{port} is taken", mend)


def _clock() -> Iterator[Check]:
    built = max(path.stat().st_mtime for path in Path(orchestrator.__file__).parent.rglob("*.py"))
    now = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    ok = now >= built - 1
    yield Check(
        "clock",
        ok,
        found if ok else f"{found}, before this program was built",
        "" if ok else "sudo timedatectl set-ntp true",
    )
    if shutil.which("timedatectl") is None:
        return
    try:
        asked = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return  # no systemd is running: nothing is known
    mend = "" if answer == "yes" else "sudo timedatectl set-ntp true"
    yield Check("clock synchronised", answer == "yes", answer or "unknown", mend)


def _tracking(machine: Machine) -> Check:
    wanted = Path(machine.paths.tracking).expanduser().absolute()
    place = existing(wanted)
    ok = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    mend = "" if ok else f"sudo chown -R {user()} {place}"
    return Check("MLflow directory", ok, f"{wanted} " + ("can be written" if ok else "cannot be written"), mend)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _limits_conf(item: str, value: str) -> str:
    name = user()
    return f"echo '{name} - {item} {value}' | sudo tee /etc/security/limits.d/90-paro-{item}.conf  # then log in again"
