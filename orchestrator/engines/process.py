"""vLLM as processes of this machine: a session of its own, found again by the boot's nonce.

Every process of a boot carries the nonce in its environment, so the ones that left the process group, or outlived
an orchestrator that was killed, are found too. Nothing without the nonce is ever signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from orchestrator.errors import BootError
from orchestrator.plan import NONCE_VARIABLE
from orchestrator.records import EnvReading

KILL_WAIT_S = 10
INITS = ("docker-init", "catatonit", "tini")  # the first process of a container


class ProcessServer:
    """One started server."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], nonce: str, log_path: Path) -> None:
        """Start it. Raises BootError where the program cannot be executed."""
        self.nonce = nonce
        Path(env["HOME"]).mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    list(argv),
                    env=dict(env),
                    cwd=env["HOME"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise BootError(
                    f"{argv[0]} does not start ({error.strerror}); name another with engine.python="
                ) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def host_pid(self) -> int:
        return self._process.pid

    def exit_reason(self) -> str | None:
        """None while the server's first process lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def readings(self, keys: Iterable[str]) -> tuple[EnvReading, ...]:
        """The environment of each process of the boot, restricted to `keys`, as the kernel has it."""
        wanted = set(keys)
        found = []
        for process in processes_of(self.nonce):
            try:
                env = process.environ()
                words = " ".join(process.cmdline())
                kept = {k: v for k, v in env.items() if k in wanted}
                found.append(EnvReading(process.pid, role(words, process.name()), kept))
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return tuple(found)

    def inspected(self) -> None:
        """There is no container between the plan and the process."""
        return

    def peak_rss_bytes(self) -> int:
        """Sum over the boot's processes of each one's largest resident set so far; shared pages count in each."""
        total = 0
        for process in processes_of(self.nonce):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
            total += int(peaks[0]) * 1024 if peaks else 0
        return total

    def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to end, then SIGKILL for all that is left. Raises BootError if anything survives."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(KILL_WAIT_S)
        kill_processes_of(self.nonce)


def processes_of(nonce: str) -> list[psutil.Process]:
    """Every live process whose environment carries this boot's nonce."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(NONCE_VARIABLE) == nonce:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_first(process: psutil.Process) -> bool:
    """Whether it is the one that ProcessServer started: that leads the session, and its children only join it."""
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def kill_processes_of(nonce: str) -> int:
    """SIGKILL what is left of a boot; returns how many there were. Raises BootError if one cannot be ended."""
    killed = 0
    deadline = time.monotonic() + KILL_WAIT_S
    while left := processes_of(nonce):
        if time.monotonic() > deadline:
            raise BootError(f"processes {[p.pid for p in left]} of boot {nonce} do not die; look at them with ps")
        for process in left:
            try:
                process.kill()
                killed += 1
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=2)
    return killed


def role(command: str, name: str) -> str:
    """What a process is, from its command line: vLLM names its engine core and workers. Else its short name."""
    if name in INITS:  # its command line is that of the server it starts
        return "init"
    for mark, what in (
        ("EngineCore", "engine_core"),
        ("Worker", "worker"),
        ("api_server", "api_server"),
        ("compile_worker", "compiler"),
    ):
        if mark in command:
            return what
    return name
