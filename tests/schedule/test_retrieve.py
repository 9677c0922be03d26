"""An A/B that goes on on another box, from the records that a real tracking server has. Its servers are simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.abtest import ab_run, retrieve
from orchestrator.abtest.shift import Paused, Shift
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.recorded.mirror import ServerError
from orchestrator.schedule import unit
from orchestrator.schedule.unit import Order
from tests.ab.simulated import World
from tests.boot.test_boot import free_port
from tests.tracking.servers import Server

BOOTS = 3  # made on the first box
ORDER = Order("queue/1", (), "2026-06-01T00:00:00+00:00", "2026-06-01T00:00:00+00:00", 1, 1, 1, 1, moved=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    made = Server(f"sqlite:///{root / 'server.db'}", root)
    yield made
    made.kill()


def files(entry: catalog.Entry) -> dict:
    """Path -> content of each artifact."""
    found = (path for path in entry.artifacts.rglob("*") if path.is_file())
    return {path.relative_to(entry.artifacts): path.read_bytes() for path in found}


def box(root, server, monkeypatch):
    """A machine whose plans are those of any other with its paths."""
    world = World(root, b_better=0.05).install(monkeypatch.setattr)
    test = world.test(port=free_port())
    places = replace(test.paths, tracking_server=server.url)
    return world, replace(test, paths=places)


def test_the_rest_is_made_elsewhere_and_every_run_is_there_once(tmp_path, server, monkeypatch):
    world, test = box(tmp_path, server, monkeypatch)
    lost, other = tmp_path / "tracking", tmp_path / "other"

    def leave(_design, slots):
        if len(slots) == 12 - BOOTS:
            raise Paused("its machine is about to be lost")

    tag = {unit.JOB_TAG: ORDER.job}
    with pytest.raises(Paused):
        ab_run.start(test, ["box=cpu"], quiet=True, shift=Shift(tag, leave))
    assert unit.run_here(other, ORDER.job) is None
    begun = unit.run_of(other, ORDER, server.url)
    here = catalog.entries(other, parent=begun.run_id)
    there = [e for e in catalog.entries(lost) if e.parent]
    assert len(here) == len(there) == BOOTS
    by_slot = {e.tags["ab.position"]: e for e in there}
    for entry in here:
        same = by_slot[entry.tags["ab.position"]]
        assert entry.metrics == same.metrics and entry.status == same.status == "FINISHED"
        assert files(entry) == files(same) != {}

    world.made.clear()
    assert (
        ab_run.resume(begun, replace(test.paths, tracking=str(other)), ["box=cpu"], quiet=True, shift=Shift(tag)) == 0
    )
    slots = [(e.tags["ab.block"], e.tags["ab.position"]) for e in catalog.entries(other, parent=begun.run_id)]
    assert len(world.made) == len(slots) - BOOTS and len(set(slots)) == len(slots), "no boot was made twice"
    client = mlflow_store.client_class()(server.url)
    experiment = client.get_experiment_by_name("cpu").experiment_id
    remote = client.search_runs([experiment], "")
    tops = [run for run in remote if catalog.PARENT not in run.data.tags]
    assert [run.data.tags["verdict"] for run in tops] == ["PASS"]
    twice = Counter((run.data.tags.get("ab.block"), run.data.tags.get("ab.position")) for run in remote)
    assert max(twice.values()) == 1 and len(remote) == len(slots) + 1


def test_what_is_only_on_a_machine_that_is_gone_is_said_and_never_begun_anew(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"records are only there; set paths\.tracking_server"):
        unit.run_of(tmp_path, ORDER, None)
    with pytest.raises(ServerError, match="cannot be fetched"):
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        retrieve.fetch(tmp_path, f"http://127.0.0.1:{free_port()}", unit.JOB_TAG, "queue/1")


def test_a_server_that_knows_nothing_of_the_job_gives_nothing(tmp_path, server):
    assert retrieve.fetch(tmp_path, server.url, unit.JOB_TAG, "queue/99") == []
