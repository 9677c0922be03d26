"""Where a server finds its directories: at their paths on this machine, or at fixed places in a container.

The places in a container are fixed so that its argv and environment say nothing of this machine; its mounts do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.schema import Box, Engine

ATTEST = "/paro/attest"  # mounted by the boot, from its own directory


@dataclass(frozen=True)
class Directories:
    """Paths on this machine. `plugin` is the plugin build's directory, `cache` the plan's own."""

    model: str
    drafter: str | None
    plugin: str
    cache: str


@dataclass(frozen=True)
class Places:
    """Directories, interpreter and address as the server sees them."""

    python: str
    path: str
    model: str
    drafter: str
    plugin: str
    cache: str
    host: str


@dataclass(frozen=True)
class Resolved:
    """What this machine's container engine and group file said. `image_id` is empty where the engine has no such image
    or cannot be asked; a group that is not here has no number."""

    image_id: str = ""
    group_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mount:
    """A directory of this machine inside the container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Container:
    """What a container engine is asked for, beside argv and env. `image_id` is what `image` resolved to."""

    image: str
    image_id: str
    mounts: tuple[Mount, ...]
    devices: tuple[str, ...]
    groups: tuple[str, ...]
    ipc: str
    network: str
    shm_size_mib: int
    ulimits: Mapping[str, int]
    cap_add: tuple[str, ...]
    security_opt: tuple[str, ...]
    memory_gib: float | None


UNRESOLVED = Resolved()


def of(box: Box, engine: Engine, directories: Directories) -> Places:
    """Where the server of this engine sees them."""
    if engine.kind == "process":
        python = engine.python or sys.executable
        path = f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin"
        here = directories
        return Places(python, path, here.model, here.drafter or "", here.plugin, here.cache, box.host)
    spec = box.container
    # On a network of its own a container has to listen on every address; the published port is on the box's host only.
    host = box.host if spec.network == "host" else "0.0.0.0"
    return Places(spec.python, spec.path, "/paro/model", "/paro/drafter", "/paro/plugin", "/paro/cache", host)


def container(box: Box, engine: Engine, at: Places, directories: Directories, resolved: Resolved) -> Container | None:
    """What the container engine is asked for; None where the engine starts processes."""
    if engine.kind == "process":
        return None
    spec = box.container
    mounts = [
        Mount(directories.model, at.model, read_only=True),
        Mount(directories.plugin, at.plugin, read_only=True),
        Mount(directories.cache, at.cache, read_only=False),
    ]
    if directories.drafter:
        mounts.insert(1, Mount(directories.drafter, at.drafter, read_only=True))
    if engine.kind == "podman":  # the user's own groups, which the image need not know
        groups = ("keep-groups",) if spec.groups else ()
    else:  # numbers, because the image has names of its own
        groups = tuple(resolved.group_ids.get(name, name) for name in spec.groups)
    return Container(
        image=spec.image,
        image_id=resolved.image_id,
        mounts=tuple(mounts),
        devices=spec.devices,
        groups=groups,
        ipc=spec.ipc,
        network=spec.network,
        shm_size_mib=spec.shm_size_mib,
        ulimits=dict(spec.ulimits),
        cap_add=spec.cap_add,
        security_opt=spec.security_opt,
        memory_gib=spec.memory_gib,
    )
