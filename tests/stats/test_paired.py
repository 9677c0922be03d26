"""The effect of one number per boot, against scipy, statsmodels and the formulas it is made of."""

from __future__ import annotations

import math

import numpy
import pytest
import statsmodels.api
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from orchestrator.stats import paired

ABBA, BAAB = list("abba"), list("baab")
noise = st.floats(-1, 1, allow_nan=False)


def blocks_of(*orders: list[str]) -> tuple[list[str], list[int], list[int]]:
    arms = [arm for order in orders for arm in order]
    return (
        arms,
        [n for n, order in enumerate(orders) for _ in order],
        [p for order in orders for p in range(len(order))],
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(noise, noise), min_size=2, max_size=8))
def test_without_a_floor_pairs_give_the_ordinary_paired_t(pairs):
    a, b = numpy.array(pairs).T
    assume((b - a).std() > 1e-6)
    where = paired.layout(*blocks_of(*[["a", "b"]] * len(pairs)))
    found = paired.estimate([value for pair in pairs for value in pair], where, None, 0.0)
    peer = stats.ttest_rel(b, a)
    assert found.dof == peer.df
    assert found.effect / found.se == pytest.approx(peer.statistic, rel=1e-6)
    assert found.interval(0.9) == pytest.approx(tuple(peer.confidence_interval(0.9)), rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([ABBA, BAAB, ["a", "b"], list("abbaab"), list("abb")]), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_blocks_with_levels_and_slopes_are_fitted_as_statsmodels_fits_them(orders, seed):
    arms, blocks, positions = blocks_of(*orders)
    y = numpy.random.default_rng(seed).standard_normal(len(arms))
    where = paired.layout(arms, blocks, positions)
    design = numpy.column_stack([[arm == "b" for arm in arms], paired.nuisance(blocks, positions)]).astype(float)
    peer = statsmodels.api.OLS(y, design).fit()
    assert where.dof == peer.df_resid
    assert y @ where.contrast == pytest.approx(peer.params[0])
    if where.dof:
        found = paired.estimate(y, where, None, 0.0)
        assert found.se == pytest.approx(peer.bse[0]) and found.sd**2 == pytest.approx(peer.mse_resid)


@settings(max_examples=40, deadline=None)
@given(st.lists(noise, min_size=8, max_size=8), st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(-5, 5))
def test_a_drift_linear_in_the_position_changes_nothing(values, first, second, level):
    where = paired.layout(*blocks_of(ABBA, BAAB))
    y = numpy.array(values)
    drift = numpy.concatenate([first * numpy.arange(4), level + second * numpy.arange(4)])
    assert (y + drift) @ where.contrast == pytest.approx(y @ where.contrast, abs=1e-9)
    assert (y + drift) @ where.residuals == pytest.approx(y @ where.residuals, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.001, 10), st.integers(1, 12), st.floats(0.001, 10), st.floats(0.5, 50))
def test_the_variance_is_moderated_by_the_degrees_of_freedom(own, own_dof, floor, floor_dof):
    variance, dof, used = (v.item() for v in paired.moderate(own, own_dof, floor, floor_dof))
    p = stats.f.sf(own / floor, own_dof, floor_dof)
    assume(abs(p - paired.SPREAD_LEVEL) > 1e-6)
    assert used == (p > paired.SPREAD_LEVEL)
    if used:
        assert variance == pytest.approx((floor_dof * floor + own_dof * own) / (floor_dof + own_dof))
        assert dof == floor_dof + own_dof
    else:
        assert (variance, dof) == (own, own_dof)


def test_a_floor_without_degrees_of_freedom_is_never_borrowed_from():
    assert [v.item() for v in paired.moderate(4.0, 3, 1.0, 0.0)] == [4.0, 3, False]


def test_two_boots_of_one_arm_in_the_slow_mode_leave_the_floor_aside():
    where = paired.layout(*blocks_of(ABBA, BAAB))
    y = [0.2, 0.001, 0.0, -0.001, 0.0, 0.001, 0.0, 0.002]
    found = paired.estimate(y, where, 0.002, 8.0)
    assert found.contradicts and not found.borrowed and found.dof == where.dof == 3
    low, high = found.interval(0.9)
    assert low < 0 < high


def test_one_boot_an_arm_without_a_floor_has_no_estimate():
    where = paired.layout(["a", "b"], [0, 0], [0, 1])
    assert paired.estimate([0.0, 1.0], where, None, 0.0) is None
    found = paired.estimate([0.0, 1.0], where, 0.1, 8.0)
    assert found.se == pytest.approx(0.1 * 2**0.5) and found.dof == 8 and found.own_sd is None


def test_blocks_of_one_arm_each_cannot_tell_the_arms_apart():
    assert paired.layout(["a", "a", "b", "b"], [0, 0, 1, 1], [0, 1, 0, 1]) is None


def test_equal_numbers_are_known_exactly():
    where = paired.layout(*blocks_of(ABBA, BAAB))
    found = paired.estimate([1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0], where, None, 0.0)
    assert found.interval(0.999) == pytest.approx((1.0, 1.0))


def test_the_same_numbers_from_both_arms_prove_nothing_whatever_their_rounding():
    where = paired.layout(*blocks_of(ABBA, BAAB, ABBA, BAAB))
    found = paired.estimate([math.log(24.19)] * 16, where, None, 0.0)
    assert paired.decide(found.interval(0.9), 0.0) == "INCONCLUSIVE"
    assert paired.decide((5.6e-17, 5.6e-17), 0.0) == paired.decide((-5.6e-17, -5.6e-17), 0.0) == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("interval", "outcome"), [((0.1, 0.3), "PASS"), ((-0.3, -0.1), "FAIL"), ((-0.1, 0.1), "INCONCLUSIVE")]
)
def test_an_interval_decides_where_it_leaves_the_threshold_out(interval, outcome):
    assert paired.decide(interval, 0.0) == outcome
