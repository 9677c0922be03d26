"""An A/B without its verdict: what its run says of it, and the time that is left as its boots come in."""

from __future__ import annotations

import pytest

from orchestrator.abtest import ab_run, attempts, hours
from orchestrator.abtest.ab import DESCRIPTION
from orchestrator.abtest.design import Hours
from orchestrator.judging import headline
from orchestrator.recorded import catalog, listing
from tests.ab.simulated import METRIC, World
from tests.ab.test_process import boots, parent, resume, start


def interrupted(world: World, after: int) -> None:
    """Ctrl-C at a boot."""

    def fault(_slot, _attempt) -> str:
        if len(world.made) > after:
            raise KeyboardInterrupt
        return ""

    world.fault = fault
    with pytest.raises(KeyboardInterrupt):
        start(world)
    world.fault = lambda slot, attempt: ""


def test_an_interrupted_ab_has_its_state_its_report_and_the_command_that_goes_on(new_world, capsys):
    world = new_world(b_better=0.0005, sd=0.004)
    interrupted(world, after=5)
    run = parent(world)
    said = run.tags[DESCRIPTION]
    assert run.status == "KILLED" and said.startswith("**ENDED before its verdict** (interrupted): 5 of at most 12")
    assert f"-m orchestrator ab --resume {run.run_id}`" in said and "INCONCLUSIVE" in said
    assert METRIC in (run.artifacts / "report.html").read_text()
    world.fault = lambda slot, attempt: at_work.append(parent(world).tags[DESCRIPTION]) or ""
    at_work: list[str] = []
    assert resume(world) == 4
    assert at_work[0].startswith("**RUNNING**: 5 of at most 12"), "as soon as it goes on"
    assert "ENDED" not in parent(world).tags[DESCRIPTION] and "--resume" not in parent(world).tags[DESCRIPTION]


def test_one_that_was_interrupted_before_its_first_boot_ended_says_so_too(new_world):
    world = new_world()
    interrupted(world, after=0)
    said = parent(world).tags[DESCRIPTION]
    assert "(interrupted): 0 of at most 12 boots" in said and "--resume" in said
    assert "INTERRUPTED" in [str(cell) for cell in listing.runs([parent(world)], every=False).columns[5].cells]
    assert not (parent(world).artifacts / "report.html").exists()


def test_a_killed_process_leaves_what_the_last_boot_said(new_world, monkeypatch):
    world = new_world(b_better=0.0005, sd=0.004)
    seen = []
    monkeypatch.setattr(
        "orchestrator.progress.Progress.note",
        lambda _self, line: seen.append((line, parent(world).tags.get(DESCRIPTION, ""))),
    )
    start(world)
    lines = [line for line, _ in seen if "of at most 12 boots" in line]
    assert len(lines) == 12 and lines[0].startswith("1 of at most 12 boots; at most ")
    assert lines[0].endswith("from 1 boot of this A/B")
    described = [said for line, said in seen if line.startswith("2 of at most")]
    assert described[0].startswith("**RUNNING**: 1 of at most 12 boots"), "what the boot before had written"
    assert "Should it be cut off" in described[0] and "--resume" in described[0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("bench", "all 3 requests failed"),
        ("boot", "the server did not come up"),
        ("boot-invalid", "RADIANCE_PQ_ZPE is not what the plan says"),
    ],
)
def test_a_boot_that_may_not_be_used_is_said_with_its_reason_when_it_ends(new_world, monkeypatch, fault, why):
    world = new_world(b_better=0.05, fault=lambda slot, n: fault if (slot.block, slot.position, n) == (0, 1, 1) else "")
    seen: list[str] = []
    monkeypatch.setattr("orchestrator.progress.Progress.note", lambda _self, line: seen.append(line))
    start(world)
    (said,) = [line for line in seen if "it is tried once more" in line]
    assert said.startswith("block 1, boot 2") and why in said


def test_hours_are_those_of_its_own_boots_once_there_are_any():
    planned = Hours({"a": 1.0, "b": 2.0}, "estimated")
    assert hours.revised(planned, {}) == planned
    assert hours.revised(planned, {"a": [0.4, 0.6]}).per_boot == {"a": 0.5, "b": 1.0}, "b is off by as much"
    found = hours.revised(planned, {"a": [0.5], "b": [3.0, 5.0]})
    assert found.per_boot == {"a": 0.5, "b": 4.0} and found.basis == "from 3 boots of this A/B"


def test_what_would_settle_it_is_told_in_hours_of_its_own_boots(new_world):
    world = new_world(b_better=0.0005, sd=0.004)
    assert start(world) == 4
    found = attempts.recomputed(world.root / "tracking", parent(world))
    design = attempts.read_design(parent(world))
    made = attempts.read(world.root / "tracking", parent(world).run_id, design)
    own = attempts.revised(design, made).mean
    assert own < design.hours.mean / 10, "a simulated boot takes a moment; the plan says minutes"
    (open_one,) = [c for c in found.criteria if c.metric == METRIC]
    assert open_one.more_hours == pytest.approx(open_one.more_boots * own)


def test_arms_of_one_variant_are_told_apart_in_their_runs_and_in_what_is_shown(new_world, capsys):
    from dataclasses import replace

    world = new_world(b_better=0.05)
    test = world.test(port=world.port)
    test = replace(test, b=replace(test.a, knobs={"RADIANCE_PQ_PTOK": 0}))
    ab_run.start(test, ["box=cpu"])
    names = {boot.tags["ab.arm"]: boot.name for boot in boots(world)}
    assert names["a"].endswith(" a int4") and names["b"].endswith(" b int4 RADIANCE_PQ_PTOK=0")
    shown = capsys.readouterr().err
    assert "arm a, int4: " in shown and "arm b, int4 RADIANCE_PQ_PTOK=0: " in shown


def test_terminal_description_and_page_begin_with_the_same_sentence(new_world, capsys):
    world = new_world(b_better=0.05)
    start(world)
    run = parent(world)
    verdict = attempts.recomputed(world.root / "tracking", run)
    said = headline.of(verdict)
    out = capsys.readouterr().out
    assert said in " ".join(out.split()) and "* the primary criterion" in " ".join(out.split())
    plain = run.tags[DESCRIPTION].replace("\\", "").replace("**", "")
    assert plain.startswith(said)
    html = (run.artifacts / "report.html").read_text().replace("<strong>PASS</strong>", "PASS")
    assert said.replace("'", "&#39;") in html
    assert catalog.find(world.root / "tracking", run.run_id).tags["verdict"] == "PASS"
