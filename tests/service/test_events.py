"""Server-sent events, over real sockets."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import closing

import pytest

from orchestrator.service import tokens
from tests.service.world import World

LARGE = "x" * 200_000


class Watcher:
    """Reads one stream."""

    def __init__(self, world, port, query="?after=0", **headers):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request("GET", f"/v1/events{query}", headers=world.auth("read", **named))
        self.answer = self.connection.getresponse()

    def numbers(self, count):
        """The next so many event numbers."""
        found = []
        while len(found) < count:
            line = self.answer.readline()
            assert line, f"the stream ended after {found}"
            if line.startswith(b"id: "):
                found.append(int(line[4:]))
        return found

    def close(self):
        self.answer.close()
        self.connection.close()


def noted(world, count, **data):
    return [world.queue.log("noted", number=number, **data) for number in range(count)]


def test_events_come_in_order_and_a_client_that_comes_back_misses_none(world):
    before = noted(world, 5)
    with world.on_loopback() as port:
        with closing(Watcher(world, port)) as first:
            assert first.numbers(3) == before[:3]
            during = noted(world, 2)
            assert first.numbers(4) == before[3:] + during
        while_away = noted(world, 3)
        with closing(Watcher(world, port, query="", Last_Event_ID=str(during[0]))) as again:
            assert again.numbers(4) == [during[1], *while_away]


def test_without_a_number_a_stream_begins_now_and_one_job_can_be_watched_alone(world):
    noted(world, 3)
    with world.on_loopback() as port, closing(Watcher(world, port, query="?job=7")) as watcher:
        watcher.answer.readline()
        noted(world, 2)
        wanted = world.queue.log("noted", 7)
        noted(world, 1)
        assert watcher.numbers(1) == [wanted]


def test_who_reads_nothing_is_cut_off_and_has_lost_nothing_when_it_comes_back(tmp_path):
    world = World(tmp_path, send_timeout_s=0.5)
    wanted = noted(world, 60, text=LARGE)
    with world.on_loopback() as port:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port))
            token = world.tokens["read"]
            deaf.sendall(
                f"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
            )
            deadline = time.monotonic() + 60
            while not any("cut off: it read nothing" in line for line in world.lines):
                assert time.monotonic() < deadline, world.lines
                time.sleep(0.05)
        assert world.service.feed.watchers == 0
        with closing(Watcher(world, port, Last_Event_ID="0", query="")) as again:
            assert again.numbers(len(wanted)) == wanted


def test_the_servers_end_ends_every_stream(world):
    with world.on_loopback() as port:
        watchers = [Watcher(world, port) for _ in range(3)]
    for watcher in watchers:
        with closing(watcher):
            assert watcher.answer.read().startswith(b": events follow")  # and no IncompleteRead


def test_a_token_that_is_removed_ends_its_streams_and_no_others(world):
    other = tokens.add(world.service.tokens.path, "other", ["read"])
    wanted = noted(world, 1)
    with world.on_loopback() as port, closing(Watcher(world, port)) as kept:
        with closing(Watcher(world, port, Authorization=f"Bearer {other}")) as removed:
            assert removed.numbers(1) == wanted
            tokens.remove(world.service.tokens.path, "other")
            assert b"id: " not in removed.answer.read(), "it ends, whole"
        after = noted(world, 1)
        assert kept.numbers(2) == wanted + after and world.service.feed.watchers == 1
    assert any("shut out" in line for line in world.lines)


def test_a_full_house_is_said_to_the_next(tmp_path):
    world = World(tmp_path, most_watchers=2)
    with world.on_loopback() as port:
        inside = [Watcher(world, port) for _ in range(2)]
        for watcher in inside:
            watcher.answer.readline()
        with closing(Watcher(world, port)) as third:
            assert third.answer.status == 503 and b"2 clients watch already" in third.answer.read()
        inside[0].close()
        deadline = time.monotonic() + 30
        while world.service.feed.watchers > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with closing(Watcher(world, port)) as fourth:
            assert fourth.answer.status == 200
        inside[1].close()


@pytest.mark.parametrize("last", ["x", "-1", "9" * 30, ""])
def test_a_last_event_id_that_is_no_number_counts_for_nothing(world, last):
    wanted = noted(world, 2)
    with world.on_loopback() as port, closing(Watcher(world, port, Last_Event_ID=last)) as watcher:
        assert watcher.numbers(2) == wanted
