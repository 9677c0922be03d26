"""Real daemons and a stub image. Only what carries a label of this test session is ever looked at or removed.

An engine without a daemon is skipped, except those that PARO_REQUIRE_ENGINES ("docker,podman") names.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orchestrator.engines import daemon
from orchestrator.errors import UsageError
from orchestrator.places import Mount
from orchestrator.plan import ServePlan
from orchestrator.schema import Engine

IMAGE = "paro-stub:1"
STUB = Path(__file__).parents[1] / "boot" / "stub_server.py"
DOCKERFILE = Path(__file__).with_name("stub.Dockerfile")
PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Daemon:
    """An engine that answers, with the stub's image in it."""

    engine: Engine
    client: object
    image_id: str

    @property
    def kind(self) -> str:
        return self.engine.kind


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine_of(kind: str, url: str | None = None) -> Engine:
    return Engine(kind, None, ready_timeout_s=60, stop_grace_s=2, socket=url)


@pytest.fixture(scope="session")
def daemon_of() -> Iterator[Callable[[str], Daemon]]:
    """The daemon of a kind, connected once; skips where there is none."""
    known: dict[str, Daemon] = {}

    def get(kind: str) -> Daemon:
        if kind not in known:
            engine = engine_of(kind)
            try:
                client = daemon.connect(kind, daemon.socket_of(engine))
            except daemon.Unreachable as error:
                if kind in os.environ.get("PARO_REQUIRE_ENGINES", ""):
                    raise
                pytest.skip(str(error))
            known[kind] = Daemon(engine, client, stub_image(engine, client))
        return known[kind]

    yield get
    for one in known.values():
        one.client.close()


def stub_image(engine: Engine, client) -> str:
    """The id of the stub's image: there already, taken from docker, or built."""
    with contextlib.suppress(UsageError):
        return daemon.image_id(engine, IMAGE)
    if engine.kind == "podman":
        docker = daemon.connect("docker", daemon.socket_of(engine_of("docker")))
        built = stub_image(engine_of("docker"), docker)
        client.images.load(b"".join(docker.images.get(built).save(named=IMAGE)))
        return daemon.image_id(engine, IMAGE)
    with DOCKERFILE.open("rb") as text:
        image, _ = client.images.build(fileobj=text, tag=IMAGE, network_mode="host", rm=True)
    return image.id


@pytest.fixture(params=["docker", "podman"])
def box(request, daemon_of) -> Daemon:
    """Each engine in turn."""
    return daemon_of(request.param)


@pytest.fixture
def docker_box(daemon_of) -> Daemon:
    return daemon_of("docker")


@pytest.fixture
def stub_plan(plan_of) -> Callable[..., ServePlan]:
    """A plan that starts the stub in a container, with a fault of its own; further arguments change the container."""

    def make(box: Daemon, fault: str = "", python: str = PYTHON, **container: object) -> ServePlan:
        network = container.get("network", "bridge")
        plan = plan_of(
            *("+variant=int5_i8_pg_zpe", "box=cpu", f"engine={box.kind}", f"box.port={free_port()}"),
            *(f"box.container.python={python}", f"box.container.network={network}"),
        )
        for mount in plan.container.mounts:
            Path(mount.source).mkdir(parents=True, exist_ok=True)
        tail = plan.argv[plan.argv.index("--model") :]
        argv = (python, "/stub/stub_server.py", *tail, "--fault", fault, "--plugin-sha256", plan.plugin.sha256)
        mounts = (*plan.container.mounts, Mount(str(STUB.parent), "/stub", read_only=True))
        changed = {"image": IMAGE, "image_id": box.image_id, "mounts": mounts, **container}
        return replace(plan, argv=argv, container=replace(plan.container, **changed))

    return make
