"""How a server starts and ends: as processes of this machine, or in a container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.plan import ServePlan
from orchestrator.records import EnvReading
from orchestrator.schema import Engine

LOG_NAME = "server.log"


class Server(Protocol):
    """One started server of one boot; every process or container of it carries the boot's nonce."""

    nonce: str

    def exit_reason(self) -> str | None:
        """None while the server lives, else how it ended: exit status, signal, out of memory."""

    def readings(self, keys: Iterable[str]) -> tuple[EnvReading, ...]:
        """The environment of each of its processes, restricted to `keys`, as the kernel has it."""

    def inspected(self) -> dict[str, str] | None:
        """The environment that the container engine says it gave; None where there is no container."""

    def host_pid(self) -> int | None:
        """Its first process as this machine numbers it; None where that cannot be told."""

    def peak_rss_bytes(self) -> int:
        """Sum over its processes of each one's largest resident set so far."""

    def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to end, then SIGKILL. Afterwards nothing of it is left, else BootError."""


def start(
    plan: ServePlan,
    engine: Engine,
    argv: Sequence[str],
    env: Mapping[str, str],
    nonce: str,
    directory: Path,
    labels: Mapping[str, str],
) -> Server:
    """Start the boot's server as the plan says; its log is `directory`/server.log.

    `labels` say whose a container is. Raises UsageError for what this machine lacks, BootError where it does not start.
    """
    if plan.container is None:
        from orchestrator.engines.process import ProcessServer

        return ProcessServer(argv, env, nonce, directory / LOG_NAME)
    from orchestrator.engines.container import ContainerServer

    return ContainerServer(plan, engine, argv, env, nonce, directory, labels)


def reap(kind: str, socket: str | None, nonce: str) -> int:
    """End what is left of a boot, in containers (where `socket` is given) and processes; returns how many there were.

    Raises UsageError where a daemon cannot be reached, BootError where something does not end.
    """
    from orchestrator.engines.process import kill_processes_of

    if socket is None:
        return kill_processes_of(nonce)
    from orchestrator.engines import container

    return container.reap(kind, socket, nonce) + kill_processes_of(nonce)
