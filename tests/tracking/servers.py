"""A real `mlflow server` on a PostgreSQL of its own, with proxied artifacts; and a way to it that loses answers."""

from __future__ import annotations

import http.client
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orchestrator.ui import ENVIRONMENT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _postgres(program: str) -> str | None:
    """Debian keeps PostgreSQL's own programs out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (str(found[-1]) if found else None)


class Postgres:
    """One cluster on a Unix socket, run as a user that is not root: initdb refuses root."""

    def __init__(self) -> None:
        programs = [_postgres(name) for name in ("initdb", "pg_ctl")]
        if None in programs:
            if "PARO_REQUIRE_POSTGRES" in os.environ:
                pytest.fail("there is no PostgreSQL")
            pytest.skip("there is no PostgreSQL: apt-get install postgresql")
        initdb, self._control = programs
        self._root = Path(tempfile.mkdtemp(prefix="pg"))  # short: the path of a socket has at most 107 bytes
        self._as = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(self._root, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._data = self._root / "data"
        self._run(initdb, "--pgdata", self._data, "--username", "mlflow", "--auth", "trust", "--no-sync")
        options = f"-F -c listen_addresses='' -c unix_socket_directories={self._root}"
        self._run(self._control, "-D", self._data, "-l", self._root / "log", "-o", options, "-w", "start")
        self.uri = f"postgresql://mlflow@/postgres?host={self._root}"

    def stop(self) -> None:
        self._run(self._control, "-D", self._data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._root, ignore_errors=True)

    def _run(self, *command: object) -> None:
        words = [str(word) for word in command]
        log = self._root / "said"
        with log.open("a") as said:  # a file: the server keeps what it inherits open, and a pipe would never end
            done = subprocess.run(words, stdout=said, stderr=said, timeout=120, cwd="/", check=False, **self._as)
        assert done.returncode == 0, log.read_text()


class Server:
    """`mlflow server`; after a `kill`, `start` brings it back at the same port with the same store."""

    def __init__(self, backend: str, root: Path) -> None:
        self.backend = backend
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = root / "server.log"
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend-store-uri", backend, "--artifacts-destination", str(root / "artifacts"), "--workers", "1"),
        ]
        self.start()

    def start(self) -> None:
        environment = os.environ | ENVIRONMENT
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 300
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.1)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Lossy:
    """A proxy to a server. `loses` is asked for each request, by its number from 1: the server does the work, and its
    answer is dropped."""

    def __init__(self, port: int) -> None:
        self.loses: Callable[[int], bool] = lambda number: False
        self.requests = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _pass_on(self) -> None:
                proxy.requests += 1
                number = proxy.requests
                body = self._whole_body()
                headers = {name: said for name, said in self.headers.items() if name.lower() != "transfer-encoding"}
                there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                there.request(self.command, self.path, body, headers)
                answer = there.getresponse()
                content = answer.read()
                there.close()
                self.close_connection = True
                if proxy.loses(number):
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _whole_body(self) -> bytes:
                """An empty file comes in chunks, of which there is none."""
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
