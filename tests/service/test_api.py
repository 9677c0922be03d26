from __future__ import annotations

import pytest
from fastapi.routing import APIRoute

from orchestrator.errors import UsageError
from orchestrator.service import server, tokens
from orchestrator.service.gatekeeper import PUBLIC, scope_of
from orchestrator.service.submission import Submission, words
from tests.service.world import AB


def test_every_route_has_a_scope_and_refuses_every_token_without_it(world, client):
    routes = [route for route in world.app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(world.app.routes)
    assert len(routes) >= 14
    for route in routes:
        needed = scope_of(route)
        (method,) = route.methods
        assert needed == PUBLIC or needed in tokens.SCOPES
        if needed == PUBLIC:
            assert route.path == "/health"
            continue
        assert (needed == "read") == (method == "GET")
        path = route.path.replace("{job_id}", "1").replace("{move_id}", "1")
        path = path.replace("{run_id}", "abcd").replace("{box}", "cpu")
        assert client.request(method, path).status_code == 401
        for scope in set(tokens.SCOPES) - {needed}:
            assert client.request(method, path, headers=world.auth(scope)).status_code == 403, (path, scope)
    assert world.queue.list() == [] and world.moves.list() == []


def test_the_same_key_is_the_same_job_and_with_another_body_a_conflict(world, client):
    headers = world.auth("run", **{"Idempotency-Key": "k"})
    first, again = (client.post("/v1/jobs", json=AB, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert client.post("/v1/jobs", json={**AB, "priority": 3}, headers=headers).status_code == 409
    assert len(world.queue.list()) == 1


def test_neither_the_log_nor_an_answer_has_the_token_wherever_it_was_sent(world, client):
    token = world.tokens["read"]
    for path in (f"/v1/jobs?token={token}", f"/v1/{token}", f"/v1/jobs/{token}", f"/v1/jobs?state={token}"):
        assert token not in client.get(path, headers=world.auth("read")).text
    assert len(world.lines) == 4 and token not in "".join(world.lines)


def test_a_huge_body_is_refused_and_answers_are_json(world, client):
    answer = client.post("/v1/jobs", content=b"x" * 1_000_000, headers=world.auth("run"))
    assert answer.status_code == 413 and answer.json()["error"]
    for path in ("/nowhere", "/docs", "/v1/jobs/0"):
        assert client.get(path, headers=world.auth("read")).headers["content-type"] == "application/json"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o666])
def test_a_token_file_that_others_can_read_lets_nobody_in(world, client, mode):
    path = world.service.tokens.path
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 503
    with pytest.raises(UsageError, match="chmod 600"):
        tokens.load(path)


def test_a_removed_token_ends_at_the_next_request(world, client):
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 200
    tokens.remove(world.service.tokens.path, "read")
    assert client.get("/v1/jobs", headers=world.auth("read")).status_code == 401


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("paths.state", "x"),
        ("box.models_dir", "x"),
        ("a.knobs.LD_PRELOAD", "x"),
        ("gate.alpha", 1),
        ("a.speculation.tokens", "${oc.env:HOME}"),
        ("seed", "../x"),
        ("hydra.run.dir", "x"),
        ("weights@a.weights", "../../x"),
    ],
)
def test_what_names_a_file_or_moves_a_gate_cannot_be_submitted(key, value):
    with pytest.raises(UsageError, match="overrides"):
        words(Submission(**AB, overrides={key: value}), [])


def test_a_bind_beyond_loopback_has_to_be_asked_for():
    with pytest.raises(UsageError, match="beyond_loopback"):
        server.listen("0.0.0.0", 0, False)
    server.listen("127.0.0.1", 0, False).close()
