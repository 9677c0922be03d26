"""Pictures of one run's measurements, each drawn for light and for dark paper, as SVG in data URIs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator import labels
from orchestrator.records import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 4.8
LETTERS_ACROSS = 44  # that the labels below a picture may have side by side
FAR = 1.5  # times the largest value: no interval is drawn beyond


@dataclass(frozen=True)
class Paper:
    sheet: str
    ink: str
    grid: str
    first: str
    second: str
    more: tuple[str, ...]  # for the third side of a comparison and on

    def color(self, number: int) -> str:
        """Of the side of this number, from 0; markers tell them apart where the colors repeat."""
        colors = (self.first, self.second, *self.more)
        return colors[number % len(colors)]


LIGHT = Paper(
    sheet="#ffffff", ink="#24292f", grid="#d8dee4", first="#0a5dc2", second="#b3470a",
    more=("#1a7f37", "#8250df", "#bf3989", "#57606a"),
)  # fmt: skip
DARK = Paper(
    sheet="#15191e", ink="#d5dce3", grid="#3a424b", first="#74b3ff", second="#ffa466",
    more=("#57d37c", "#d2a8ff", "#ff9bce", "#9aa5b1"),
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """`alt` says what is to be seen, with the numbers."""

    light: str
    dark: str
    alt: str
    caption: str


def decode(measurement: Measurement) -> Picture | None:
    """Milliseconds per step against the context, a dot a request; None where there is no number."""
    points = labels.series(measurement.metrics, "decode.ms_per_step", "ctx")

    def one(sample: Mapping[str, Any]) -> tuple[int, float] | None:
        updates = sample.get("update_ms") or ()
        if sample.get("error") or len(updates) < 2:
            return None
        return sample["context_tokens"], (updates[-1] - updates[0]) / (len(updates) - 1)

    return _curve(points, _dots(measurement, one), "Context (tokens)", "ms per step", "Decode time per step")


def prefill(measurement: Measurement) -> Picture | None:
    """Prompt tokens per second against the prompt's length, a dot a request; None where there is no number."""
    points = labels.series(measurement.metrics, "prefill.prompt_tok_per_s", "len")

    def one(sample: Mapping[str, Any]) -> tuple[int, float] | None:
        updates = sample.get("update_ms") or ()
        if sample.get("error") or sample.get("warmup") or not updates or updates[0] <= 0:
            return None
        return sample["length_tokens"], 1e3 * sample["length_tokens"] / updates[0]

    return _curve(points, _dots(measurement, one), "Prompt (tokens)", "tok/s", "Prefill speed")


def concurrency(measurement: Measurement) -> Picture | None:
    """Aggregate tokens per second and the median TTFT against the number of requests at once."""
    rates = labels.series(measurement.metrics, "betterbench.aggregate_tok_per_s", "conc")
    waits = labels.series(measurement.metrics, "betterbench.ttft_ms.p50", "conc")
    if not rates:
        return None

    def draw(figure: Figure, paper: Paper) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        ticks = [at for at, _ in rates]
        for axes, points, color, name in (
            (upper, rates, paper.first, "tok/s, all"),
            (lower, waits, paper.second, "TTFT p50 (ms)"),
        ):
            places = [ticks.index(at) for at, _ in points if at in ticks]
            axes.plot(places, [value for at, value in points if at in ticks], "o-", color=color)
            axes.set_ylabel(name)
            from_zero(axes)
        at_places(lower, ticks)
        lower.set_xlabel("Requests at once")

    alt = f"Aggregate tok/s: {spoken(rates, 'tok/s')}. Median TTFT in ms: {spoken(waits, 'ms')}. By requests at once."
    return picture(draw, 3.9, alt, "Throughput and waiting time against concurrency")


def categories(measurement: Measurement) -> Picture | None:
    """Decode tokens per second of each prompt category, single stream, with the combined figure as a line."""
    rates = labels.by_name(measurement.metrics, "betterbench.decode_tok_per_s")
    combined = measurement.metrics.get("betterbench.combined_tok_per_s")
    if not rates:
        return None

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        bars = axes.barh(
            [name.replace("_", " ") for name in rates], list(rates.values()), color=paper.first, height=0.65
        )
        axes.bar_label(
            bars, [labels.text(value, "tok/s") for value in rates.values()], label_type="center", color=paper.sheet
        )
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("Decode tok/s, one request at a time")
        if combined is not None:
            axes.axvline(combined, color=paper.second, linestyle="--", linewidth=1.5)
            axes.set_title(f"dashed: combined {labels.text(combined, 'tok/s')}", loc="right", color=paper.second)

    alt = "Decode tok/s by category: " + ", ".join(f"{name} {labels.text(value)}" for name, value in rates.items())
    return picture(draw, 3.4, alt, "Decode speed by category")


def kl(measurement: Measurement) -> Picture | None:
    """Mean KL of each corpus with its interval, and the floor: the reference against itself."""
    metrics = measurement.metrics
    means = labels.by_name(metrics, "kl.mean_nats")
    if not means:
        return None
    floors = labels.by_name(metrics, "kl.floor_nats")
    bounds = {
        name: (metrics.get(f"kl.mean_nats.{name}.ci_low", mean), metrics.get(f"kl.mean_nats.{name}.ci_high", mean))
        for name, mean in means.items()
    }

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        for row, (name, mean) in enumerate(means.items()):
            low, high = bounds[name]
            spread = [[max(mean - low, 0.0)], [max(high - mean, 0.0)]] if high > low else None  # a point has no bar
            axes.errorbar(
                mean, row, xerr=spread, fmt="o", color=paper.first, capsize=5, label="" if row else "mean, interval"
            )
            if name in floors:
                axes.plot(
                    floors[name],
                    row,
                    "|",
                    color=paper.second,
                    markersize=18,
                    markeredgewidth=2.5,
                    label="" if row else "floor",
                )
        if min(*means.values(), *floors.values(), *(low for low, _ in bounds.values())) > 0:
            axes.set_xscale("log")
        axes.set_yticks(range(len(means)), list(means))
        axes.set_ylim(len(means) - 0.4, -0.6)
        axes.set_xlabel("KL (nats)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, labelcolor=paper.ink)

    said = [
        f"{name} {labels.text(mean)} ({labels.text(bounds[name][0])} to {labels.text(bounds[name][1])}), "
        f"floor {labels.text(floors.get(name))}"
        for name, mean in means.items()
    ]
    return picture(
        draw, 1.5 + 0.5 * len(means), f"Mean KL in nats by corpus: {'; '.join(said)}", "KL against the reference"
    )


def _curve(
    points: Sequence[tuple[int, float]], dots: Sequence[tuple[int, float]], along: str, up: str, caption: str
) -> Picture | None:
    """A line through `points` at evenly spaced places, over the single requests as `dots`."""
    if not points:
        return None
    ticks = [at for at, _ in points]

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        shown = [(ticks.index(at), value) for at, value in dots if at in ticks]
        axes.plot([x for x, _ in shown], [y for _, y in shown], "o", color=paper.second, alpha=0.55, markersize=4.5)
        axes.plot(range(len(ticks)), [value for _, value in points], "o-", color=paper.first)
        at_places(axes, ticks)
        from_zero(axes)
        axes.set_xlabel(along)
        axes.set_ylabel(up)

    alt = f"{caption} in {up} by {along.lower()}: {spoken(points, up)}"
    return picture(draw, 3.0, alt, f"{caption}; line: median, dots: single requests" if dots else caption)


def _dots(
    measurement: Measurement, one: Callable[[Mapping[str, Any]], tuple[int, float] | None]
) -> list[tuple[int, float]]:
    return [dot for dot in map(one, measurement.samples) if dot is not None]


def at_places(axes: Axes, ticks: Sequence[int]) -> None:
    """Evenly spaced ticks, each with half a place of room to both sides, so that what is shifted from one stays at it,
    also where it is the only one; labels that would touch are slanted."""
    axes.set_xticks(range(len(ticks)), [f"{at:,}" for at in ticks])
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    if sum(len(f"{at:,}") + 2 for at in ticks) > LETTERS_ACROSS:
        axes.tick_params(axis="x", labelrotation=40, labelsize=9)


def from_zero(axes: Axes, values: Sequence[float] = (), *, sideways: bool = False) -> None:
    """An axis that starts at 0 and has room beyond what is largest, however close all of it lies.

    With `values`, those of the boots, an interval that goes far beyond all of them is cut: that of two boots can be so
    wide that nothing else would be seen.
    """
    top = axes.dataLim.x1 if sideways else axes.dataLim.y1  # -inf where nothing was drawn
    if finite := [value for value in values if math.isfinite(value)]:
        top = min(top, FAR * max(finite))
    (axes.set_xlim if sideways else axes.set_ylim)(0, 1.08 * top if 0 < top < math.inf else 1)


def spoken(points: Sequence[tuple[int, float]], unit: str) -> str:
    return ", ".join(f"{labels.text(value, unit)} at {at:,}" for at, value in points) or "missing"


def picture(draw: Callable[[Figure, Paper], None], height_in: float, alt: str, caption: str) -> Picture:
    """What `draw` puts on a figure, in the colors of the paper that it is given."""
    light = _svg(draw, LIGHT, height_in)
    dark = light
    for on_light, on_dark in zip(_colors(LIGHT), _colors(DARK), strict=True):  # drawing takes 20 times as long
        dark = dark.replace(on_light, on_dark)
    return Picture(_uri(light), _uri(dark), alt, caption)


def _colors(paper: Paper) -> tuple[str, ...]:
    return (paper.sheet, paper.ink, paper.grid, paper.first, paper.second, *paper.more)


def _uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _svg(draw: Callable[[Figure, Paper], None], paper: Paper, height_in: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.size": 10.5,
        "axes.titlesize": 10.5,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": paper.grid,
        "axes.edgecolor": paper.grid,
        "text.color": paper.ink,
        "axes.labelcolor": paper.ink,
        "xtick.color": paper.ink,
        "ytick.color": paper.ink,
        "lines.linewidth": 2,
        "svg.hashsalt": "report",  # the same numbers give the same bytes
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure, paper)
        target = io.BytesIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return target.getvalue().decode()
