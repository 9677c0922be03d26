"""One boot of a plan: clear port, own process, nonce, evidence; stopped whatever happens."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from orchestrator import compile_cache, engines, evidence, interrupts, journal, kernel_log, owner, probe
from orchestrator.engines import Server, daemon
from orchestrator.errors import BootError, OrchestratorError, UsageError
from orchestrator.plan import ServePlan, masked, secrets_of, with_nonce
from orchestrator.records import Boot, EnvReading, Target, write_bytes
from orchestrator.schema import Engine

POLL_S = 0.25
SERVERS = frozenset({"api_server", "engine_core", "worker"})  # roles that live as long as the boot
FAILED_ENGINE_S = 20  # for a server whose engine failed to end by itself, which it does not always

_opened: list[Path] = []  # the directories of this process's boots


@dataclass
class Running:
    """A server that is up. `boot` is the record so far; `serving` completes it when the server is down.

    `pid` is its first process on this machine; None where that cannot be told.
    """

    target: Target
    boot: Boot
    pid: int | None = None


def check_port(host: str, port: int) -> None:
    """Raises UsageError where something listens on the port, or it cannot be bound."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except socket.gaierror as error:
            raise UsageError(f"box.host: {host!r} is no address of this machine ({error.strerror})") from None
        except OSError as error:
            raise UsageError(
                f"box.port: {host}:{port} cannot be used ({error.strerror}); stop its owner, or set box.port=N"
            ) from None


@contextmanager
def serving(plan: ServePlan, engine: Engine, purpose: str, state: Path) -> Iterator[Running]:
    """Boot the plan and yield it once it is ready; afterwards nothing of it is left and `Running.boot` is complete.

    Faults that make a boot unusable but let it serve (a variable that did not arrive, a compile on a warm boot) are
    the record's `reasons` with status "invalid". Raises BootError where it does not come up, UsageError for a taken
    port or a compile cache of another plugin build.
    """
    check_port(plan.host, plan.port)
    secrets = secrets_of(plan, os.environ)
    cache_dir = Path(plan.cache_dir)
    compile_cache.require_own(cache_dir, plan.plugin.sha256)
    cache_state = compile_cache.state(cache_dir)
    before = compile_cache.compiled(cache_dir)
    nonce = journal.new_nonce()
    socket_url = daemon.socket_of(engine) if plan.container else None
    labels = {"box": plan.box, "purpose": purpose, "owner": str(owner.current().pid)}
    server: Server | None = None
    nothing_started = False
    with kernel_log.Watch() as kernel, interrupts.once() as interrupted:
        directory = journal.open_boot(state, nonce, purpose, plan.fingerprint, engine.kind, socket_url)
        _opened.append(directory)
        try:
            log_path = directory / engines.LOG_NAME
            argv, env, name = with_nonce(plan, nonce, directory / "attest", secrets)
            boot = Boot(nonce, purpose, plan.fingerprint, cache_state, _now(), log_path=str(log_path))
            started = time.monotonic()
            server = engines.start(plan, engine, argv, env, nonce, directory, labels)
            max_len = _wait_ready(plan, server, name, log_path, engine.ready_timeout_s, kernel, secrets)
            boot = inspected(plan, replace(boot, boot_s=time.monotonic() - started), server, directory)
            running = Running(Target(f"http://{plan.host}:{plan.port}", name, max_len), boot, server.host_pid())
            yield running
            rss: int | None = server.peak_rss_bytes()
            faults = _ended(server, boot.processes) + _gpu_faults(kernel)
        except UsageError:
            nothing_started = server is None
            raise
        finally:
            interrupted.held = True  # a second Ctrl-C must not leave the server running
            if server is not None:
                if interrupted.noted:
                    print(f"stopping the server, at most {engine.stop_grace_s:g} s", file=sys.stderr, flush=True)
                server.stop(engine.stop_grace_s)
                _mask_log(directory / engines.LOG_NAME, secrets)
                journal.close_boot(directory)
            else:
                with suppress(OrchestratorError):  # what cannot be ended now stays in the journal
                    if not nothing_started:
                        engines.reap(engine.kind, socket_url, nonce)
                    journal.close_boot(directory)
    rss = None if faults else rss  # the sum lacks what ended
    fresh = compile_cache.compiled_since(cache_dir, before)
    if cache_state == "warm" and fresh:
        faults.append(f"a warm boot compiled {len(fresh)} files, for example {fresh[0]}")
    running.boot = _with_faults(replace(running.boot, rss_peak_bytes=rss, compiled_files=len(fresh)), faults)


def left_open() -> list[str]:
    """The nonces of this process's boots of which something may still run, as the journal has it."""
    return [path.name for path in _opened if not json.loads((path / "journal.json").read_text())["ended"]]


def _ended(server: Server, at_ready: Sequence[EnvReading]) -> list[str]:
    """Which of the server's processes ended while it was measured: its first one, or any that was there when ready."""
    if died := server.exit_reason():
        return [f"the server ended while it was measured ({died})"]
    left = {reading.pid for reading in server.readings(())}
    gone = [
        f"{reading.role} (pid {reading.pid})"
        for reading in at_ready
        if reading.role in SERVERS and reading.pid not in left
    ]
    return [f"ended while the server was measured: {', '.join(gone)}"] if gone else []


def _gpu_faults(kernel: kernel_log.Watch) -> list[str]:
    return [f"the kernel log has a GPU fault: {line[:160]}" for line in kernel.gpu_faults()[:1]]


def _wait_ready(
    plan: ServePlan,
    server: Server,
    name: str,
    log_path: Path,
    timeout_s: float,
    kernel: kernel_log.Watch,
    secrets: Mapping[str, str],
) -> int:
    """Until our process is alive, /health is 200, /v1/models carries the nonce and the KV line is there.

    Returns the model's window in tokens. Raises BootError with the end of the log.
    """
    deadline = time.monotonic() + timeout_s
    base = f"http://{plan.host}:{plan.port}"
    while True:
        reason = server.exit_reason()
        if evidence.engine_failed(_read(log_path)):
            deadline = min(deadline, time.monotonic() + FAILED_ENGINE_S)
        if reason is None and time.monotonic() > deadline:
            stuck = evidence.engine_failed(_read(log_path))
            reason = "did not end, though its engine failed" if stuck else f"was not ready after {timeout_s:.0f} s"
        if reason is not None:
            log = masked(_read(log_path), secrets)
            cause = kernel.hint() or evidence.hint(log)
            line = f"the server of variant {plan.variant} {reason}" + (f": {cause}" if cause else "")
            raise BootError(f"{line}; its log: {log_path}", evidence.last_useful_lines(log), log_path)
        if probe.body(f"{base}/health") is not None and evidence.kv_tokens(_read(log_path)) is not None:
            windows = probe.served_windows(base)
            if name in windows:
                return windows[name]
            raise BootError(
                f"{base} answers for {', '.join(windows) or 'no model'}, not for this boot; end that server first"
            )
        time.sleep(POLL_S)


def inspected(plan: ServePlan, boot: Boot, server: Server, directory: Path) -> Boot:
    """The boot with what its processes, container, log and plugin prove, and where that is not the plan, invalid."""
    readings, inspected = server.readings(plan.env), server.inspected()
    attestations, damaged = _attestations(directory / "attest")
    faults = [
        *damaged,
        *evidence.env_faults(plan, readings, attestations, inspected),
        *evidence.attestation_faults(plan, boot.nonce, attestations),
        *evidence.marker_faults(plan, _read(Path(boot.log_path))),
    ]
    given = None if inspected is None else {name: inspected[name] for name in plan.env if name in inspected}
    kv = evidence.kv_tokens(_read(Path(boot.log_path))) if boot.cache_state == "warm" else None
    return _with_faults(
        replace(boot, processes=readings, inspected=given, attestations=attestations, kv_tokens=kv), faults
    )


def _attestations(directory: Path) -> tuple[tuple[dict, ...], list[str]]:
    """What the plugin wrote in each process, and a fault for each file that is no attestation: a full disk cuts it."""
    found, faults = [], []
    for path in sorted(directory.glob("attest-*.json")):
        try:
            attestation = json.loads(path.read_text())
        except ValueError:
            attestation = None
        if isinstance(attestation, dict):
            found.append(attestation)
        else:
            faults.append(f"the attestation {path} is damaged; look for a full disk, then boot again")
    return tuple(found), faults


def _with_faults(boot: Boot, faults: list[str]) -> Boot:
    return replace(boot, status="invalid", reasons=(*boot.reasons, *faults)) if faults else boot


def _mask_log(path: Path, secrets: Mapping[str, str]) -> None:
    if any(value in (log := _read(path)) for value in secrets.values()):
        write_bytes(path, masked(log, secrets).encode())


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
