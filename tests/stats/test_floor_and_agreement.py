"""Floors from A/A boots, and outputs that differ between arms or only between boots."""

from __future__ import annotations

from itertools import combinations, permutations

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


@pytest.mark.parametrize(("boots", "least"), [(2, 2 / 6), (4, 2 / 70), (6, 2 / 924)])
@pytest.mark.parametrize("prompts", [1, 30])
def test_outputs_that_differ_between_the_arms_alone_have_the_least_p(boots, least, prompts):
    assert agreement.apart([["x"] * prompts] * boots, [["y"] * prompts] * boots) == pytest.approx(least)


def test_equal_outputs_are_no_difference():
    assert agreement.apart([["x", "y"]] * 2, [["x", "y"]] * 2) == 1.0


def test_boots_that_stray_alone_are_no_difference_between_the_arms():
    a = [["x", "x", "x", "z"], ["y", "x", "x", "z"]]
    b = [["x", "x", "x", "z"], ["x", "x", "y", "z"]]
    assert agreement.apart(a, b) > 0.2


def test_a_mode_of_whole_boots_is_no_difference_between_the_arms():
    quiet, other = ["x"] * 50, ["y"] * 50
    assert agreement.apart([quiet] * 4, [quiet, other, quiet, other]) > 0.2


def test_the_p_value_is_that_of_all_orders_of_the_boots():
    boots = ["xxyz", "xyyy", "xxyy", "zyyx", "xxyz"]  # a letter for each prompt; two boots of A, three of B

    def statistic(order: tuple[str, ...]) -> float:
        within, across = [], []
        for (i, one), (j, other) in combinations(enumerate(order), 2):
            share = sum(x == y for x, y in zip(one, other, strict=True))
            (within if (i < 2) == (j < 2) else across).append(share)
        return numpy.mean(within) - numpy.mean(across)

    exact = numpy.mean([statistic(order) >= statistic(tuple(boots)) - 1e-9 for order in permutations(boots)])
    assert agreement.apart(boots[:2], boots[2:]) == pytest.approx(exact)


def test_many_boots_are_split_by_a_sample():
    a, b = [["x", "y"]] * 12, [["x", "z"]] * 12
    assert agreement.apart(a, b) < 0.001
    assert agreement.apart(a[:6] + b[:6], a[:6] + b[:6]) > 0.3
