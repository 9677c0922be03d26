"""A service with a token of each scope, in process or as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from orchestrator.schedule.queue import Queue
from orchestrator.service import app as api
from orchestrator.service import server, tokens
from orchestrator.service.context import Service
from orchestrator.service.moves import Moves

AB = {"experiment": "zpe", "box": "cpu"}
HOSTS = frozenset({"localhost", "127.0.0.1"})


class World:
    """`lines` is the log."""

    def __init__(self, state, **settings):
        self.lines, self.state, path = [], state, tokens.path_of(state)
        self.tokens = {scope: tokens.add(path, scope, [scope]) for scope in tokens.SCOPES}
        self.queue, self.moves, self.stop = Queue(state), Moves(state), threading.Event()
        self.service = Service(
            state, state / "ml", [f"paths.tracking={state / 'ml'}"], self.queue, self.moves,
            tokens.TokenFile(path), self.lines.append, stopping=self.stop.is_set, **{"hosts": HOSTS, **settings},
        )  # fmt: skip
        self.app = api.create(self.service)

    def auth(self, scope, **more):
        return {"Authorization": f"Bearer {self.tokens[scope]}", **more}

    @contextmanager
    def on_loopback(self):
        """The port of the real server."""
        bound = server.listen("127.0.0.1", 0, False)
        with server.running(self.app, bound, self.stop, self.lines.append):
            yield bound.getsockname()[1]


class Serve:
    """`python -m orchestrator serve` below a directory, which may be killed and started again."""

    def __init__(self, root: Path):
        self.root, self.state, self.process, self.url = root, root / "state", None, ""
        self.places = [f"paths.{name}={root / name}" for name in ("state", "tracking", "cache")]
        path = tokens.path_of(self.state)
        self.tokens = {scope: tokens.add(path, scope, [scope]) for scope in tokens.SCOPES}

    def auth(self, scope, **more):
        return {"Authorization": f"Bearer {self.tokens[scope]}", **more}

    def start(self, *, preexec=None) -> str:
        log = self.root / "log"
        with log.open("wb") as stream:
            command = [sys.executable, "-m", "orchestrator", "serve", "http.port=0", *self.places]
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, preexec_fn=preexec, env=environment()
            )
        deadline = time.monotonic() + 120
        while not (found := re.search(r"the API answers on (\S+)", log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.url = found[1]
        return self.url

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)


def environment(**more: str) -> dict[str, str]:
    """Of a child that has to find this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
