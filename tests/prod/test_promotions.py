"""The ledger: every line follows from the one before, and MLflow's copy is made from it again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.promoting import promotion_runs, promotions
from orchestrator.promoting.promotions import BrokenLedger, Entry, Target
from orchestrator.recorded import catalog, mlflow_store, tracking
from orchestrator.schema import Engine

ENGINE = Engine("process", None, 10, 2)


@pytest.fixture
def entry(plan_of):
    from orchestrator import config

    box = config.load(["+variant=bf16", "box=cpu"]).box
    plan = plan_of("+variant=bf16", "box=cpu")

    def make(variant: str | None, outcome: str = "moved", kind: str = "promote") -> Entry:
        target = None
        if variant:
            target = Target(
                replace(plan, variant=variant, fingerprint=variant), ENGINE, box, "ab" * 16, "PASS", "kernel"
            )
        made.append(variant)
        return Entry(0, f"{len(made):032x}", "2026-11-30T01:02:03+00:00", "cpu", kind, outcome, target, "tester")

    made: list[str | None] = []
    return make


def written(state, entry, *variants: str | None) -> list[Entry]:
    return [promotions.append(state, entry(variant, kind="promote" if variant else "stop")) for variant in variants]


def test_what_is_written_is_read_again_and_verified(tmp_path, entry):
    made = written(tmp_path, entry, "int4", "int5", None)
    assert promotions.read(tmp_path, "cpu") == made and [e.number for e in made] == [1, 2, 3]
    assert [e.previous for e in made] == [promotions.FIRST, made[0].hash, made[1].hash]


def test_an_entry_is_written_once_however_often_it_is_appended(tmp_path, entry):
    new = entry("int4")
    first = promotions.append(tmp_path, new)
    assert promotions.append(tmp_path, new) == first and len(promotions.read(tmp_path, "cpu")) == 1


def change(line: bytes) -> bytes:
    return json.dumps({**json.loads(line), "by": "somebody else"}).encode()


DAMAGE = {  # what was done to three lines -> the line that is named, and why
    "changed": (lambda a, b, c: [a, change(b), c, b""], 2, "its hash is not that of its content"),
    "lost": (lambda a, b, c: [a, c, b""], 2, "it does not follow from the line before"),
    "swapped": (lambda a, b, c: [b, a, c, b""], 1, "it does not follow from the line before"),
    "twice": (lambda a, b, c: [a, b, b, c, b""], 3, "it does not follow from the line before"),
    "cut": (lambda a, b, c: [a, b, c[:50]], 3, "it is cut off"),
    "no entry": (lambda a, b, c: [a, b"{}", c, b""], 2, "it is no entry"),
    "no JSON": (lambda a, b, c: [a, b, b"\xff", b""], 3, "it is no entry"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_chain_is_named_with_its_line(tmp_path, entry, damage):
    done, line, why = DAMAGE[damage]
    written(tmp_path, entry, "int4", "int5", "bf16")
    path = promotions.path_of(tmp_path, "cpu")
    path.write_bytes(b"\n".join(done(*path.read_bytes().split(b"\n")[:3])))
    with pytest.raises(BrokenLedger, match=f"cpu.jsonl, line {line}: {why}"):
        promotions.read(tmp_path, "cpu")
    before = path.read_bytes()
    with pytest.raises(BrokenLedger):
        promotions.append(tmp_path, entry("int6"))
    assert path.read_bytes() == before


def test_what_serves_is_the_last_that_moved_and_its_predecessor_the_last_other_plan(tmp_path, entry):
    written(tmp_path, entry, "int4", "int5")
    promotions.append(tmp_path, entry("bf16", "restored"))
    entries = promotions.read(tmp_path, "cpu")
    assert promotions.serving(entries).variant == "int5" and promotions.predecessor(entries).variant == "int4"
    entries += written(tmp_path, entry, None)
    assert promotions.serving(entries) is None and promotions.predecessor(entries).variant == "int5"
    assert promotions.serving([]) is None and promotions.predecessor([]) is None


def runs(directory) -> list[catalog.Entry]:
    return [e for e in catalog.entries(directory) if e.experiment == promotion_runs.EXPERIMENT]


def test_mlflow_has_a_run_for_each_entry_and_the_aliases_and_gets_them_again_after_a_lost_database(tmp_path, entry):
    state, store = tmp_path / "state", tmp_path / "tracking"
    made = written(state, entry, "int4", "int5")
    first = promotion_runs.copy(store, "cpu", made)
    assert (first.added, first.present, first.unknown) == (2, 0, ())
    assert promotion_runs.copy(store, "cpu", made) == promotion_runs.Copied(0, 2, ())
    client = mlflow_store.connect(store)
    aliased = {a: client.get_model_version_by_alias("prod-cpu", a).tags for a in promotion_runs.ALIASES}
    assert {a: (tags["variant"], tags["verdict"]) for a, tags in aliased.items()} == {
        "prod": ("int5", "PASS"),
        "previous": ("int4", "PASS"),
    }
    killed = tracking.Tracker(store, promotion_runs.EXPERIMENT).start("3 promote", {}, {"box": "cpu"})
    made += written(state, entry, None)
    assert promotion_runs.copy(store, "cpu", made).added == 1
    assert killed.run_id not in {run.run_id for run in runs(store)}, "a run that was cut off is made again"
    aliases = client.get_registered_model("prod-cpu").aliases
    assert set(aliases) == {"previous"}
    assert client.get_model_version("prod-cpu", aliases["previous"]).tags["variant"] == "int5"
    assert promotion_runs.copy(store, "cpu", made[:2]).unknown == tuple(
        run.run_id for run in runs(store) if run.tags["promotion.number"] == "3"
    )
    elsewhere = tmp_path / "again"
    assert promotion_runs.copy(elsewhere, "cpu", promotions.read(state, "cpu")).added == 3
    copied = [json.loads((run.artifacts / "entry.json").read_text()) for run in runs(elsewhere)]
    assert sorted(one["hash"] for one in copied) == sorted(e.hash for e in made)
