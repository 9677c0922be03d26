"""What is seen of a picture: axes follow the boots, not an interval that two boots make wide, nor rounding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from orchestrator.judging.comparison import CriterionResult
from orchestrator.pages import charts, criteria_chart, paired_charts
from orchestrator.recorded import sides
from orchestrator.recorded.sides import Sample, Side


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


def two_sides(metric: str, ticks: tuple[int, ...]) -> list[Side]:
    def side(key: str, base: float) -> Side:
        samples = [
            Sample(key, n, str(n), {metric.format(at): base + n + at / 1e4 for at in ticks}, {}, None, None, (), 0, n)
            for n in range(3)
        ]
        return Side(key, f"variant {key}", "measured", tuple(samples))

    return [side("A", 20.0), side("B", 19.0)]


def drawn(monkeypatch, draw, shown: list[Side]) -> Figure:
    """The figure behind a picture."""
    taken = []
    monkeypatch.setattr(paired_charts, "picture", lambda how, height, *_: taken.append((how, height)))
    draw(shown)
    ((how, height),) = taken
    figure = Figure(figsize=(charts.WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    how(figure, charts.LIGHT)
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize("ticks", [(512,), (32, 512), (0, 512, 2048, 8192, 16384, 32768, 65536, 98304, 131072)])
@pytest.mark.parametrize(
    ("draw", "metric"),
    [
        (paired_charts.decode, "decode.ms_per_step.ctx{}"),
        (paired_charts.concurrency, "betterbench.aggregate_tok_per_s.conc{}"),
    ],
)
def test_the_marks_of_both_sides_stand_at_their_tick_and_no_labels_touch(monkeypatch, draw, metric, ticks):
    figure = drawn(monkeypatch, draw, two_sides(metric, ticks))
    axes = figure.axes[0]
    lines = [line for line in axes.get_lines() if line.get_label().startswith(("A", "B"))]
    left, right = (list(line.get_xdata()) for line in lines)
    assert [(a + b) / 2 for a, b in zip(left, right, strict=True)] == pytest.approx(list(range(len(ticks))))
    width = axes.get_xlim()[1] - axes.get_xlim()[0]
    assert width == pytest.approx(len(ticks)), "half a place to both sides, also of the only one"
    assert all(0 < b - a <= 0.2 for a, b in zip(left, right, strict=True))
    labels = [label.get_window_extent() for label in figure.axes[-1].get_xticklabels()]
    if figure.axes[-1].get_xticklabels()[0].get_rotation() == 0:
        assert all(a.x1 < b.x0 for a, b in pairwise(labels))
    else:
        assert all(a.x1 - b.x1 < -8 for a, b in pairwise(labels)), "slanted ones end apart"
