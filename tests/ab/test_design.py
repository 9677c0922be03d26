"""The order of boots, and the hours and floors that are shown before the first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from orchestrator import shipped
from orchestrator.abtest import ab_run, design, design_text
from orchestrator.errors import UsageError
from orchestrator.judging import gate
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.schema import Suite
from orchestrator.stats.floor import Floor
from tests.ab.simulated import GATE, METRIC


@pytest.mark.parametrize("seed", range(20))
def test_in_every_block_both_arms_have_as_many_boots_and_the_same_mean_position(seed):
    for block in range(6):
        slots = [slot for slot in design.order(seed, 6) if slot.block == block]
        at = {arm: [slot.position for slot in slots if slot.arm == arm] for arm in "ab"}
        assert [slot.position for slot in slots] == [0, 1, 2, 3]
        assert len(at["a"]) == len(at["b"]) == 2 and sum(at["a"]) == sum(at["b"])


def test_the_seed_fixes_the_order_and_the_blocks_are_drawn():
    assert design.order(7, 6) == design.order(7, 6)
    first = [design.order(seed, 1)[0].arm for seed in range(1000)]
    assert 430 < first.count("a") < 570, "a fair coin for each block"
    assert len({tuple(slot.arm for slot in design.order(seed, 6)) for seed in range(500)}) == 2**6


def test_more_blocks_do_not_change_the_earlier_ones():
    assert design.order(3, 6)[:8] == design.order(3, 2)


def test_the_plan_shows_order_hours_and_that_they_are_estimated(new_world):
    world = new_world()
    test = world.test()
    made = ab_run.plan(test, ab_run.gathered(test))
    text = design_text.as_text(made, datetime.now(UTC))
    assert (
        "at most 12 boots" in text
        and "estimated, at the pace of a small CPU box: no boot with this suite is recorded on cpu" in text
    )
    assert text.count("look ") == 3 and "floors: none of box cpu on this stack" in text
    assert "kind=floor box=cpu" in text


def test_recorded_boots_say_how_long_the_next_ones_take(new_world):
    world = new_world(b_better=0.05)
    ab_run.start(world.test(port=world.port), [], quiet=True)
    test = world.test(port=world.port)
    made = ab_run.plan(test, ab_run.gathered(test))
    assert "recorded boots of int4" in made.hours.basis and "estimated" not in made.hours.basis
    assert 0 < 3600 * made.hours.mean < 60


def test_an_old_floor_is_said(new_world):
    world = new_world()
    test = world.test()
    made = ab_run.plan(test, ab_run.gathered(test))
    old = Floor(METRIC, "cpu", "stack0000", 0.0, 0.004, 6.0, "2026-01-01T00:00:00+00:00", 8)
    aged = design.Design(**{**vars(made), "floors": {METRIC: old}})
    lines = design_text.floor_lines(aged, datetime(2026, 3, 1, tzinfo=UTC))
    assert any(f"older than {GATE.floor_max_age_days:g} days" in line and METRIC in line for line in lines)
    assert not any("older" in line for line in design_text.floor_lines(aged, datetime(2026, 1, 2, tzinfo=UTC)))


def test_a_suite_without_what_the_gate_must_have_is_refused_before_the_first_boot(new_world):
    world = new_world()
    only_prefill = Suite("only_prefill", 1, {"prefill": {"lengths_tokens": [256], "runs": 1, "warmup_runs": 0}})
    with pytest.raises(
        UsageError, match="criterion decode needs the bench decode_ctx, which suite only_prefill has not"
    ):
        ab_run.checked(world.test(suite=only_prefill))


@pytest.mark.parametrize(
    ("metric", "said"),
    [("decod.ms_per_step.ctx*", "decod measures nothing"), ("decode.ms_per_stp.ctx*", "is no metric")],
)
def test_a_metric_that_nothing_measures_is_refused_before_a_boot(metric, said):
    suite = Suite("s", 1, {"decode_ctx": {}})
    made = Gate("g", {"c": Criterion(metric, "superior", "primary", min_effect=0.0)})
    with pytest.raises(UsageError, match=rf"gate=g: criteria\.c\.metric: .*{said}"):
        ab_run.require_benches(made, suite)


@pytest.mark.parametrize("path", sorted((shipped.conf_dir() / "gate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_metric_of_a_shipped_gate_is_one(path):
    made = gate.load(path.stem)
    required = {name: replace(criterion, required=False) for name, criterion in made.criteria.items()}
    ab_run.require_benches(replace(made, criteria=required), Suite("s", 1, {}))
