"""Whole A/Bs of simulated servers: the real state machine, records, lease and exit status."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import lease
from orchestrator.abtest import ab_run, attempts
from orchestrator.abtest.attempts import VERDICT
from orchestrator.errors import InvalidMeasurement, UsageError
from orchestrator.judging import floors
from orchestrator.judging.verdict import Verdict
from orchestrator.recorded import catalog
from orchestrator.records import from_jsonable
from tests.ab.simulated import FLOOR_GATE, GATE, GUARD, METRIC, Simulated, World
from tests.boot.test_boot import free_port


def start(world: World, **changes) -> int:
    return ab_run.start(world.test(port=world.port, **changes), ["box=cpu"], quiet=True)


def parent(world: World) -> catalog.Entry:
    (found,) = [entry for entry in catalog.entries(world.root / "tracking") if entry.is_ab]
    return found


def boots(world: World) -> list[catalog.Entry]:
    return list(reversed(catalog.entries(world.root / "tracking", parent=parent(world).run_id)))


def recorded(world: World) -> Verdict:
    return from_jsonable(Verdict, json.loads((parent(world).artifacts / VERDICT).read_text()))


def resume(world: World) -> int:
    return ab_run.resume(parent(world), world.test(port=world.port).paths, ["box=cpu"], quiet=True)


@pytest.mark.parametrize(
    ("better", "state", "code"), [(0.05, "PASS", 0), (-0.05, "FAIL", 1), (0.0005, "INCONCLUSIVE", 4)]
)
def test_the_exit_status_is_the_verdict_and_so_are_tag_and_record(new_world, capsys, better, state, code):
    world = new_world(b_better=better, sd=0.004)
    assert start(world) == code
    assert recorded(world).state == parent(world).tags["verdict"] == state
    assert parent(world).status == "FINISHED"
    out = capsys.readouterr().out
    assert out.index("at most 12 boots") < out.index(state), "the plan is shown before the verdict"
    assert METRIC in out


def test_a_page_that_cannot_be_drawn_is_said_and_costs_no_verdict(new_world, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("no picture")

    monkeypatch.setattr("orchestrator.pages.paired_report.of_ab", broken)
    world = new_world(b_better=0.05)
    assert ab_run.start(world.test(port=world.port), ["box=cpu"]) == 0
    assert parent(world).status == "FINISHED" and recorded(world).state == "PASS"
    assert "report.html: ValueError: no picture; the verdict stands" in capsys.readouterr().err


def test_every_boot_is_a_nested_run_with_its_whole_record_in_the_order_of_the_design(new_world):
    world = new_world(b_better=0.05)
    start(world)
    design = attempts.read_design(parent(world))
    made = boots(world)
    slots = [(int(e.tags["ab.block"]), int(e.tags["ab.position"]), e.tags["ab.arm"]) for e in made]
    assert slots == [(s.block, s.position, s.arm) for s in design.order[: len(made)]]
    assert parent(world).tags["order"].startswith("".join(arm for _, _, arm in slots))
    assert parent(world).tags["source"] == "simulated"
    for entry in made:
        assert (
            entry.status == "FINISHED" and entry.tags["source"] == "simulated" and entry.parent == parent(world).run_id
        )
        assert json.loads((entry.artifacts / "plan.json").read_text())["fingerprint"] == entry.tags["plan"]
        assert catalog.measured_boot(entry.artifacts).status == "ok"
        assert catalog.measurements(entry.artifacts)["decode_ctx"].samples[0]["simulated"]
        assert entry.metrics[METRIC] > 0


def test_a_clear_effect_ends_the_ab_at_an_early_look_and_an_unclear_one_takes_all_blocks(new_world):
    world = new_world(b_better=0.05)
    start(world)
    assert len(boots(world)) < 12 and len(boots(world)) // 4 in GATE.looks
    assert recorded(world).look == len(boots(world)) // 4


def test_a_verdict_is_given_at_declared_looks_only(new_world):
    world = new_world(b_better=0.2)
    assert start(world, gate=replace(GATE, looks=(2, 3))) == 0
    assert len(boots(world)) == 8, "not after the first block, however clear it is"


def test_a_boot_that_fails_once_is_recorded_and_done_again(new_world):
    world = new_world(
        b_better=0.05, fault=lambda slot, n: "boot" if (slot.block, slot.position, n) == (0, 2, 1) else ""
    )
    assert start(world) == 0
    (failed,) = [entry for entry in boots(world) if entry.status != "FINISHED"]
    assert failed.tags["ab.attempt"] == "faulty" and failed.tags["end_reason"] == "the server did not come up"
    assert len([entry for entry in boots(world) if entry.status == "FINISHED"]) % 4 == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [("boot", "did not come up"), ("boot-invalid", "RADIANCE_PQ_ZPE"), ("bench", "all 3 requests failed")],
)
def test_a_boot_that_fails_twice_makes_the_ab_invalid_with_the_reason(new_world, fault, said):
    world = new_world(b_better=0.05, fault=lambda slot, n: fault if (slot.block, slot.position) == (0, 1) else "")
    assert start(world) == 3
    assert recorded(world).state == "INVALID" and parent(world).tags["verdict"] == "INVALID"
    assert "at fault 2 times" in recorded(world).reasons[0] and said in recorded(world).reasons[0]
    assert len(world.made) == 3, "and no further boot is made"
    assert attempts.recomputed(world.root / "tracking", parent(world)) == recorded(world)


def test_a_warm_up_that_fails_once_is_done_again_and_twice_is_invalid(new_world):
    world = new_world(b_better=0.05, not_ready=1)
    assert start(world) == 0


def test_a_warm_up_that_fails_twice_is_invalid_without_a_boot(new_world):
    world = new_world(not_ready=2)
    assert start(world) == 3
    assert "no boot could be made: the server of the warm-up" in recorded(world).reasons[0] and world.made == []
    assert attempts.recomputed(world.root / "tracking", parent(world)) == recorded(world)


def test_arms_that_are_the_same_server_are_refused_before_a_boot(new_world):
    world = new_world()
    test = world.test(port=world.port)
    with pytest.raises(InvalidMeasurement, match=r"cannot be compared: .*kind=floor") as caught:
        ab_run.start(replace(test, b=replace(test.a, name="another_name")), [], quiet=True)
    assert caught.value.exit_code == 3 and world.made == [] and catalog.entries(world.root / "tracking") == []


def test_a_difference_that_the_gate_does_not_declare_is_refused_before_a_boot(new_world):
    world = new_world()
    test = world.test(port=world.port, gate=replace(GATE, allowed_differences=("checkpoint *", "argv --model")))
    changed = replace(test.b, serve={"max-num-seqs": 4})
    with pytest.raises(InvalidMeasurement, match="max-num-seqs") as caught:
        ab_run.start(replace(test, b=changed), [], quiet=True)
    assert "kind=floor" not in str(caught.value) and world.made == []


def test_a_gate_for_blocks_of_another_size_is_refused(new_world):
    world = new_world()
    with pytest.raises(UsageError, match=r"boots_per_block: 8; an A/B boots in blocks of 4"):
        ab_run.checked(world.test(gate=replace(GATE, boots_per_block=8)))


def test_a_floor_wants_equal_arms_and_a_gate_for_them(new_world):
    world = new_world()
    test = world.test(port=world.port, kind="floor", gate=FLOOR_GATE)
    with pytest.raises(InvalidMeasurement, match="an A/A has equal arms"):
        ab_run.checked(replace(test, b=world.test().b))
    with pytest.raises(UsageError, match="does not judge kind=floor"):
        ab_run.checked(replace(test, gate=GATE))


def cut_at(number: int):
    """A fault that interrupts the whole A/B at its n-th boot."""
    seen = []

    def fault(slot, attempt):
        seen.append(slot)
        if len(seen) == number:
            raise KeyboardInterrupt
        return ""

    return fault


@pytest.mark.parametrize("number", [1, 4, 8])
def test_an_interrupted_ab_goes_on_without_losing_or_repeating_a_boot(new_world, number):
    world = new_world(b_better=0.004, sd=0.004, fault=cut_at(number))
    with pytest.raises(KeyboardInterrupt):
        start(world)
    assert parent(world).status == "KILLED"
    assert attempts.recomputed(world.root / "tracking", parent(world)).state == "INCONCLUSIVE"
    before = [entry.run_id for entry in boots(world) if entry.status == "FINISHED"]
    assert len(before) == number - 1
    code = resume(world)
    finished = [entry for entry in boots(world) if entry.status == "FINISHED"]
    assert [entry.run_id for entry in finished][: len(before)] == before
    slots = [(entry.tags["ab.block"], entry.tags["ab.position"]) for entry in finished]
    assert len(slots) == len(set(slots)) == 4 * recorded(world).look
    (cut,) = [entry for entry in boots(world) if entry.status != "FINISHED"]
    assert cut.tags["ab.attempt"] == "cut off" and cut.status == "KILLED"
    assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}[recorded(world).state]


def test_an_ab_that_has_its_verdict_shows_it_again_and_boots_nothing(new_world, capsys):
    world = new_world(b_better=0.05)
    assert start(world) == 0
    count = len(world.made)
    capsys.readouterr()
    assert resume(world) == 0 and len(world.made) == count
    assert "PASS" in capsys.readouterr().out


def test_going_on_with_another_server_is_refused_and_names_what_changed(new_world):
    world = new_world(fault=cut_at(2))
    with pytest.raises(KeyboardInterrupt):
        start(world)
    design = attempts.read_design(parent(world))
    path = parent(world).artifacts / attempts.DESIGN
    content = json.loads(path.read_text())
    content["test"]["box"]["serve"]["max-num-seqs"] = 4
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"arm a is not the server that this A/B began with: .*was 8, and is 4 now"):
        resume(world)
    assert design.plans["a"].fingerprint == content["plans"]["a"]["fingerprint"]


def test_an_ab_that_is_still_at_work_is_not_gone_on_with(new_world):
    world = new_world(fault=cut_at(2))
    with pytest.raises(KeyboardInterrupt):
        start(world)
    with pytest.raises(UsageError, match="is still at work in process"):
        ab_run.require_ended(replace(parent(world), status="RUNNING"))


def test_one_box_has_one_ab(new_world):
    world = new_world()
    with lease.hold("cpu", "another", world.root / "state"), pytest.raises(lease.Busy):
        start(world)


def test_a_recomputed_verdict_is_the_recorded_one_and_needs_the_records_only(new_world):
    world = new_world(b_better=0.05)
    start(world)
    again = attempts.recomputed(world.root / "tracking", parent(world))
    assert again == recorded(world)
    sample = next(Path(boots(world)[0].artifacts).glob("measurements/decode_ctx.json"))
    sample.write_text("{")
    with pytest.raises(UsageError, match=r"decode_ctx\.json: the record is missing or damaged"):
        attempts.recomputed(world.root / "tracking", parent(world))


def test_an_aa_stores_the_floors_of_box_and_stack_and_the_next_ab_has_them(new_world, capsys):
    world = new_world(sd=0.01)
    assert start(world, kind="floor", gate=replace(FLOOR_GATE, looks=(4,))) == 0
    found = floors.load(world.root / "state", "cpu", "stack0000")
    assert METRIC in found and GUARD in found
    assert found["boot.kv_tokens"].sd_between_log == 0.0, "it is the same at every boot"
    floor = found[METRIC]
    assert (floor.box, floor.stack, floor.boots) == ("cpu", "stack0000", 16)
    assert 0.004 < floor.sd_between_log < 0.02, "it was simulated with 1%"
    assert json.loads((parent(world).artifacts / "floors.json").read_text()).keys() == found.keys()
    other = new_world(b_better=0.05)
    capsys.readouterr()
    test = other.test()
    assert ab_run.plan(test, ab_run.gathered(test)).floors == found


def cold(artifacts: Path) -> None:
    edit(next(artifacts.glob("boots/*/boot.json")), cache_state="cold")


def other_stack(artifacts: Path) -> None:
    path = artifacts / "plan.json"
    edit(path, stack={**json.loads(path.read_text())["stack"], "fingerprint": "another"})


def other_prompts(artifacts: Path) -> None:
    edit(artifacts / "measurements" / "decode_ctx.json", corpora={"prose": "11ff"})


def no_number(artifacts: Path) -> None:
    edit(artifacts / "measurements" / "decode_ctx.json", metrics={})


def no_requests_succeeded(artifacts: Path) -> None:
    edit(artifacts / "measurements" / "decode_ctx.json", metrics={}, status="invalid", reason="all 9 requests failed")


def compiled(artifacts: Path) -> None:
    edit(next(artifacts.glob("boots/*/boot.json")), compiled_files=3)


def another_server(artifacts: Path) -> None:
    path = artifacts / "plan.json"
    edit(path, env={**json.loads(path.read_text())["env"], "RADIANCE_PQ_ROT_V2": "0"})


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("meddle", "field"),
    [
        (cold, "boot.cache_state: cold"),
        (compiled, "boot.compiled_files: 3"),
        (other_stack, "stack.fingerprint"),
        (other_prompts, "decode_ctx.corpora.prose"),
        (no_number, METRIC),
        (no_requests_succeeded, "all 9 requests failed"),
        (another_server, "env RADIANCE_PQ_ROT_V2"),
    ],
)
def test_a_record_that_may_not_be_judged_makes_the_recomputed_verdict_invalid_and_names_the_field(
    judged_once, tmp_path, meddle, field
):
    directory, whole = judged_once
    copied = tmp_path / "tracking"
    shutil.copytree(directory, copied)
    boot = catalog.entries(copied, parent=whole.run_id)[0]
    moved = copied / boot.artifacts.relative_to(directory)
    meddle(moved)
    made = attempts.read_design(whole)
    found = [
        attempts.of_entry(replace(e, artifacts=copied / e.artifacts.relative_to(directory)), made)
        for e in catalog.entries(copied, parent=whole.run_id)
    ]
    verdict = attempts.settled(made, found)
    assert verdict.state == "INVALID" and any(field in reason for reason in verdict.reasons), verdict.reasons


def test_servers_that_attest_the_same_are_no_ab(new_world, monkeypatch):
    world = new_world(b_better=0.05)
    monkeypatch.setattr(Simulated, "bits", lambda self, slot: 4)
    assert start(world) == 3
    assert "attestation" in recorded(world).reasons[0] and len(world.made) == 4, "found after the first block"


@pytest.fixture(scope="module")
def judged_once(tmp_path_factory, empty_store):
    """One A/B that passed; returns its store and its run."""
    root = tmp_path_factory.mktemp("judged")
    (root / "tracking").mkdir()
    shutil.copyfile(empty_store, root / "tracking" / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        world = World(root, b_better=0.05).install(patch.setattr)
        world.port = free_port()
        assert start(world) == 0
    return root / "tracking", parent(world)
