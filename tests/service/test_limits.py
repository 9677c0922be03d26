"""What one client can do to the server, and what is refused before it is looked at."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest
from starlette.testclient import TestClient

from orchestrator.service.limits import LONGEST_BODY_BYTES, Rate
from tests.service.world import AB, World


def raw(port, sent, timeout_s=30.0):
    """What the server answers to these bytes, until it closes or says no more for a while."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(sent)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read() or b"{}")


def test_a_rate_is_a_burst_and_then_so_many_a_second():
    now = [0.0]
    rate = Rate(per_s=2, burst=3, clock=lambda: now[0])
    assert [rate.wait_s("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert rate.wait_s("b") == 0
    now[0] = 0.5
    assert [rate.wait_s("a") for _ in range(2)] == [0, 0.5]


def test_a_token_that_asks_too_often_waits_and_the_others_do_not(tmp_path):
    world = World(tmp_path, rate=Rate(per_s=0.1, burst=2))
    with TestClient(world.app, base_url="http://localhost") as client:
        answers = [client.get("/v1/jobs", headers=world.auth("read")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert int(answers[-1].headers["retry-after"]) in (10, 11)
        assert client.post("/v1/jobs/1/cancel", headers=world.auth("run")).status_code == 404


def test_guessing_tokens_is_slowed_and_stops_nobody_with_one(tmp_path):
    world = World(tmp_path, refused=Rate(per_s=0.1, burst=2))
    with TestClient(world.app, base_url="http://localhost") as client:
        guess = {"Authorization": "Bearer paro_guess"}
        assert [client.get("/v1/jobs", headers=guess).status_code for _ in range(3)] == [401, 401, 429]
        assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 200


def test_a_body_that_comes_too_slowly_is_given_up(tmp_path):
    world = World(tmp_path, body_timeout_s=0.3)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {world.tokens['run']}\r\n"
    with world.on_loopback() as port:
        began = time.monotonic()
        status, said = raw(port, f"{head}Content-Length: 40\r\nContent-Type: application/json\r\n\r\n{{".encode())
    assert status == 408 and "0.3 s" in said["error"] and time.monotonic() - began > 0.3
    assert world.queue.list() == []


def test_a_body_without_a_length_is_measured_as_it_comes(world):
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {world.tokens['run']}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    half = LONGEST_BODY_BYTES // 2
    chunk = f"{half:x}\r\n{' ' * half}\r\n"
    with world.on_loopback() as port:
        assert raw(port, f"{head}{chunk * 3}".encode())[0] == 413
        assert raw(port, f"{head}{chunk}0\r\n\r\n".encode())[0] == 422


def test_a_head_without_end_is_refused(world):
    with world.on_loopback() as port, socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b"X-Filler: " + b"x" * 20_000)
        assert connection.recv(64).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::2]:8642"])
def test_a_host_that_is_not_the_servers_is_refused_even_with_a_token(world, client, host):
    assert client.get("/v1/jobs", headers=world.auth("read", Host=host)).status_code == 421
    assert client.get("/health", headers={"Host": host}).status_code == 421
    assert client.get("/v1/jobs", headers=world.auth("read", Host="LOCALHOST:1")).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_of_another_site_can_send_is_refused(world, client, kind):
    headers = world.auth("run", **{"Content-Type": kind})
    assert client.post("/v1/jobs", content=json.dumps(AB), headers=headers).status_code == 415
    assert world.queue.list() == []


def test_no_answer_lets_a_page_of_another_site_read_it(world, client):
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for answer in (
        client.options("/v1/jobs", headers=asked),
        client.get("/v1/jobs", headers=world.auth("read", **asked)),
        client.get("/health", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_defect_is_in_the_log_with_its_traceback_and_not_in_the_answer(world, client, monkeypatch):
    def broken(number):
        raise RuntimeError("what went wrong inside")

    monkeypatch.setattr(world.queue, "get", broken)
    answer = client.get("/v1/jobs/1", headers=world.auth("read"))
    assert answer.status_code == 500 and "inside" not in answer.text and "RuntimeError" not in answer.text
    log = "\n".join(world.lines)
    assert "Traceback (most recent call last)" in log and "RuntimeError: what went wrong inside" in log
    assert "in broken" in log and world.tokens["read"] not in log


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]x",
        '{"a": 1}',
        '[{"name": "x"}]',
        "[1]",
        "[[",
        '[{"name":"x","scopes":["all"],"sha256":"","made_utc":""}]',
    ],
)
def test_a_damaged_token_file_lets_nobody_in_until_it_is_mended(world, client, content):
    path = world.service.tokens.path
    whole = path.read_bytes()
    path.write_text(content)
    answer = client.get("/v1/jobs", headers=world.auth("read"))
    assert answer.status_code == 503 and str(path) not in answer.text
    assert any(str(path) in line for line in world.lines)
    path.write_bytes(whole)
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 200


def test_a_token_file_that_is_removed_lets_nobody_in(world, client):
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 200
    world.service.tokens.path.unlink()
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 503
