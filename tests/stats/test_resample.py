"""Bootstrap over items, held against loops that leave items out and against cases with a known answer."""

from __future__ import annotations

from math import log

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.stats import resample

SEEDS = st.integers(0, 2**32 - 1)


def jackknife(statistic, *parts: numpy.ndarray) -> float:
    n = len(parts[0])
    left_out = [statistic(*(numpy.delete(part, item) for part in parts)) for item in range(n)]
    return float(((n - 1) / n * ((numpy.array(left_out) - statistic(*parts)) ** 2).sum()) ** 0.5)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(12, 40))
def test_a_difference_is_weighted_by_size_and_has_the_jackknifes_error(seed, items):
    random = numpy.random.default_rng(seed)
    sizes, d = random.integers(50, 500, items), random.standard_normal(items)
    found = resample.weighted_difference(d * sizes, sizes)
    assert found.value == pytest.approx(numpy.average(d, weights=sizes))
    assert found.se == pytest.approx(jackknife(lambda d, w: d.sum() / w.sum(), d * sizes, sizes))
    low, high = found.interval(0.9)
    assert low < found.value < high
    assert resample.weighted_difference(d * sizes, sizes).interval(0.9) == (low, high)  # seeded


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(12, 40))
def test_a_ratio_of_ratios_is_of_the_sums(seed, items):
    random = numpy.random.default_rng(seed)
    parts = [random.integers(50, 500, items).astype(float) for _ in range(4)]

    def statistic(a_top, a_bottom, b_top, b_bottom):
        return log(b_top.sum() / b_bottom.sum() * a_bottom.sum() / a_top.sum())

    found = resample.log_ratio_of_ratios(*parts)
    assert found.value == pytest.approx(statistic(*parts))
    n = items
    left_out = numpy.array([statistic(*(numpy.delete(part, item) for part in parts)) for item in range(n)])
    assert found.se == pytest.approx(((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()) ** 0.5)
    swapped = resample.log_ratio_of_ratios(*parts[2:], *parts[:2])
    assert swapped.value == pytest.approx(-found.value) and swapped.se == pytest.approx(found.se)


def test_arms_that_differ_by_a_factor_on_every_prompt_differ_by_exactly_it():
    random = numpy.random.default_rng(3)
    top, bottom = random.integers(50, 500, (2, 20)).astype(float)
    found = resample.log_ratio_of_ratios(top, bottom, 1.25 * top, bottom)
    assert found.interval(0.99) == pytest.approx((log(1.25), log(1.25)))


def test_equal_documents_leave_no_doubt():
    assert resample.weighted_difference([0.0] * 12, [511] * 12).interval(0.99) == (0.0, 0.0)
    low, high = resample.weighted_difference([0.5] * 12, [1] * 12).interval(0.99)
    assert (low, high) == pytest.approx((0.5, 0.5))


def test_pairing_takes_out_what_makes_documents_hard():
    random = numpy.random.default_rng(4)
    hard, noise = 10 * random.standard_normal(20), 0.01 * random.standard_normal(20)
    assert resample.weighted_difference((hard + noise) - hard, numpy.ones(20)).se < 0.01
