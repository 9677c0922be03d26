"""Requests that schemathesis makes of the API's own OpenAPI, with every token and without one, to a real server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from orchestrator.schedule.job import Job
from orchestrator.service import app, tokens
from orchestrator.service.document import document
from orchestrator.service.limits import Rate
from orchestrator.service.moves import Move
from tests.service.world import World

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 10  # of each route and mode, each asked with five tokens
KNOWN = {"job_id": [1, 2, 3], "move_id": [1, 2], "box": ["cpu", "r9700x2"]}
STREAM = "/v1/events"  # it has no end; tests/service/test_events.py
BODY = {"experiment": "zpe", "box": "cpu"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(world, address), with jobs and moves that can be asked for."""
    plenty = {name: Rate(per_s=1e6, burst=1e6) for name in ("rate", "refused")}
    world = World(tmp_path_factory.mktemp("state"), **plenty)
    for number in range(3):
        world.queue.add(Job(("+experiment=zpe", f"paths.tracking={world.state}"), "cpu", priority=number))
    for number in range(2):
        world.moves.add(Move("rollback", "cpu", to=number + 1, by="somebody"))
    with world.on_loopback() as port:
        yield world, f"http://127.0.0.1:{port}"


def operations():
    """By name. Routes are the same whatever they serve."""
    described = document(app.create(SimpleNamespace()))
    for path in described["paths"].values():
        for operation in path.values():
            del operation["security"]  # the tokens are ours to choose; schemathesis would leave them out, too
    schema = schemathesis.openapi.from_dict(described)
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found if one.path != STREAM}


OPERATIONS = operations()


def mark(world):
    """What a request may not change without its scope."""
    return (
        world.queue.last_seq(),
        len(world.queue.list()),
        len(world.moves.list()),
        world.service.tokens.path.read_bytes(),
    )


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_fails_the_server_or_does_what_its_token_may_not(site, name, mode):
    (world, url), operation = site, OPERATIONS[name]
    needed = operation.definition.raw["x-scope"]
    if mode is GenerationMode.NEGATIVE and not (operation.path_parameters or operation.query or operation.body):
        return  # there is nothing to get wrong

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def ask(data):
        case = data.draw(operation.as_strategy(mode))
        for parameter, known in KNOWN.items():
            if parameter in (case.path_parameters or {}) and data.draw(st.booleans()):
                case.path_parameters[parameter] = data.draw(st.sampled_from(known))
        if name == "POST /v1/jobs" and isinstance(case.body, dict) and data.draw(st.booleans()):
            case.body |= BODY
        for who in (None, "wrong", *tokens.SCOPES):
            given_token = {} if who is None else {"Authorization": f"Bearer {world.tokens.get(who, 'paro_wrong')}"}
            before = mark(world)
            answer = case.call(base_url=url, headers=given_token, timeout=60)
            assert answer.status_code < 500, answer.text
            case.validate_response(answer, checks=CHECKS)
            allowed = needed in (who, "public")
            if not allowed:
                assert answer.status_code >= 400 and mark(world) == before, (who, answer.status_code)
            if not allowed and not case.path_parameters:
                assert answer.status_code == (401 if who in (None, "wrong") else 403), (who, answer.request.headers)

    ask()
