"""A machine with simulated servers, and an empty MLflow store that is made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.recorded import mlflow_store
from tests.ab.simulated import World
from tests.boot.test_boot import free_port


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("empty")
    mlflow_store.connect(directory)
    return directory / "mlflow.db"


@pytest.fixture
def new_world(tmp_path, monkeypatch, empty_store):
    """Makes a world and puts it in place of the real machine."""

    def make(**values) -> World:
        tracking = tmp_path / "tracking"
        tracking.mkdir(exist_ok=True)
        if not (tracking / "mlflow.db").exists():
            shutil.copyfile(empty_store, tracking / "mlflow.db")
        world = World(tmp_path, **values).install(monkeypatch.setattr)
        world.port = free_port()
        return world

    return make
