"""Time that passes when everybody who takes part waits for it: nights in seconds, the same in every run.

A process or thread that takes part joins by a name that was announced before it started, so that no time passes while
it starts. Time stands still while any of them works, however slow the machine is, and from when one is roused by a
signal until it has left.
"""

from __future__ import annotations

import json
import math
import socket
import socketserver
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from orchestrator.schedule.clock import Clock

GONE_S = 0.2  # how often it is looked whether one who waits is there still
STUCK_S = 240.0  # of real time in which no time passes: somebody is waited for who never comes


class TimeServer:
    """Gives the time on a port of loopback. `steady_s` never jumps; `wall_s` is that and `offset_s`."""

    def __init__(self, start: datetime) -> None:
        self.steady_s, self.offset_s, self.boot_id = 1000.0, start.timestamp() - 1000.0, "boot 1"
        self._lock = threading.Condition()
        self._working: dict[str, float | None] = {}  # name -> waits until; None: it works
        self._roused: set[str] = set()
        self._joined: dict[str, Any] = {}  # name -> its latest connection
        time_server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                names: set[str] = set()
                try:
                    for line in self.rfile:
                        asked = json.loads(line)
                        names.add(asked.get("name") or "")
                        answer = time_server._answer(asked, self)
                        self.wfile.write(json.dumps(answer).encode() + b"\n")
                except (OSError, ValueError):
                    pass
                finally:  # killed, or done
                    for name in names - {""}:
                        time_server._leave(name, self)

            def is_closed(self) -> bool:
                try:
                    return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                except BlockingIOError:
                    return False
                except OSError:
                    return True

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address = True, True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _leave(self, name: str, connection: Any) -> None:
        """It takes part no more, unless it has another connection by now, or one of this name is awaited."""
        with self._lock:
            if self._joined.get(name) is connection:
                for kept in (self._working, self._joined):
                    kept.pop(name, None)
                self._roused.discard(name)
                self._lock.notify_all()
                self._advance()

    def reboot(self, boot_id: str) -> None:
        """The steady clock begins anew; the wall clock is kept by its battery."""
        with self._lock:
            self.offset_s += self.steady_s - 5.0
            self.steady_s, self.boot_id = 5.0, boot_id

    def _answer(self, asked: dict, connection: Any) -> dict:
        name, about = asked.get("name", ""), asked.get("about")
        with self._lock:
            match asked["do"]:
                case "join":
                    self._working[name], self._joined[name] = None, connection
                    self._lock.notify_all()
                case "expect":
                    self._working[about] = None
                    if self._joined.get(about) is not connection:  # of one before it, which may be about to leave
                        self._joined.pop(about, None)
                    self._lock.notify_all()
                case "rouse" if about in self._working:
                    self._roused.add(about)
                case "wait":
                    boot = self.boot_id
                    until = math.inf if asked["seconds"] is None else self.steady_s + asked["seconds"]
                    self._working[name] = until
                    self._advance()

                    def is_over() -> bool:
                        return self._working.get(name) is None or boot != self.boot_id

                    since, at_s = time.monotonic(), self.steady_s
                    while not self._lock.wait_for(is_over, GONE_S) and not connection.is_closed():
                        if self.steady_s != at_s:
                            since, at_s = time.monotonic(), self.steady_s
                        if time.monotonic() - since > STUCK_S:
                            working = {one for one, until in self._working.items() if until is None}
                            return {"stuck": sorted(working | self._roused)}
            known = about in self._working
            return {
                "known": known,
                "steady_s": self.steady_s,
                "wall_s": self.steady_s + self.offset_s,
                "boot_id": self.boot_id,
            }

    def _advance(self) -> None:
        """If everybody waits, it is the time of whoever waits for the shortest."""
        if not self._working or None in self._working.values() or self._roused:
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
        self._abandoned: list[object] = []

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._ask("now")["wall_s"], UTC)

    def iso(self) -> str:
        return self.now().isoformat(timespec="milliseconds")

    def steady_s(self) -> float:
        return self._ask("now")["steady_s"]

    def boot_id(self) -> str:
        return self._ask("now")["boot_id"]

    def wait(self, seconds: float | None, wake: threading.Event | None = None) -> None:
        """Raises RuntimeError where time stands still, with the names of those it waits for."""
        self._ask("wait", name=self.name, seconds=seconds)

    def wait_until(self, moment: datetime) -> None:
        self.wait(max(0.0, (moment - self.now()) / timedelta(seconds=1)))

    def expect(self, name: str) -> None:
        """From now on time waits for this one, too."""
        self._ask("expect", about=name)

    def rouse(self, name: str) -> None:
        """It is about to be sent a signal: time waits for it until it has left, whatever it waits for itself."""
        self._ask("rouse", about=name)

    def knows(self, name: str) -> bool:
        """Whether this one takes part still."""
        return self._ask("look", about=name)["known"]

    def leave(self) -> None:
        """This thread takes part no more."""
        if stream := getattr(self._own, "stream", None):
            self._own.socket.shutdown(socket.SHUT_RDWR)
            stream.close()
            self._own.socket.close()
            self._own.stream = None

    def _ask(self, do: str, **more: object) -> dict:
        if getattr(self._own, "stream", None) is None:
            self._own.socket = socket.create_connection(("127.0.0.1", self.port))
            self._own.stream = self._own.socket.makefile("rwb")
            if self.name:
                self._exchange({"do": "join", "name": self.name})
        try:
            return self._exchange({"do": do, **more})
        except KeyboardInterrupt:  # its answer may come yet: what is asked next is asked on another connection
            self._abandoned.append((self._own.socket, self._own.stream))
            self._own.stream = None
            self.now()  # joins anew
            raise

    def _exchange(self, message: dict) -> dict:
        self._own.stream.write(json.dumps(message).encode() + b"\n")
        self._own.stream.flush()
        answer = json.loads(self._own.stream.readline())
        if "stuck" in answer:
            raise RuntimeError(f"no time has passed for {STUCK_S:.0f} s: it waits for {answer['stuck']}")
        return answer
