"""vLLM in a container of docker or podman: never privileged, labelled with the boot's nonce, found again by it.

Only containers that carry both our label and the nonce are ever stopped or removed. The image's own entrypoint does
not run: the plan's argv is all that starts.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.containers import Container as DockerContainer
from docker.types import LogConfig, Mount, Ulimit

from orchestrator.engines import LOG_NAME, daemon, look
from orchestrator.engines.daemon import Unreachable, patiently
from orchestrator.engines.process import kill_processes_of, role
from orchestrator.errors import BootError, UsageError
from orchestrator.places import ATTEST, Container
from orchestrator.plan import NONCE_VARIABLE, ServePlan
from orchestrator.records import EnvReading, write_bytes
from orchestrator.schema import Engine

LABEL = "paro-orchestrator"
ALIVE = frozenset({"created", "initialized", "running", "paused"})
LOOK_S = 30
FOLLOW_S = 5
LOG_READS = 10
REMOVE_S = 30
LOG_DRIVER = {"docker": "json-file", "podman": "k8s-file"}
INITS = (Path("/usr/bin/catatonit"), Path("/usr/libexec/podman/catatonit"))


class ContainerServer:
    """One started server."""

    def __init__(
        self,
        plan: ServePlan,
        engine: Engine,
        argv: Sequence[str],
        env: Mapping[str, str],
        nonce: str,
        directory: Path,
        labels: Mapping[str, str],
    ) -> None:
        """Start it. Raises UsageError for what this machine lacks, BootError where the engine refuses."""
        self.nonce, self._asked = nonce, plan.container
        self._kind, self._socket = engine.kind, daemon.socket_of(engine)
        self._python = argv[0]
        self._log_path = directory / LOG_NAME
        self._log_path.touch()
        self._ending = threading.Event()
        self._client = daemon.connect(self._kind, self._socket)
        pinned = plan.container.image_id or daemon.image_id(engine, plan.container.image)
        mounts = _mounts(plan.container, env, directory)
        try:
            self._container = self._client.containers.create(
                pinned,
                entrypoint=[argv[0]],
                command=list(argv[1:]),
                name=f"paro-{nonce}",
                environment=dict(env),
                labels=labels_of(nonce, labels),
                working_dir=env["HOME"],
                user="0:0" if daemon.is_rootless(self._client) else f"{os.getuid()}:{os.getgid()}",
                mounts=mounts,
                **_resources(plan, self._kind),
            )
            self._container.start()
        except ImageNotFound:
            raise UsageError(
                f"box.container.image: {self._kind} no longer has {plan.container.image} as {pinned}; "
                f"run `{daemon.how_to_get(self._kind, plan.container.image)}`"
            ) from None
        except APIError as error:
            raise BootError(f"{self._kind} does not start {plan.container.image}: {_line(error)}") from None
        except daemon.transport_errors() as error:
            raise BootError(f"{self._kind} stopped answering while it started a container: {_line(error)}") from None
        self._follower = threading.Thread(target=self._follow, name=f"log of {nonce}", daemon=True)
        self._follower.start()

    def exit_reason(self) -> str | None:
        """None while the container lives; afterwards the log is complete.

        A daemon that is away is waited for: a container that cannot be seen is not dead.
        """
        try:
            state = self._patiently(self._state)
            if state["Status"] not in ALIVE:
                self._complete_log()
        except NotFound:
            return "ended: its container was removed by somebody else"
        except Unreachable as error:
            return f"cannot be watched any more: {error}"
        return None if state["Status"] in ALIVE else _how_it_ended(state, self._kind, self._asked.memory_gib)

    def readings(self, keys: Iterable[str]) -> tuple[EnvReading, ...]:
        """The environment of each process of the boot, restricted to `keys`; pids are the container's own."""
        return tuple(
            EnvReading(p["pid"], role(p["command"], p["name"]), p["env"]) for p in self._processes(sorted(keys))
        )

    def inspected(self) -> dict[str, str]:
        """The environment that the engine says it gave, the image's own variables included; empty where it is gone."""
        try:
            config = self._patiently(lambda: self._client.api.inspect_container(self._container.id))["Config"]
        except NotFound:
            return {}
        return dict(item.partition("=")[::2] for item in config["Env"])

    def host_pid(self) -> int | None:
        """None where the daemon numbers processes otherwise: that pid is in no control group of the container."""
        with contextlib.suppress(APIError, OSError, Unreachable):
            pid = int(self._patiently(self._state)["Pid"])
            return pid if self._container.id in Path(f"/proc/{pid}/cgroup").read_text() else None

    def peak_rss_bytes(self) -> int:
        """Sum over the boot's processes of each one's largest resident set so far; shared pages count in each."""
        return sum(p["peak_rss_bytes"] for p in self._processes([]))

    def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to end, then SIGKILL; the log completed, the container removed, nothing of it left."""
        self._ending.set()
        try:
            with contextlib.suppress(APIError):  # gone, or not to be stopped: `reap` ends it the hard way
                self._patiently(lambda: self._container.stop(timeout=round(grace_s)))
            try:
                self._complete_log()
            finally:  # also where the log's disk is full
                reap(self._kind, self._socket, self.nonce)
        except Unreachable as error:
            kill_processes_of(self.nonce)
            raise BootError(f"{error}; container paro-{self.nonce} is removed by the next start") from None
        finally:
            self._client.close()
        kill_processes_of(self.nonce)

    def _patiently(self, call):
        return patiently(call, self._kind, self._socket)

    def _state(self) -> dict[str, Any]:
        return self._client.api.inspect_container(self._container.id)["State"]

    def _processes(self, keys: list[str]) -> list[dict[str, Any]]:
        """What `look` sees; nothing where the container ended, or does not answer in time."""
        look_source = ("-I", "-S", "-c", inspect.getsource(look))
        command = [self._python, *look_source, NONCE_VARIABLE, self.nonce, json.dumps(keys)]
        answers: list[list[dict[str, Any]]] = []

        def ask() -> None:
            with contextlib.suppress(APIError, ValueError, *daemon.transport_errors()):
                done = self._container.exec_run(command, demux=True)
                answers.append(json.loads(done.output[0] or b"[]"))

        thread = threading.Thread(target=ask, daemon=True)  # the SDK reads an exec without a time limit
        thread.start()
        thread.join(LOOK_S)
        return answers[0] if answers else []

    def _follow(self) -> None:
        """Write the log as it grows; one that ends while the container lives (a daemon restart) is resumed."""
        while True:
            with contextlib.suppress(APIError, Unreachable, *daemon.transport_errors()):
                container = daemon.connect(self._kind, self._socket).containers.get(self._container.id)
                self._append(container.logs(stream=True, follow=True))  # from its beginning, each time
                container.reload()
                if container.status not in ALIVE:
                    return
            if self._ending.wait(daemon.RETRY_S):
                return

    def _append(self, chunks: Iterable[bytes]) -> None:
        """Write what of the whole log, given from its beginning, is not in the file yet."""
        known = self._log_path.stat().st_size
        with self._log_path.open("ab") as log:
            for chunk in chunks:
                log.write(chunk[known:])
                log.flush()
                known = max(0, known - len(chunk))

    def _complete_log(self) -> None:
        """Replace what was followed by the whole log of a container that ended.

        A follow can end early without a word, podman's can break lines, and the last output can come late: read until
        no more comes. What the engine lost by rotation is kept.
        """
        self._ending.set()
        self._follower.join(FOLLOW_S)
        last, whole = b"", b""
        with contextlib.suppress(APIError):
            for _ in range(LOG_READS):
                last, whole = whole, self._patiently(self._container.logs)
                if whole and whole == last:
                    break
                time.sleep(0.1)
        followed = self._log_path.read_bytes()
        if len(whole.replace(b"\n", b"")) >= len(followed.replace(b"\n", b"")):
            write_bytes(self._log_path, whole)


def reap(kind: str, socket: str, nonce: str) -> int:
    """Remove the containers that carry our label with this nonce; returns how many there were.

    Raises Unreachable where the daemon is away, BootError where a container does not go.
    """
    client = daemon.connect(kind, socket)
    removed: set[str] = set()
    deadline = time.monotonic() + REMOVE_S
    while found := patiently(lambda: containers_of(client, nonce), kind, socket):
        if time.monotonic() > deadline:
            raise BootError(f"{kind} does not remove {found[0].name}; look at it with `{kind} inspect {found[0].name}`")
        for container in found:
            removed.add(container.id)
            with contextlib.suppress(APIError):  # gone already, or being removed: looked at again
                patiently(lambda c=container: c.remove(force=True, v=True), kind, socket)
        time.sleep(0.1)
    client.close()
    return len(removed)


def containers_of(client: Any, nonce: str) -> list[DockerContainer]:
    """Every container, dead or alive, with our label and this nonce."""
    return client.containers.list(all=True, ignore_removed=True, filters={"label": f"{LABEL}.nonce={nonce}"})


def labels_of(nonce: str, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a boot's container: its nonce, and whose it is."""
    return {f"{LABEL}.{name}": value for name, value in {**labels, "nonce": nonce}.items()}


def _mounts(asked: Container, env: Mapping[str, str], directory: Path) -> list[Mount]:
    """The plan's mounts and the boot's own directory for attestations. Raises UsageError for a source that is missing.

    Podman would make a missing source as an empty directory, owned by root.
    """
    mounts = [Mount(ATTEST, str(directory / "attest"), type="bind")]
    for mount in asked.mounts:
        source = Path(mount.source)
        if not mount.read_only:
            below = env["HOME"].removeprefix(mount.target)
            (source / below.lstrip("/") if below != env["HOME"] else source).mkdir(parents=True, exist_ok=True)
        if not source.exists():
            raise UsageError(f"{source}, to be mounted at {mount.target}, does not exist; run `prepare` first")
        mounts.append(Mount(mount.target, str(source), type="bind", read_only=mount.read_only))
    return mounts


def _resources(plan: ServePlan, kind: str) -> dict[str, Any]:
    asked = plan.container
    memory = None if asked.memory_gib is None else int(asked.memory_gib * 2**30)
    published = asked.network == "bridge"
    return {
        "network_mode": asked.network,
        "ports": {f"{plan.port}/tcp": (plan.host, plan.port)} if published else None,
        "ipc_mode": asked.ipc,
        "shm_size": None if asked.ipc == "host" else asked.shm_size_mib * 2**20,
        "devices": [f"{device}:{device}:rwm" for device in asked.devices],
        "group_add": _groups(asked.groups),
        "ulimits": [Ulimit(name=name, soft=value, hard=value) for name, value in asked.ulimits.items()],
        "cap_add": list(asked.cap_add),
        "security_opt": list(asked.security_opt),
        "mem_limit": memory,
        "memswap_limit": memory,  # the same: no swap, which would turn a lack of memory into a slow server
        "log_config": LogConfig(type=LOG_DRIVER[kind]),
        # Without an init a SIGTERM while loading is ignored, and an engine that failed can leave pid 1 waiting.
        "init": kind == "docker" or any(path.exists() for path in INITS),
    }


def _groups(groups: Sequence[str]) -> list[str]:
    """As the plan resolved them: numbers for docker, keep-groups for podman."""
    for group in groups:
        if not group.isdigit() and group != "keep-groups":
            raise UsageError(f"box.container.groups: this machine has no group {group}; correct the box")
    return list(groups)


def _how_it_ended(state: Mapping[str, Any], kind: str, memory_gib: float | None) -> str:
    """From the inspected state. An init reports a child's signal as 128 + its number, as a shell does."""
    code = int(state.get("ExitCode", 0))
    limit = f"the limit of its container is {memory_gib:g} GiB" if memory_gib else "the machine's"
    if state.get("OOMKilled"):
        return f"ran out of memory ({limit})"
    if code == 128 + signal.SIGKILL and kind == "podman" and memory_gib:  # podman 4 does not say OOMKilled
        return f"killed by SIGKILL, most likely out of memory ({limit})"
    if code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exited with status {code}" + (f" ({state['Error']})" if state.get("Error") else "")


def _line(error: Exception) -> str:
    return " ".join(str(getattr(error, "explanation", None) or error).split())
