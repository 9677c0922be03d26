"""The container engine: whether it can be reached, and has the box's image."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import quote

from orchestrator.doctor.check import ASK_S, Check, user
from orchestrator.engines.daemon import socket_of
from orchestrator.schema import Machine


def checks(machine: Machine) -> Iterator[Check]:
    kind, url = machine.engine.kind, socket_of(machine.engine)
    name = f"{kind} engine"
    start = "sudo systemctl start docker" if kind == "docker" else "systemctl --user start podman.socket"
    try:
        status, answer = _ask_socket(url, "/version")
    except PermissionError:
        yield Check(name, False, f"{url}: permission denied", f"sudo usermod -aG {kind} {user()} && newgrp {kind}")
        return
    except (OSError, ValueError, http.client.HTTPException) as error:
        yield Check(name, False, f"{url}: {getattr(error, 'strerror', None) or error}", start)
        return
    yield Check(
        name, status == 200, f"version {answer.get('Version', 'unknown')} at {url}", "" if status == 200 else start
    )
    if machine.box.container is None:
        yield Check(
            "container of the box",
            False,
            f"box {machine.box.name} declares none",
            "choose engine=process, or another box=",
        )
        return
    image = machine.box.container.image
    status, answer = 0, {}
    for tried in (image, f"localhost/{image}") if kind == "podman" else (image,):
        try:
            status, answer = _ask_socket(url, f"/images/{quote(tried, safe='/:@')}/json")
        except (OSError, ValueError, http.client.HTTPException):
            continue
        if status == 200:
            break
    mend = f"docker/build-cpu.sh {kind}" if image.startswith("paro-cpu") else f"{kind} pull {image}"
    found = f"{image} is {answer.get('Id', '')[:19]}" if status == 200 else f"no {image}"
    yield Check("image", status == 200, found, "" if status == 200 else mend)


def _ask_socket(url: str, path: str) -> tuple[int, dict]:
    """Status and JSON of a GET on a daemon's API, without its SDK, which takes half a second to import."""
    scheme, _, place = url.partition("://")
    connection = http.client.HTTPConnection(place if scheme != "unix" else "localhost", timeout=ASK_S)
    if scheme == "unix":
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(ASK_S)
        connection.sock.connect(place)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()
