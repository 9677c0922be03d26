"""The API in process, and as a `serve` of its own."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.service.world import Serve, World


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def client(world):
    with TestClient(world.app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def serve(tmp_path):
    found = Serve(tmp_path)
    yield found
    found.end()
