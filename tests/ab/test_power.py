"""What `ab --power` says from floors, without a boot."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from orchestrator.abtest import ab_run, design, power_text
from orchestrator.errors import UsageError
from orchestrator.judging import floors
from orchestrator.judging.gate import Criterion
from orchestrator.schema import Sweep
from orchestrator.stats.floor import Floor
from orchestrator.verbs import compare
from tests.ab.simulated import FLOOR_GATE, GATE, GUARD, METRIC


def with_floor(world, sd: float) -> design.Design:
    floor = Floor(GUARD, "cpu", "stack0000", 0.0, sd, 8.0, "2026-01-01T00:00:00+00:00", 16)
    floors.save(world.root / "state", {GUARD: floor})
    test = world.test()
    return ab_run.plan(test, ab_run.gathered(test))


def test_boots_and_hours_come_from_the_floor_and_grow_with_it(new_world):
    world = new_world()
    (quiet,) = power_text.needs(with_floor(world, 0.004))
    (noisy,) = power_text.needs(with_floor(world, 0.02))
    assert quiet.metric == noisy.metric == GUARD and quiet.distance == 0.02
    assert 4 <= quiet.boots < noisy.boots and quiet.boots % 4 == noisy.boots % 4 == 0
    assert quiet.smallest < 0.02 < noisy.smallest


def test_the_boots_are_the_fewest_that_the_noncentral_t_gives_the_power(new_world):
    (need,) = power_text.needs(with_floor(new_world(), 0.02))
    level = power_text.looks.level(GATE.alpha, GATE.looks, GATE.max_blocks, GATE.spending)

    def chance(blocks: int) -> float:
        dof = 2 * blocks - 1 + 8
        return stats.nct.sf(stats.t.ppf(1 - level, dof), dof, math.log1p(0.02) / 0.02 * math.sqrt(blocks))

    assert chance(need.boots // 4) >= power_text.POWER > chance(need.boots // 4 - 1)


def test_without_a_floor_it_says_what_to_measure(new_world):
    world = new_world()
    test = world.test()
    made = ab_run.plan(test, ab_run.gathered(test))
    assert power_text.table(made) is None
    assert any(METRIC in line and "kind=floor" in line for line in power_text.notes(made))
    assert power_text.notes(made)[0].startswith("no table: gate ") and " boots, " in power_text.notes(made)[0]


@pytest.mark.parametrize(
    ("criterion", "distance"),
    [
        (Criterion("x", "superior", min_effect=0.02), 0.02),
        (Criterion("x", "non_inferior", margin=0.01), 0.01),
        (Criterion("x", "accuracy_not_worse", margin=0.025), None),
        (Criterion("x", "no_more"), None),
    ],
)
def test_claims_about_questions_and_documents_are_not_decided_by_boots(criterion, distance):
    assert power_text.claimed(criterion) == distance


def test_a_sweep_is_told_the_boots_of_a_pair_at_the_share_of_alpha_that_the_pair_has(new_world, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(power_text, "table", lambda made: asked.append(made.test.gate.alpha))
    compare._power(new_world().test(sweep=Sweep("knobs.RADIANCE_PQ_DECODE_MAX_M", ("16", "32", "64"))))
    assert asked == [GATE.alpha / 2] and "each of its 2 A/Bs" in capsys.readouterr().out


def test_no_power_is_told_of_an_ab_that_could_not_be_started(new_world):
    with pytest.raises(UsageError, match="does not judge kind=ab"):
        compare._power(new_world().test(FLOOR_GATE))
