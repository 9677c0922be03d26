"""A container daemon behind its API socket: docker's and podman's are the same to this SDK.

A daemon that cannot be reached says nothing about its containers, so what only looks is tried again for a while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from orchestrator.errors import UsageError
from orchestrator.schema import Engine

if TYPE_CHECKING:
    from docker import DockerClient

T = TypeVar("T")
CALL_TIMEOUT_S = 60
OUTAGE_S = 60.0  # a daemon is restarted in less
RETRY_S = 1.0


class Unreachable(UsageError):
    """The daemon does not answer."""


def socket_of(engine: Engine) -> str:
    """The URL of the engine's API socket: as configured, else of $DOCKER_HOST or $CONTAINER_HOST, else as usual."""
    if engine.socket:
        return engine.socket if "://" in engine.socket else f"unix://{engine.socket}"
    if engine.kind == "docker":
        return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if url := os.environ.get("CONTAINER_HOST"):  # the SDK takes an empty one for docker's socket
        return url
    runtime = "/run" if os.getuid() == 0 else os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return f"unix://{runtime}/podman/podman.sock"


def connect(kind: str, socket: str) -> DockerClient:
    """A client of the daemon, every call of which ends in time.

    Raises Unreachable, and UsageError for docker's daemon where podman's is meant: plans are rendered for one of them.
    """
    import docker

    try:
        client = docker.DockerClient(base_url=socket, version="auto", timeout=CALL_TIMEOUT_S)
        parts = client.version().get("Components") or [] if kind == "podman" else None
    except (docker.errors.DockerException, ValueError) as error:  # ValueError: a URL with a port that is none
        raise _unreachable(kind, socket, error) from None
    if parts is not None and not any("podman" in str(part.get("Name", "")).lower() for part in parts):
        client.close()
        raise UsageError(f"engine.socket: at {socket} is docker, not podman; write engine=docker, or podman's socket")
    return client


def patiently(call: Callable[[], T], kind: str, socket: str) -> T:
    """`call()`, repeated for OUTAGE_S while the daemon cannot be reached; then raises Unreachable.

    What the daemon itself answers (docker.errors.APIError) is passed on at once. The call must bear repetition.
    """
    from docker.errors import APIError

    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return call()
        except APIError:
            raise
        except transport_errors() as error:
            if time.monotonic() > deadline:
                raise _unreachable(kind, socket, error) from None
        time.sleep(RETRY_S)


@cache
def transport_errors() -> tuple[type[Exception], ...]:
    """What the SDK raises where no answer came; APIError is one of them by inheritance, so catch it before."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return (RequestException, DockerException, OSError)


def image_id(engine: Engine, image: str) -> str:
    """What the image's name stands for on this machine: "sha256:...". Raises UsageError where it is not there."""
    from docker.errors import APIError, ImageNotFound

    client = connect(engine.kind, socket_of(engine))
    elsewhere = (
        ("localhost/", "docker.io/library/") if engine.kind == "podman" else ()
    )  # where podman files short names
    for name in (image, *(f"{prefix}{image}" for prefix in elsewhere)):
        try:
            found = client.images.get(name).id
            return found if found.startswith("sha256:") else f"sha256:{found}"
        except ImageNotFound:
            continue
        except APIError as error:
            said = " ".join(str(error.explanation or error).split())
            raise UsageError(f"box.container.image: {engine.kind} refuses {name!r} ({said}); correct it") from None
        except transport_errors() as error:
            raise _unreachable(engine.kind, socket_of(engine), error) from None
    raise UsageError(f"box.container.image: {engine.kind} has no image {image}; run `{how_to_get(engine.kind, image)}`")


def how_to_get(kind: str, image: str) -> str:
    """The command that makes or fetches an image."""
    return f"docker/build-cpu.sh {kind}" if image.startswith("paro-cpu:") else f"{kind} pull {image}"


def is_rootless(client: DockerClient) -> bool:
    """Whether root inside a container is the user who runs the daemon."""
    return any("rootless" in option for option in client.info().get("SecurityOptions") or ())


def _unreachable(kind: str, socket: str, error: Exception) -> Unreachable:
    causes = ("Permission denied", "No such file", "refused", "timed out")
    cause = next((words for words in causes if words in str(error)), "")
    user = "--user " if kind == "podman" and os.getuid() != 0 else ""
    start = f"run `systemctl {user}start {kind}.socket`"
    mend = "add yourself to its group" if cause == "Permission denied" else start
    why = f" ({cause or type(error).__name__})"
    return Unreachable(f"engine.socket: {kind} cannot be reached at {socket}{why}; {mend}, or set engine.socket=PATH")
