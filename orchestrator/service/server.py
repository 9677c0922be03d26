"""The API's socket and server, beside the scheduler's loop in one process."""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from orchestrator.errors import OrchestratorError, UsageError

PORT = 8642
SWITCH_S = 0.0005  # a request waits so long for each turn while the scheduler's pass computes; Python's own is 5 ms
LONGEST_HEAD_BYTES = 16 * 1024  # request line and headers
UNREAD_MS = 30_000  # a client that takes nothing of what is sent for so long loses its connection


def listen(host: str, port: int, beyond_loopback: bool) -> socket.socket:
    """A bound socket. Raises UsageError for an address beyond loopback that was not allowed, or one that is taken."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"http.host={host}: write an address, such as 127.0.0.1") from None
    if not address.is_loopback and not beyond_loopback:
        raise UsageError(
            f"http.host={host} is not loopback, and tokens go over HTTP in the clear; put a proxy with TLS before it, "
            "or add http.beyond_loopback=true"
        )
    bound = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)  # connections inherit it
    try:
        bound.bind((str(address), port))
    except OSError as error:
        bound.close()
        raise UsageError(f"http.host={host} http.port={port}: {error.strerror}; choose another port") from None
    return bound


def hosts(bound: socket.socket, names: Sequence[str]) -> frozenset[str]:
    """What a request may call the server: on loopback its address, localhost and `names`; beyond it only `names`, or
    anything (empty) where there are none."""
    address = ipaddress.ip_address(bound.getsockname()[0])
    if not address.is_loopback:
        return frozenset(names)
    return frozenset({"localhost", f"[{address}]" if address.version == 6 else str(address), *names})


class _Log(logging.Handler):
    """uvicorn's warnings and errors, among the server's own lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self.say(f"http: {line}")


@contextmanager
def running(app: FastAPI, bound: socket.socket, stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """The API answers during the block; `stop` is set at its end, which ends its streams. `say` gets what uvicorn logs.

    h11, because it has a limit for the length of a request's head, and httptools has none.
    """
    config = uvicorn.Config(
        app, http="h11", log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
        lifespan="on", timeout_keep_alive=15, timeout_graceful_shutdown=5, limit_concurrency=1000,
        h11_max_incomplete_event_size=LONGEST_HEAD_BYTES,
    )  # fmt: skip
    log, handler = logging.getLogger("uvicorn.error"), _Log(say)
    log.addHandler(handler)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="http")
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        if not server.started:
            raise OrchestratorError("the API did not start; the lines above say why")
        yield
    finally:
        sys.setswitchinterval(before_s)
        stop.set()
        server.should_exit = True
        thread.join()
        bound.close()
        log.removeHandler(handler)
