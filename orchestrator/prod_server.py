"""The server of a prod slot: started to outlive its starter, found again by the nonce of its boot, proven by name."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from orchestrator import devices, engines, evidence, journal, probe, slot
from orchestrator.boot import check_port
from orchestrator.engines import Server
from orchestrator.engines.process import is_first, processes_of
from orchestrator.errors import BootError, OrchestratorError, UsageError
from orchestrator.labels import counted
from orchestrator.plan import drain_s, masked, secrets_of, with_nonce
from orchestrator.progress import Progress, span
from orchestrator.slot import Slot

POLL_S = 0.25
PORT_WAIT_S = 10  # the kernel may keep the port of a server that has just been stopped
MAX_RESTARTS = 3  # by docker itself
IDLE_READINGS = 2  # in a row: a request may lie between two queues at the moment of one reading


class NotBack(OrchestratorError):
    """Prod should serve and does not; the entry that says so stays."""

    exit_code = 1


def is_healthy(prod: Slot) -> bool:
    """Whether the slot's own boot answers: /health is 200 and /v1/models carries its nonce."""
    return probe.serves(prod.base_url, prod.model)


def is_alive(prod: Slot) -> bool:
    """Whether the slot's boot runs, ready or not. Raises UsageError where its daemon is away.

    Of processes the first one counts: an engine whose API server was killed answers nobody and never will. A container
    that was created and not started, as after a device that was missing, runs nothing.
    """
    if prod.plan.container is None:
        return any(map(is_first, processes_of(prod.nonce)))
    from orchestrator.engines.container import ALIVE

    with _containers(prod) as found:
        running = (ALIVE - {"created", "initialized"}) | {"restarting"}
        return any(container.status in running for container in found)


def condition(prod: Slot) -> str:
    """How the slot's boot is, in words."""
    if is_healthy(prod):
        return "healthy"
    try:
        alive = is_alive(prod)
    except OrchestratorError as error:
        return f"NOT SERVING ({error})"
    if not alive:
        return "NOT SERVING"
    if prod.failed_boots and prod.booting_utc:  # set when a boot begins, and 0 as soon as it is healthy
        return f"booting since {prod.booting_utc}"
    return "NOT SERVING, though its server runs"


def boot(prod: Slot, state: Path, progress: Progress) -> Slot:
    """Start the slot's plan and serve it from now on; returns the slot as it now serves. Raises as `come_up` does."""
    fresh, _ = come_up(prod, state, progress, slot.save)
    keep_up(fresh)
    return fresh


def bring_back(prod: Slot, state: Path, progress: Progress) -> str:
    """Prod serves, proven by its name, and the displacement is closed; returns the line that says so.

    Raises NotBack where it does not come up.
    """
    try:
        if not is_healthy(prod):
            prod = _serve_again(prod, state, progress)
    except OrchestratorError as error:
        raise NotBack(
            f"prod of box {prod.box.name} is NOT back: {error}; then run `python -m orchestrator guard`", error.detail
        ) from error
    except KeyboardInterrupt:
        print("prod is not back yet; run `python -m orchestrator guard`", file=sys.stderr)
        raise
    if prod.failed_boots:
        slot.save(state, replace(prod, failed_boots=0))
    slot.close_displacement(state, prod.box.name)
    return line("is back:", prod)


def line(verb: str, prod: Slot) -> str:
    return f"prod of box {prod.box.name} {verb} {prod.plan.variant} at {prod.base_url}, healthy, as {prod.model}"


def _serve_again(prod: Slot, state: Path, progress: Progress) -> Slot:
    if is_alive(prod):  # loading, after a restart by its engine or by a guard that was stopped
        try:
            wait(prod, state, progress)
            return prod
        except OrchestratorError as error:
            progress.note(str(error))
    end(prod)
    return boot(prod, state, progress)


def come_up(prod: Slot, state: Path, progress: Progress, keep: Callable[[Path, Slot], None]) -> tuple[Slot, Server]:
    """Start the slot's plan under a new nonce and wait until it is healthy; `keep` puts the slot on disk.

    The nonce is on disk before the server starts. Raises BootError, with nothing left running, where it does not
    come up, UsageError where the machine is not clear; an interrupted wait leaves it coming up.
    """
    devices.require_clear(prod.box)
    _require_port(prod)
    secrets = secrets_of(prod.plan, os.environ)
    nonce, failed = journal.new_nonce(), prod.failed_boots + 1
    fresh = replace(prod, nonce=nonce, failed_boots=failed, booting_utc=slot.now_utc())
    keep(state, fresh)
    directory = slot.directory(state, fresh)
    (directory / "attest").mkdir(parents=True)
    argv, env, _ = with_nonce(fresh.plan, fresh.nonce, directory / "attest", secrets, fresh.engine.stop_grace_s)
    labels = {"box": fresh.plan.box, "purpose": "prod"}
    try:
        server = engines.start(fresh.plan, fresh.engine, argv, env, fresh.nonce, directory, labels)
    except BootError:  # a container may be there that never ran
        end(fresh)
        raise
    try:
        wait(fresh, state, progress, server)
    except BootError:
        server.stop(fresh.engine.stop_grace_s)
        raise
    fresh = replace(fresh, failed_boots=0, healthy_utc=slot.now_utc())
    keep(state, fresh)
    return fresh, server


def wait(prod: Slot, state: Path, progress: Progress, server: Server | None = None) -> None:
    """Until the boot is healthy. Raises BootError where it ends first, or is not ready by the engine's deadline."""
    started = time.monotonic()
    with progress.stage(f"prod boot of {prod.plan.variant}"):
        while not is_healthy(prod):
            timeout_s = prod.engine.ready_timeout_s
            reason = server.exit_reason() if server else (None if is_alive(prod) else "is gone")
            if reason is None and time.monotonic() - started > timeout_s:
                reason = f"was not ready after {timeout_s:.0f} s"
            if reason is not None:
                log_path = slot.directory(state, prod) / engines.LOG_NAME
                log = log_path.read_text(errors="replace") if log_path.exists() else ""
                log = masked(log, secrets_of(prod.plan, os.environ))
                cause = evidence.hint(log)
                line = f"prod ({prod.plan.variant}) {reason}" + (f": {cause}" if cause else "")
                raise BootError(f"{line}; its log: {log_path}", evidence.last_useful_lines(log), log_path)
            time.sleep(POLL_S)


def drain(prod: Slot, progress: Progress) -> None:
    """Wait until no request runs or waits. Raises UsageError at the box's deadline: prod serves on, untouched."""
    timeout_s = prod.box.drain_timeout_s
    deadline = time.monotonic() + timeout_s
    idle = 0
    with progress.stage(f"drain prod ({prod.plan.variant})") as stage:
        while idle < IDLE_READINGS:
            count = probe.requests_in_flight(prod.base_url)
            if count is None:
                raise UsageError(
                    f"{prod.base_url}/metrics does not say how many requests prod serves, so it is left alone; serve "
                    "it without --disable-log-stats, or stop it with `python -m orchestrator prod stop --now`"
                )
            idle = 0 if count else idle + 1
            if count and time.monotonic() > deadline:
                raise UsageError(
                    f"prod ({prod.plan.variant}) still serves {count} requests after {span(timeout_s)}, so it is left "
                    "alone; try again when it is idle, or raise box.drain_timeout_s"
                )
            stage.note = f"{count} requests in flight"
            time.sleep(POLL_S)


def end(prod: Slot) -> None:
    """SIGTERM, the engine's grace, then SIGKILL; afterwards nothing of the boot is left, else BootError."""
    grace_s = prod.engine.stop_grace_s
    if prod.plan.container is None:
        left = processes_of(prod.nonce)
        inner = {process.pid for process in left}
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() not in inner:  # the server's first process ends the others in order
                    process.terminate()
        psutil.wait_procs(left, timeout=grace_s)
        engines.reap("process", None, prod.nonce)
        return
    from docker.errors import APIError

    from orchestrator.engines import daemon

    socket = daemon.socket_of(prod.engine)
    with _containers(prod) as found:
        for container in found:
            with contextlib.suppress(APIError):  # gone, or not to be stopped: `reap` removes it the hard way
                daemon.patiently(lambda c=container: c.stop(timeout=round(grace_s)), prod.engine.kind, socket)
    engines.reap(prod.engine.kind, socket, prod.nonce)


def ended(prod: Slot) -> str:
    """End the server; returns what became of its requests. vLLM itself does not say which of them it cut."""
    count, began_s = probe.requests_in_flight(prod.base_url), time.monotonic()
    end(prod)
    took_s = time.monotonic() - began_s
    if count is None:
        return f"stop: {prod.plan.variant} did not say how many requests it had left, and ended after {took_s:.1f} s"
    given = f", given {drain_s(prod.engine.stop_grace_s)} s to end and cut after that" if count else ""
    left = counted(count, "request") if count else "no request"
    return f"stop: {prod.plan.variant} had {left} left{given}; it ended after {took_s:.1f} s"


def keep_up(prod: Slot) -> None:
    """Docker starts it again after a crash, a few times, and after a reboot; the guard does what is left.

    vLLM can end with status 0 when a worker dies, which docker takes for a success. Podman takes no such change at all.
    """
    if prod.plan.container is None or prod.engine.kind != "docker":
        return
    with _containers(prod) as found:
        for container in found:
            container.update(restart_policy={"Name": "on-failure", "MaximumRetryCount": MAX_RESTARTS})


def _require_port(prod: Slot) -> None:
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return check_port(prod.plan.host, prod.plan.port)
        except UsageError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


@contextmanager
def _containers(prod: Slot) -> Iterator[list[Any]]:
    """The containers of the slot's boot, dead or alive, while the client is open."""
    from orchestrator.engines import container, daemon

    kind, socket = prod.engine.kind, daemon.socket_of(prod.engine)
    client = daemon.connect(kind, socket)
    try:
        yield daemon.patiently(lambda: container.containers_of(client, prod.nonce), kind, socket)
    finally:
        client.close()
