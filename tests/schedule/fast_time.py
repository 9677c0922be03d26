"""Time that passes when everybody who takes part waits for it: nights in seconds, the same in every run.

A process or thread that takes part joins by a name that was announced before it started, so that no time passes while
it starts. Time stands still while any of them works, however slow the machine is.
"""

from __future__ import annotations

import json
import math
import os
import socket
import socketserver
import threading
from datetime import UTC, datetime, timedelta

from orchestrator.schedule.clock import Clock


class TimeServer:
    """Gives the time on a port of loopback. `steady_s` never jumps; `wall_s` is that and `offset_s`."""

    def __init__(self, start: datetime) -> None:
        self.steady_s, self.offset_s, self.boot_id = 1000.0, start.timestamp() - 1000.0, "boot 1"
        self._lock = threading.Condition()
        self._working: dict[str, float | None] = {}  # name -> waits until; None: it works
        time_server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                names: set[str] = set()
                try:
                    for line in self.rfile:
                        asked = json.loads(line)
                        names.add(asked.get("name") or "")
                        answer = time_server._answer(asked)
                        self.wfile.write(json.dumps(answer).encode() + b"\n")
                except (OSError, ValueError):
                    pass
                finally:  # killed, or done
                    for name in names - {""}:
                        time_server.leave(name)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address = True, True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def leave(self, name: str) -> None:
        with self._lock:
            self._working.pop(name, None)
            self._advance()

    def reboot(self, boot_id: str) -> None:
        """The steady clock begins anew; the wall clock is kept by its battery."""
        with self._lock:
            self.offset_s += self.steady_s - 5.0
            self.steady_s, self.boot_id = 5.0, boot_id

    def _answer(self, asked: dict) -> dict:
        name = asked.get("name", "")
        with self._lock:
            if "announced" in asked and (asked["do"] == "expect" or asked["announced"] in self._working):
                self._working[asked["announced"]] = None
                self._lock.notify_all()
            elif asked["do"] == "wait":
                boot = self.boot_id
                until = math.inf if asked["seconds"] is None else self.steady_s + asked["seconds"]
                self._working[name] = until
                self._advance()
                self._lock.wait_for(lambda: self._working.get(name, 0) is None or boot != self.boot_id)
            known = asked.get("about") in self._working
            return {
                "known": known,
                "steady_s": self.steady_s,
                "wall_s": self.steady_s + self.offset_s,
                "boot_id": self.boot_id,
            }

    def _advance(self) -> None:
        """If everybody waits, it is the time of whoever waits for the shortest."""
        if not self._working or None in self._working.values():
            return
        soonest = min(self._working.values())
        if soonest < math.inf:
            self.steady_s = max(self.steady_s, soonest)
            for name, until in self._working.items():
                if until <= self.steady_s:
                    self._working[name] = None
            self._lock.notify_all()


class FastClock(Clock):
    """The clock of one who takes part as `name`; "" only asks for the time."""

    def __init__(self, port: int, name: str = "") -> None:
        self.port, self.name = port, name
        self._own = threading.local()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._ask("now")["wall_s"], UTC)

    def iso(self) -> str:
        return self.now().isoformat(timespec="milliseconds")

    def steady_s(self) -> float:
        return self._ask("now")["steady_s"]

    def boot_id(self) -> str:
        return self._ask("now")["boot_id"]

    def wait(self, seconds: float | None, wake: threading.Event | None = None) -> None:
        self._ask("wait", name=self.name, seconds=seconds)

    def wait_until(self, moment: datetime) -> None:
        self.wait(max(0.0, (moment - self.now()) / timedelta(seconds=1)))

    def expect(self, name: str) -> None:
        """From now on time waits for this one, too."""
        self._ask("expect", who=name)

    def wake(self, name: str) -> None:
        """It is about to be roused from its waiting by other means than time."""
        self._ask("wake", who=name)

    def knows(self, name: str) -> bool:
        """Whether this one takes part still."""
        return self._ask("look", about=name)["known"]

    def leave(self) -> None:
        """This thread takes part no more."""
        if stream := getattr(self._own, "stream", None):
            self._own.socket.shutdown(socket.SHUT_RDWR)  # a process forked since then has it open, too
            stream.close()
            self._own.socket.close()
            self._own.stream = None

    def _ask(self, do: str, who: str = "", **more: object) -> dict:
        if getattr(self._own, "stream", None) is None or self._own.pid != os.getpid():
            self._own.socket = socket.create_connection(("127.0.0.1", self.port))
            self._own.stream, self._own.pid = self._own.socket.makefile("rwb"), os.getpid()
            if self.name:
                self._own.stream.write(json.dumps({"do": "join", "name": self.name}).encode() + b"\n")
                self._own.stream.flush()
                self._own.stream.readline()
        message = {"do": do, **more} | ({"announced": who} if who else {})
        self._own.stream.write(json.dumps(message).encode() + b"\n")
        self._own.stream.flush()
        return json.loads(self._own.stream.readline())
