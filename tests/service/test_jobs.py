"""What is kept of what was submitted: under one key asked at once, over a kill, and on a full disk."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import aiohttp
import pytest
from starlette.testclient import TestClient

from orchestrator.schedule.queue import Queue
from tests.service.world import AB, World


def post(url, headers, body):
    content = json.dumps(body).encode()
    with urlopen(
        Request(url + "/v1/jobs", content, {**headers, "Content-Type": "application/json"}), timeout=300
    ) as it:
        return it.status, json.load(it)


def test_twenty_equal_posts_at_once_are_one_job(world):
    headers = world.auth("run", **{"Idempotency-Key": "k"})
    with world.on_loopback() as port, ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: post(f"http://127.0.0.1:{port}", headers, AB), range(20)))
    assert collections.Counter(status for status, _ in answers) == {201: 1, 200: 19}
    assert {job["id"] for _, job in answers} == {1} and len(world.queue.list()) == 1


def test_the_key_of_one_token_is_none_of_anothers(world, client):
    keyed = {"Idempotency-Key": "k"}
    assert client.post("/v1/jobs", json=AB, headers=world.auth("run", **keyed)).status_code == 201
    from orchestrator.service import tokens

    other = tokens.add(world.service.tokens.path, "other", ["run"])
    answer = client.post("/v1/jobs", json={**AB, "priority": 1}, headers={"Authorization": f"Bearer {other}", **keyed})
    assert answer.status_code == 201 and answer.json()["id"] == 2


def test_every_job_that_was_answered_is_there_once_after_a_kill(serve):
    url, enough = serve.start(), 5
    answered: dict[str, int] = {}

    async def flood():
        timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def one(key):
                with contextlib.suppress(aiohttp.ClientError):
                    headers = serve.auth("run", **{"Idempotency-Key": key})
                    async with session.post(f"{url}/v1/jobs", json=AB, headers=headers) as answer:
                        found = await answer.json()
                        assert answer.status == 201, found
                        answered[key] = found["id"]
                if len(answered) == enough and serve.process.poll() is None:
                    serve.process.kill()

            await asyncio.gather(*(one(f"key{number}") for number in range(100)))

    asyncio.run(flood())
    serve.process.wait()
    assert enough <= len(answered) < 100
    url = serve.start()
    for key, number in answered.items():
        status, job = post(url, serve.auth("run", **{"Idempotency-Key": key}), AB)
        assert (status, job["id"]) == (200, number)
    kept = collections.Counter(job.idempotency_key for job in Queue(serve.state).list())
    assert set(kept.values()) == {1} and {f"run:{key}" for key in answered} <= set(kept)


def test_a_full_disk_is_said_in_one_line_and_adds_nothing(world, client):
    headers = world.auth("run", **{"Idempotency-Key": "k"})
    assert client.post("/v1/jobs", json=AB, headers=world.auth("run")).status_code == 201  # the worker has begun
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seq = world.queue.last_seq()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        answer = client.post("/v1/jobs", json=AB, headers=headers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer.status_code == 503 and "free the disk" in answer.json()["error"]
    assert "\n" not in answer.json()["error"] and str(world.state) not in answer.text
    assert len(world.queue.list()) == 1 and world.queue.last_seq() == seq
    again = client.post("/v1/jobs", json=AB, headers=headers)
    assert again.status_code == 201 and len(world.queue.list()) == 2


def test_a_worker_that_is_killed_is_started_again(world, client):
    for number in (1, 2):
        assert client.post("/v1/jobs", json=AB, headers=world.auth("run")).json()["id"] == number
        for process in world.service.worker._pool._processes.values():
            process.kill()
            process.join()


def test_a_box_that_the_machine_is_not_is_refused_for_an_ab_and_for_a_move(tmp_path):
    world = World(tmp_path, boxes=["cpu"])
    with TestClient(world.app, base_url="http://localhost") as client:
        answer = client.post("/v1/jobs", json={**AB, "box": "r9700x2"}, headers=world.auth("run"))
        assert answer.status_code == 422 and "box: this machine is no r9700x2" in answer.json()["error"]
        answer = client.post("/v1/prod/r9700x2/rollback", json={}, headers=world.auth("promote"))
        assert answer.status_code == 404 and "this machine is no r9700x2" in answer.json()["error"]
        assert client.post("/v1/jobs", json=AB, headers=world.auth("run")).status_code == 201
    assert world.moves.list() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({**AB, "box": "toaster"}, "box: there is no 'toaster'"),
        ({**AB, "a": "int4"}, "leave a, b and gate out"),
        ({"box": "cpu", "a": "int4", "b": "int5"}, "an A/B has two variants and a gate"),
        ({**AB, "overrides": {"a.knobs.RADIANCE_PQ_PTOK": "maybe"}}, "RADIANCE_PQ_PTOK"),
        ({**AB, "window": "25:00-26:00"}, "is no window"),
        ({**AB, "zone": "Mars/Olympus"}, "time zone"),
        ({**AB, "window": "01:00-01:20"}, "choose a longer window"),
        ({**AB, "after": ["99"]}, "no job 99"),
        ({**AB, "colour": "red"}, "colour"),
        ({"box": "cpu", "a": "int4", "b": "int4", "gate": "format"}, "plan: it is the same in both arms"),
        (
            {"box": "cpu", "a": "int5_i8_pg", "b": "int5_i8", "gate": "speculation"},
            "does not declare that it may differ",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_what_is_wrong(world, client, body, said):
    answer = client.post("/v1/jobs", json=body, headers=world.auth("run"))
    assert answer.status_code in (404, 422) and said in answer.json()["error"]
    assert world.queue.list() == []
