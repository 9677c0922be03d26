"""Paired questions against statsmodels and against the likelihood itself."""

from __future__ import annotations

from math import log

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from statsmodels.stats.contingency_tables import mcnemar as peer_mcnemar

from orchestrator.stats import proportions
from orchestrator.stats.proportions import Discordance

counts = st.integers(0, 40)


@settings(max_examples=40, deadline=None)
@given(counts, counts)
def test_mcnemar_is_statsmodels_exact_one(a_only, b_only):
    peer = peer_mcnemar([[50, a_only], [b_only, 7]], exact=True).pvalue
    assert proportions.mcnemar(a_only, b_only) == pytest.approx(min(1.0, peer))


def score_by_likelihood(n: int, c: int, b: int, difference: float) -> float:
    """Tango's z with the nuisance parameter found by maximising the multinomial likelihood numerically."""

    def loss(q: float) -> float:
        parts = ((b, q + difference), (c, q), (n - b - c, 1 - 2 * q - difference))
        return -sum(k * log(max(p, 1e-300)) for k, p in parts if k)

    low, high = max(0.0, -difference), (1 - difference) / 2
    q = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return (b - c - n * difference) / (n * (2 * q + difference - difference**2)) ** 0.5


@settings(max_examples=40, deadline=None)
@given(counts, counts, st.integers(0, 300), st.floats(-0.3, 0.3))
def test_the_score_is_that_of_the_constrained_maximum_of_the_likelihood(a_only, b_only, equal, difference):
    n = a_only + b_only + equal
    assume(a_only and b_only and equal and abs(difference) > 1e-3)
    found = proportions.score_z(Discordance(n, a_only, b_only), difference)
    assert found == pytest.approx(score_by_likelihood(n, a_only, b_only, difference), rel=1e-3, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(counts, counts, st.integers(1, 400), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_interval_holds_the_estimate_and_grows_with_confidence(a_only, b_only, equal, confidence):
    found = Discordance(a_only + b_only + equal, a_only, b_only)
    low, high = proportions.score_interval(found, confidence)
    assert -1 <= low <= found.difference <= high <= 1
    wider = proportions.score_interval(found, (1 + confidence) / 2)
    assert wider[0] <= low + 1e-9 and high <= wider[1] + 1e-9
    swapped = proportions.score_interval(Discordance(found.n, b_only, a_only), confidence)
    assert swapped == pytest.approx((-high, -low), abs=1e-7)


def test_one_boot_an_arm_counts_the_discordant_questions():
    a, b = [[True, True, False, True, False]], [[True, False, True, True, False]]
    assert proportions.discordance(a, b) == Discordance(5, 1, 1)
    assert proportions.disagreeing(a, b) == (1, 1)


def test_repeated_boots_that_answer_alike_are_no_more_questions():
    random = numpy.random.default_rng(1)
    a, b = random.random((2, 1, 200)) < 0.9
    once = proportions.discordance(a, b)
    twice = proportions.discordance(numpy.tile(a, (3, 1)), numpy.tile(b, (3, 1)))
    assert (twice.n, twice.a_only, twice.b_only) == pytest.approx((once.n, once.a_only, once.b_only))


def test_repeated_boots_that_answer_anew_narrow_the_interval_and_never_by_more_than_their_number():
    random = numpy.random.default_rng(2)
    a, b = random.random((2, 4, 500)) < 0.9
    found = proportions.discordance(a, b)
    assert 500 * 2 < found.n <= 500 * 4
