"""A sweep of simulated servers: each value against the best so far."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.abtest import sweep
from orchestrator.errors import UsageError
from orchestrator.recorded import catalog
from orchestrator.schema import Sweep
from tests.ab.simulated import GATE, World
from tests.ab.test_process import cut_at

SPEC = Sweep("speculation.tokens", (5, 6, 7))


def swept(world: World, values=SPEC):
    test = world.test(port=world.port, sweep=values, gate=replace(GATE, looks=(2,)))
    drafts = replace(test.a.speculation, method="ngram", tokens=5)
    arm = replace(test.a, speculation=drafts)
    return replace(test, a=arm, b=arm)


def contests(world: World) -> list[catalog.Entry]:
    return [entry for entry in reversed(catalog.entries(world.root / "tracking")) if entry.tags.get("kind") == "ab"]


def test_a_value_that_wins_is_what_the_next_one_is_paired_against(new_world, capsys):
    world = new_world(b_better=0.05)
    assert sweep.start(swept(world), [], quiet=True) == 0
    assert [entry.tags["about"] for entry in contests(world)] == [
        "speculation.tokens: is 6 better than 5?",
        "speculation.tokens: is 7 better than 6?",
    ]
    (whole,) = [entry for entry in catalog.entries(world.root / "tracking") if entry.tags.get("kind") == "sweep"]
    assert (whole.tags["verdict"], whole.tags["best"]) == ("PASS", "7")
    assert {entry.parent for entry in contests(world)} == {whole.run_id}
    assert "speculation.tokens = 7 is the best" in capsys.readouterr().out


def test_a_value_that_loses_leaves_the_best_where_it_was(new_world):
    world = new_world(b_better=-0.05)
    assert sweep.start(swept(world), [], quiet=True) == 1
    assert [entry.tags["about"] for entry in contests(world)][1] == "speculation.tokens: is 7 better than 5?"


def test_the_alpha_of_the_gate_is_shared_by_the_pairs(new_world):
    pair = sweep.pair(swept(new_world()), 5, 7)
    assert pair.gate.alpha == pytest.approx(GATE.alpha / 2)
    assert (pair.a.speculation.tokens, pair.b.speculation.tokens) == (5, 7)
    assert pair.b.name.endswith("_tokens7")


def test_an_interrupted_sweep_goes_on_within_the_ab_that_was_cut_off(new_world):
    world = new_world(b_better=0.05, fault=cut_at(11))
    with pytest.raises(KeyboardInterrupt):
        sweep.start(swept(world), [], quiet=True)
    (whole,) = [entry for entry in catalog.entries(world.root / "tracking") if entry.tags.get("kind") == "sweep"]
    assert whole.status == "KILLED"
    assert sweep.resume(whole, swept(world).paths, [], quiet=True) == 0
    assert len(contests(world)) == 2 and len(world.made) == 8 + 8 + 1, "the boot that was cut off is done again"


def test_a_finished_sweep_shows_its_outcome_again_and_boots_nothing(new_world, capsys):
    world = new_world(b_better=0.05)
    sweep.start(swept(world), [], quiet=True)
    said, made = capsys.readouterr().out.splitlines()[-1], len(world.made)
    (whole,) = [entry for entry in catalog.entries(world.root / "tracking") if entry.tags.get("kind") == "sweep"]
    assert sweep.resume(whole, swept(world).paths, [], quiet=True) == 0
    assert capsys.readouterr().out.splitlines() == [said] and len(world.made) == made


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (["PASS", "FAIL"], "PASS"),
        (["FAIL", "FAIL"], "FAIL"),
        (["FAIL", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["PASS", "INVALID"], "INVALID"),
    ],
)
def test_the_verdict_of_a_sweep(found, state):
    assert sweep.outcome(found) == state


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (Sweep("speculation.tokens", (5,)), "two values or more"),
        (Sweep("speculation.tokens", (5, 5)), "each of them once"),
        (Sweep("speculation.tokenz", (5, 6)), "a variant has no speculation.tokenz"),
        (Sweep("speculation.tokens", (5, "six")), "no whole number"),
    ],
)
def test_a_sweep_that_is_none_is_refused_before_a_boot(new_world, values, said):
    world = new_world()
    with pytest.raises(UsageError, match=said):
        sweep.start(swept(world, values), [], quiet=True)
    assert world.made == []
