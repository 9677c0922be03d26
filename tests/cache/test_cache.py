"""What is listed, and that nothing in use is ever pruned."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cache, compile_cache, config, owner, slot
from orchestrator.cache import DAY_S, Entry
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.records import write_json
from orchestrator.schema import Engine

ROOT = Path(__file__).parents[2]
GONE = {"pid": 2**22 + 1, "start_time_s": 1.0, "host": owner.current().host}
HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom orchestrator import lease\n"
    "with lease.hold('cpu', 'int5', Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture
def places(tmp_path: Path):
    """A cache and a state directory with one of each kind, all last used 100 days ago."""
    root, state = tmp_path / "cache", tmp_path / "state"
    made = {
        "model": root / "models" / "smollm2" / "int5-0123",
        "compile": root / "serve" / "aaaa",
        "reference": root / "references" / "stack0" / "key0",
        "plugin": root / "plugins" / "bbbb",
        "boot log": state / "boots" / "cccc",
        "unfinished": state / "unfinished" / "dddd",
    }
    for path in made.values():
        path.mkdir(parents=True)
        (path / "data").write_bytes(b"x" * 5000)
    write_json(made["boot log"] / "journal.json", {"ended": True})
    compile_cache.mark(made["compile"], "warm", "a" * 64)
    age(root, state, days=100)
    return root, state, made


def age(*roots: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for root in roots:
        for path in (*root.rglob("*"), root):
            os.utime(path, (then, then))


def prune(places, **limits):
    return {entry.kind for entry in cache.prune(places[0], places[1], ["cpu"], **limits)}


def test_everything_is_listed_with_its_kind_size_age_and_state(places):
    root, state, made = places
    found = {entry.kind: entry for entry in cache.entries(root, state)}
    assert {kind: entry.path for kind, entry in found.items()} == made
    assert found["compile"].state == "warm" and found["model"].name == "smollm2/int5-0123"
    for entry in found.values():
        assert 5000 <= entry.size_bytes < 100_000 and 99 < (time.time() - entry.last_used_s) / DAY_S < 101


def test_what_was_not_used_for_thirty_days_goes_and_the_rest_stays(places):
    made = places[2]
    os.utime(made["model"] / "data")
    assert prune(places) == {"compile", "reference", "plugin", "boot log", "unfinished"}
    assert made["model"].is_dir() and not made["compile"].exists() and not made["boot log"].exists()


def test_a_dry_run_removes_nothing(places):
    assert len(prune(places, dry_run=True)) == 6
    assert all(path.is_dir() for path in places[2].values())


def test_an_age_of_its_own(places):
    assert prune(places, older_than_days=101) == set()
    assert len(prune(places, older_than_days=99)) == 6


def entry(name: str, days: float, used_by: str = "") -> Entry:
    return Entry("compile", Path(name), 1, 1e9 - days * DAY_S, "warm", used_by)


def test_keep_spares_the_most_recently_used_of_each_kind_whatever_their_age():
    found = [entry("a", 1), entry("b", 50), entry("c", 60), replace(entry("m", 90), kind="model")]
    assert [e.path.name for e in cache.chosen(found, None, 1, 1e9)] == ["b", "c"]
    assert [e.path.name for e in cache.chosen(found, 55, 1, 1e9)] == ["c"]
    assert cache.chosen([entry("a", 900, used_by="prod of box cpu")], 1, None, 1e9) == []


def fill_slot(plan_of, state: Path, made) -> None:
    plan = plan_of("+variant=int5", "box=cpu")
    checkpoint = replace(plan.checkpoint, path=str(made["model"]))
    env = {**plan.env, "PYTHONPATH": str(made["plugin"])}
    plan = replace(plan, cache_dir=str(made["compile"]), checkpoint=checkpoint, env=env)
    box = config.load_machine(["box=cpu"]).box
    slot.save(state, slot.Slot(plan, Engine("process", None, 1, 1), box, "now", "me", "dddd"))


def test_what_prod_needs_stays_however_old_it_is(places, plan_of):
    root, state, made = places
    fill_slot(plan_of, state, made)
    log = state / "prod" / "cpu" / "dddd"
    log.mkdir(parents=True)
    old = state / "prod" / "cpu" / "eeee"
    old.mkdir()
    age(root, state, days=100)
    assert prune(places, older_than_days=0) == {"reference", "boot log", "unfinished"}
    assert made["model"].is_dir() and made["compile"].is_dir() and made["plugin"].is_dir()
    assert log.is_dir() and not old.exists()
    assert {e.used_by for e in cache.entries(root, state)} == {"prod of box cpu"}


def test_a_slot_that_cannot_be_read_stops_the_prune(places):
    write_json(places[1] / "prod" / "cpu.json", {"plan": 1})
    with pytest.raises(OrchestratorError, match="cannot be read"):
        prune(places)
    assert all(path.is_dir() for path in places[2].values())


def test_nothing_is_pruned_while_a_run_holds_the_box(places):
    command = [sys.executable, "-c", HOLDER, str(places[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=rf"in use by process {holder.pid} .*nothing is pruned"):
            prune(places)
        assert all(path.is_dir() for path in places[2].values())
        holder.kill()
    assert len(prune(places)) == 6


def test_an_open_boot_a_cache_that_warms_and_a_checkpoint_in_preparation_stay(places):
    root, state, made = places
    write_json(made["boot log"] / "journal.json", {"ended": False})
    compile_cache.mark(made["compile"], "warming", "a" * 64)  # by this process, which lives
    lock = made["model"].with_suffix(".lock")
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        age(root, state, days=100)
        found = {entry.kind: entry for entry in cache.entries(root, state)}
        assert found["compile"].state == "warming" and found["model"].used_by == "being prepared"
        assert prune(places) == {"reference", "plugin", "unfinished"}


def test_a_boot_that_ended_before_it_had_a_journal_goes_with_the_others(places):
    root, state, made = places
    (made["boot log"] / "journal.json").unlink()
    gone = cache.prune(root, state, ["cpu"], older_than_days=0)
    assert made["boot log"] in [entry.path for entry in gone]


def test_an_entry_that_is_a_link_to_another_disk_goes_and_what_it_leads_to_stays(places, tmp_path):
    root, state, made = places
    elsewhere = tmp_path / "elsewhere"
    made["compile"].rename(elsewhere)
    made["compile"].symlink_to(elsewhere)
    assert made["compile"] in [entry.path for entry in cache.prune(root, state, ["cpu"])]
    assert elsewhere.is_dir() and list((root / "serve").iterdir()) == []


def test_the_cache_of_a_killed_warm_up_is_cold_and_can_go(places):
    root, state, made = places
    write_json(made["compile"] / "state.json", {"state": "warming", "owner": GONE})
    age(root, state, days=100)
    (found,) = [e for e in cache.entries(root, state) if e.kind == "compile"]
    assert (found.state, found.used_by) == ("cold", "")
    assert "compile" in prune(places)


def test_what_a_killed_prune_left_half_removed_goes_with_the_next_and_is_never_listed(places):
    half = places[0] / "serve" / f"{cache.PRUNING}ffff"
    half.mkdir()
    assert all(entry.path != half for entry in cache.entries(places[0], places[1]))
    prune(places, older_than_days=1000)
    assert not half.exists()


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (12 * 2**30, "12 GiB"), (5 * 2**40, "5120 GiB")]
)
def test_sizes_are_for_people(size, said):
    assert cache.human(size) == said


def test_the_verbs_list_and_prune(places):
    root, state, _ = places
    where = ["box=cpu", f"paths.cache={root}", f"paths.state={state}"]

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "orchestrator", "cache", *words, *where]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60).stdout

    listed = call()
    assert listed == call("list") and "smollm2/int5-0123" in listed and "6 entries, " in listed
    assert "nothing was removed" in call("prune", "--dry-run", "--older-than", "30")
    assert "removed 0 of them" in call("prune", "--keep", "1")
    assert "removed 6 of them" in call("prune")
