"""How a server starts and ends: as processes of this machine, or in a container."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from orchestrator.records import EnvReading


class Server(Protocol):
    """One started server of one boot; every process or container of it carries the boot's nonce."""

    nonce: str

    def exit_reason(self) -> str | None:
        """None while the server lives, else how it ended: exit status, signal, out of memory."""

    def readings(self, keys: Iterable[str]) -> tuple[EnvReading, ...]:
        """The environment of each of its processes, restricted to `keys`, as the kernel has it."""

    def inspected(self) -> dict[str, str] | None:
        """The environment that the container engine says it gave; None where there is no container."""

    def peak_rss_bytes(self) -> int:
        """Sum over its processes of each one's largest resident set so far."""

    def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to end, then SIGKILL. Afterwards nothing of it is left, else BootError."""
