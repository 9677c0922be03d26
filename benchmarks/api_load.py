"""How long the API of `serve` takes to list 1,000 queued jobs while 50 clients watch, and whether each sees all events.

usage: python -m benchmarks.api_load [SECONDS [JOBS [WATCHERS]]]

A real `serve` on loopback with a real queue. One process has all watchers, each with a connection of its own; one lists
the default page and, beside that, the page of 1,000 jobs; this one submits and cancels. Latencies are wall-clock
milliseconds from before the connection is taken from the pool until the last byte is read. Exit status 1 where a
watcher missed an event, saw one twice or out of order, a request failed, or a p99 is not below 100 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.request import Request, urlopen

import aiohttp
import numpy as np
import psutil

from orchestrator.schedule import asked
from orchestrator.schedule.queue import Queue
from orchestrator.service import tokens

PAGES = {"default page": "/v1/jobs", "1,000 jobs": "/v1/jobs?limit=1000"}
LISTS_PER_S = {"default page": 10.0, "1,000 jobs": 2.0}
CHANGES_PER_S = 4.0  # a job submitted and an older one cancelled, in turn
ARRIVAL_S = 10.0  # the last event may take so long to reach a watcher
ASKED_MS = 100.0  # of p99
JOB = ("+experiment=zpe", "box=cpu")


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    queue: Queue
    headers: dict[str, dict[str, str]]  # by scope

    def cpu_s(self) -> float:
        used = self.process.cpu_times()
        return used.user + used.system


@contextmanager
def served(root: Path, jobs: int) -> Iterator[Server]:
    """`serve` below `root` with so many jobs, whose window is 12 hours away."""
    state = root / "state"
    places = [f"paths.{name}={root / name}" for name in ("state", "tracking", "cache")]
    headers = {
        scope: {"Authorization": f"Bearer {tokens.add(tokens.path_of(state), scope, [scope])}"}
        for scope in tokens.SCOPES
    }
    queue, hour = Queue(state), (time.gmtime().tm_hour + 12) % 24
    window = f"{hour:02}:00-{hour:02}:30"
    job, _ = asked.timed([*JOB, f"window={window}", "zone=UTC", *places])
    for number in range(jobs):
        queue.add(replace(job, priority=number % 7))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "orchestrator", "serve", "http.port=0", *places]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        url = _address(root / "log", process)
        yield Server(url, psutil.Process(process.pid), queue, headers)
    finally:
        process.terminate()
        process.wait(60)


def _address(log: Path, process: subprocess.Popen) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"the API answers on (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"serve did not start:\n{log.read_text()[-2000:]}")


def watch(url: str, headers: dict, after: int, watchers: int, pipe: Connection) -> None:
    """A process of watchers: says when all are connected; then takes the last number to wait for, and answers with the
    event numbers that each was sent."""
    asyncio.run(_watch(url, headers, after, watchers, pipe))


async def _watch(url: str, headers: dict, after: int, watchers: int, pipe: Connection) -> None:
    seen: list[list[int]] = [[] for _ in range(watchers)]
    last = [None]
    unlimited = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=unlimited, headers=headers, connector=connector) as session:

        async def one(mine: list[int], connected: asyncio.Event) -> None:
            async with session.get(f"{url}/v1/events?after={after}") as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    connected.set()
                    if line.startswith(b"id: "):
                        mine.append(int(line[4:]))

        connected = [asyncio.Event() for _ in seen]
        tasks = [asyncio.create_task(one(mine, event)) for mine, event in zip(seen, connected, strict=True)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in connected)), 60)
        pipe.send("connected")
        last = await asyncio.to_thread(pipe.recv)
        deadline = time.monotonic() + ARRIVAL_S
        while time.monotonic() < deadline and not all(mine and mine[-1] >= last for mine in seen):
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    pipe.send(seen)


def ask(url: str, headers: dict, seconds: float, pipe: Connection) -> None:
    """A process that lists at LISTS_PER_S; answers with the milliseconds of each request, by page."""
    pipe.send(asyncio.run(_ask(url, headers, seconds)))


async def _ask(url: str, headers: dict, seconds: float) -> dict[str, list[float]]:
    """Open loop: a request is sent when it is due, whether or not those before it were answered."""
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def one(path: str) -> float:
            began = time.perf_counter()
            async with session.get(url + path) as answer:
                answer.raise_for_status()
                await answer.read()
            return 1000 * (time.perf_counter() - began)

        async def page(name: str) -> list[float]:
            began, tasks = time.monotonic(), []
            for number in range(int(seconds * LISTS_PER_S[name])):
                await asyncio.sleep(max(0.0, began + number / LISTS_PER_S[name] - time.monotonic()))
                tasks.append(asyncio.create_task(one(PAGES[name])))
            return await asyncio.gather(*tasks)

        return dict(zip(PAGES, await asyncio.gather(*map(page, PAGES)), strict=True))


def change(server: Server, seconds: float) -> int:
    """Submit and cancel at CHANGES_PER_S; returns how many were answered."""
    began, number, made = time.monotonic(), 0, []
    body = json.dumps({"experiment": "zpe", "box": "cpu", "window": server.queue.get(1).window, "zone": "UTC"}).encode()
    headers = server.headers["run"] | {"Content-Type": "application/json"}
    while (due := began + number / CHANGES_PER_S) < began + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        path, content = (f"/v1/jobs/{made.pop()}/cancel", b"") if made else ("/v1/jobs", body)
        with urlopen(Request(server.url + path, content, headers, method="POST"), timeout=60) as answer:
            found = json.load(answer)
        if path == "/v1/jobs":
            made.append(found["id"])
        number += 1
    return number


def quiet(server: Server, path: str, repeats: int = 30) -> float:
    """CPU seconds of the server for one request, while nothing else is asked of it."""
    before = server.cpu_s()
    for _ in range(repeats):
        with urlopen(Request(server.url + path, headers=server.headers["read"]), timeout=60) as answer:
            answer.read()
    return (server.cpu_s() - before) / repeats


def settled(server: Server) -> None:
    """Wait until the scheduler's first pass has said of every job why it waits."""
    before = -1
    while (now := server.queue.last_seq()) != before:
        before = now
        time.sleep(3)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    seconds, jobs, watchers = (int(given) for given in (*arguments, *("60", "1000", "50")[len(arguments) :]))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} before")
    with tempfile.TemporaryDirectory() as root, served(Path(root), jobs) as server:
        settled(server)
        alone = {name: quiet(server, path) for name, path in PAGES.items()}
        read, first = server.headers["read"], server.queue.last_seq()
        start = get_context("spawn")
        (here, there), (mine, its) = start.Pipe(), start.Pipe()
        watching = start.Process(target=watch, args=(server.url, read, first, watchers, there), daemon=True)
        watching.start()
        if here.recv() != "connected":
            raise SystemExit("the watchers did not connect")
        asking = start.Process(target=ask, args=(server.url, read, seconds, its), daemon=True)
        asking.start()
        before_s, began_s = server.cpu_s(), time.monotonic()
        changes = change(server, seconds)
        took = mine.recv()
        used_s, wall_s = server.cpu_s() - before_s, time.monotonic() - began_s
        time.sleep(1)  # what the scheduler says of the last job
        last = server.queue.last_seq()
        here.send(last)
        seen = here.recv()
        wanted = [event.seq for event in server.queue.events(first) if event.seq <= last]
    good = report(took, alone, used_s, wall_s, changes)
    lost = sum(len(set(wanted) - set(mine)) for mine in seen)
    wrong = sum([seq for seq in mine if seq <= last] != wanted for mine in seen)
    print(f"{watchers} watchers, {len(wanted)} events for each, {lost} lost, {wrong} watchers not in order")
    print(f"load {os.getloadavg()[0]:.2f} after")
    return 0 if good and not lost and not wrong and len(wanted) >= changes else 1


def report(took: dict[str, list[float]], alone: dict[str, float], used_s: float, wall_s: float, changes: int) -> bool:
    """Print it; returns whether the p99 of every page is below ASKED_MS."""
    for name, found in took.items():
        p50, p99 = np.percentile(found, [50, 99])
        print(
            f"{name:13} {len(found):5} requests at {LISTS_PER_S[name]:g}/s: p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
            f"max {max(found):.1f} ms; alone {1000 * alone[name]:.1f} ms CPU each"
        )
    requests = changes + sum(map(len, took.values()))
    print(
        f"{changes} changes at {CHANGES_PER_S:g}/s; the server used {used_s:.1f} s CPU in {wall_s:.0f} s, "
        f"{1000 * used_s / requests:.1f} ms a request, the scheduler and the streams included"
    )
    return all(np.percentile(found, 99) < ASKED_MS for found in took.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
