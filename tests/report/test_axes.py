"""What is seen of a picture: axes follow the boots, not an interval that two boots make wide, nor rounding."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from orchestrator.judging.comparison import CriterionResult
from orchestrator.pages import charts, criteria_chart, paired_charts
from orchestrator.recorded import sides


@pytest.fixture
def axes():
    return Figure().subplots()


def test_an_interval_far_beyond_every_boot_is_cut_and_a_narrow_one_is_whole(axes):
    axes.plot([0, 0], [-4000, 5000])
    charts.from_zero(axes, [25.0, 59.0])
    assert axes.get_ylim() == (0, pytest.approx(1.08 * 1.5 * 59))
    axes.clear()
    axes.plot([0, 0], [50, 62])
    charts.from_zero(axes, [55.0, 59.0])
    assert axes.get_ylim()[1] == pytest.approx(1.08 * 62)


def test_an_empty_axis_and_one_without_boots_have_ends(axes):
    charts.from_zero(axes, [])
    assert axes.get_ylim() == (0, 1)
    axes.barh(0, 40)
    charts.from_zero(axes, [math.nan], sideways=True)
    assert axes.get_xlim() == (0, pytest.approx(43.2))


def test_equal_boots_lie_on_one_line_and_their_mean_is_theirs(axes):
    assert sides.mean([46592.0] * 3) == (46592.0, 46592.0, 46592.0)
    assert sides.mean([0.1] * 7)[0] == 0.1 and sides.mean([0.3]) == (0.3, None, None)
    axes.plot([1, 2], [46592, 46592])
    paired_charts._at_least(axes, 1e-3)
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(46.592)
    axes.clear()
    axes.plot([1, 2], [0, 0])
    paired_charts._at_least(axes, 1e-3)
    assert axes.get_ylim() == (-0.5, 0.5)


def test_the_criteria_and_their_thresholds_are_seen_beside_an_interval_of_thousands_of_percent():
    result = CriterionResult.__new__(CriterionResult)
    object.__setattr__(result, "effect", -0.05)
    object.__setattr__(result, "interval", (-0.99, 40.0))
    low, high = criteria_chart._seen([result], [(0.02,)])
    assert -16 < low < -12 and 8 < high < 12
    object.__setattr__(result, "interval", (-0.06, -0.04))
    low, high = criteria_chart._seen([result], [(0.0,)])
    assert -7 < low < -6 and 0 < high < 1
