"""Floors from A/A boots, and outputs that differ between arms or only between boots."""

from __future__ import annotations

from itertools import permutations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.stats import agreement, floor
from orchestrator.stats.paired import nuisance

BLOCKS, POSITIONS = [0] * 4 + [1] * 4, [0, 1, 2, 3] * 2
WHEN = "2026-09-01T00:00:00+00:00"


def floor_of(values, repeats=()):
    return floor.estimate("decode.ms_per_step.ctx32", "cpu", "stack", BLOCKS, POSITIONS, values, repeats, WHEN)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-0.05, 0.05), st.floats(0.5, 2))
def test_a_floor_is_the_scatter_about_each_blocks_level_and_slope(seed, drift, second_level):
    y = 0.01 * numpy.random.default_rng(seed).standard_normal(8)
    values = 25 * numpy.exp(y)
    found = floor_of(values)
    design = nuisance(BLOCKS, POSITIONS)
    left = y - design @ numpy.linalg.lstsq(design, y, rcond=None)[0]
    assert found.dof == 4 and found.boots == 8
    assert found.sd_between_log == pytest.approx((left @ left / 4) ** 0.5)
    drifted = (
        values * numpy.exp(drift * numpy.array(POSITIONS)) * numpy.where(numpy.array(BLOCKS) == 1, second_level, 1)
    )
    assert floor_of(drifted).sd_between_log == pytest.approx(found.sd_between_log, rel=1e-6)


def test_the_spread_within_boots_is_pooled_over_them():
    found = floor_of([25.0] * 8, [[24.0, 25.0, 26.0]] * 8)
    assert found.sd_within_log == pytest.approx(numpy.log([24.0, 25.0, 26.0]).std(ddof=1))
    assert found.sd_between_log == 0.0


@pytest.mark.parametrize("values", [[], [25.0] * 7 + [0.0], [25.0] * 7 + [float("nan")]])
def test_numbers_that_are_none_give_no_floor(values):
    assert floor_of(values) is None


def test_boots_without_a_degree_of_freedom_give_no_floor():
    assert floor.estimate("m", "cpu", "s", [0], [0], [25.0], (), WHEN) is None


def test_age_is_counted_from_the_floors_last_boot():
    assert floor_of([25.0] * 8).age_days("2026-09-11T12:00:00+00:00") == 10.5


def test_outputs_that_differ_between_the_arms_alone_are_found():
    a, b = [["x"] * 6] * 2, [["x", "x", "y", "y", "y", "y"]] * 2
    assert agreement.apart(a, b) == pytest.approx(3.0**-4, rel=0.2)  # each prompt splits so by chance in 1 of 3


def test_equal_outputs_are_no_difference():
    assert agreement.apart([["x", "y"]] * 2, [["x", "y"]] * 2) == 1.0


def test_boots_that_stray_alone_are_no_difference_between_the_arms():
    a = [["x", "x", "x", "z"], ["y", "x", "x", "z"]]
    b = [["x", "x", "x", "z"], ["x", "x", "y", "z"]]
    assert agreement.apart(a, b) > 0.2


def test_the_p_value_is_that_of_all_assignments_of_outputs_to_boots():
    prompts = ["xxyz", "xyyy"]  # outputs of boots a, a, b, b

    def apart(outputs: str) -> float:
        a1, a2, b1, b2 = outputs
        across = ((a1 == b1) + (a1 == b2) + (a2 == b1) + (a2 == b2)) / 4
        return ((a1 == a2) + (b1 == b2)) / 2 - across

    seen = sum(map(apart, prompts))
    each = [[apart("".join(order)) for order in permutations(outputs)] for outputs in prompts]
    exact = numpy.mean([one + two >= seen - 1e-9 for one in each[0] for two in each[1]])
    boots = list(zip(*prompts, strict=True))
    assert agreement.apart(boots[:2], boots[2:]) == pytest.approx(exact, abs=0.015)
