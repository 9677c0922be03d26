"""Pictures of the sides of a comparison, each None where no side has a number for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator import labels
from orchestrator.pages.charts import Paper, Picture, at_places, from_zero, picture, spoken
from orchestrator.recorded.sides import Side, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"
SHIFT = 0.16  # between sides at one tick, in ticks
MOST_IN_ORDER = 8
LEAST_SPAN = 1e-3  # of the value: less than that is no difference to be looked at


def decode(sides: Sequence[Side]) -> Picture | None:
    return _curves(sides, "decode.ms_per_step", "ctx", "Context (tokens)", "ms per step", "Decode time per step")


def decode_rate(sides: Sequence[Side]) -> Picture | None:
    return _curves(sides, "decode.tok_per_s", "ctx", "Context (tokens)", "tok/s", "Decode speed")


def prefill(sides: Sequence[Side]) -> Picture | None:
    return _curves(sides, "prefill.prompt_tok_per_s", "len", "Prompt (tokens)", "tok/s", "Prefill speed")


def acceptance(sides: Sequence[Side]) -> Picture | None:
    """Of all drafts, those whose token at each position was accepted: of the acceptance bench, else of decode_ctx."""
    names = sorted(set().union(*(side.names() for side in sides)))
    found = [name for name in names if re.fullmatch(r"acceptance\.accepted_share\.pos\d+", name)]
    where = ""
    if not found:
        placed = [re.fullmatch(r"decode\.accepted_share\.pos\d+\.ctx(\d+)", name) for name in names]
        contexts = sorted({int(match[1]) for match in placed if match})
        if not contexts:
            return None
        where = f".ctx{contexts[0]}"
    name = f"{'decode' if where else 'acceptance'}.accepted_share"
    caption = "Accepted drafts by position" + (f", at {where[4:]} tokens of context" if where else "")
    return _curves(sides, name, "pos", "Drafted position", "share", caption, where)


def _curves(
    sides: Sequence[Side], name: str, place: str, along: str, up: str, caption: str, ending: str = ""
) -> Picture | None:
    """Each side's mean at each place with its interval over boots, over a dot for each boot."""
    pattern = re.compile(rf"{re.escape(name)}\.{place}(\d+){re.escape(ending)}")
    ticks = sorted({int(m[1]) for side in sides for n in side.names() if (m := pattern.fullmatch(n))})
    if not ticks:
        return None
    points = [[(at, found) for at in ticks if (found := side.values(f"{name}.{place}{at}{ending}"))] for side in sides]
    several = any(len(found) > 1 for of in points for _, found in of)

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        for number, (side, of) in enumerate(zip(sides, points, strict=True)):
            shift, color = SHIFT * (number - (len(sides) - 1) / 2), paper.color(number)
            for at, values in of:
                if len(values) > 1:
                    axes.plot([ticks.index(at) + shift] * len(values), values, ".", color=color, alpha=0.45)
            _line(axes, [ticks.index(at) + shift for at, _ in of], [v for _, v in of], number, color, side.title)
        at_places(axes, ticks)
        from_zero(axes, [value for of in points for _, values in of for value in values])
        axes.set_xlabel(along)
        axes.set_ylabel(up)
        _legend(figure, axes, paper)

    said = [f"{s.title}: {spoken([(at, mean(v)[0]) for at, v in of], up)}" for s, of in zip(sides, points, strict=True)]
    alt = f"{caption} in {up} by {along.lower()}. {'. '.join(said)}"
    ends = "; lines: mean of the boots with its 95% interval, dots: boots" if several else ""
    return picture(draw, 3.3, alt, caption + ends)


def concurrency(sides: Sequence[Side]) -> Picture | None:
    """The knee: aggregate tok/s and the median TTFT, against the number of requests at once."""
    names = ("betterbench.aggregate_tok_per_s", "betterbench.ttft_ms.p50")
    every = set().union(*(side.names() for side in sides))
    ticks = sorted({int(m[1]) for n in every if (m := re.fullmatch(rf"{re.escape(names[0])}\.conc(\d+)", n))})
    if not ticks:
        return None

    def draw(figure: Figure, paper: Paper) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, name, up in ((upper, names[0], "tok/s, all"), (lower, names[1], "TTFT p50 (ms)")):
            for number, side in enumerate(sides):
                shift = SHIFT / 2 * (number - (len(sides) - 1) / 2)
                found = [(n, v) for n, at in enumerate(ticks) if (v := side.values(f"{name}.conc{at}"))]
                _line(
                    axes, [n + shift for n, _ in found], [v for _, v in found], number, paper.color(number), side.title
                )
            axes.set_ylabel(up)
            from_zero(axes, [v for side in sides for at in ticks for v in side.values(f"{name}.conc{at}")])
        at_places(lower, ticks)
        lower.set_xlabel("Requests at once")
        _legend(figure, upper, paper)

    said = [
        f"{side.title}: {spoken([(at, mean(v)[0]) for at in ticks if (v := side.values(f'{names[0]}.conc{at}'))], '')}"
        for side in sides
    ]
    alt = f"Aggregate tok/s by requests at once. {'. '.join(said)}"
    return picture(
        draw, 4.2, alt, "Throughput and waiting time against concurrency: the knee is where one stops paying"
    )


def categories(sides: Sequence[Side]) -> Picture | None:
    """Decode tok/s of each prompt category, a bar for each side with its interval."""
    start = "betterbench.decode_tok_per_s."
    every = set().union(*(side.names() for side in sides))
    names = sorted(n for n in every if n.startswith(start) and "." not in n[len(start) :])
    if not names:
        return None
    height = 0.8 / len(sides)

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        for number, side in enumerate(sides):
            for row, name in enumerate(names):
                if values := side.values(name):
                    centre, low, high = mean(values)
                    at = row + height * (number - (len(sides) - 1) / 2)
                    label = side.title if row == 0 else ""
                    axes.barh(at, centre, height=height * 0.92, color=paper.color(number), label=label)
                    if low is not None:
                        axes.plot([low, high], [at, at], color=paper.ink, linewidth=1.2)
        axes.set_yticks(range(len(names)), [name[len(start) :].replace("_", " ") for name in names])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        from_zero(axes, [v for side in sides for name in names for v in side.values(name)], sideways=True)
        axes.set_xlabel("Decode tok/s, one request at a time")
        _legend(figure, axes, paper)

    said = [
        f"{s.title}: " + ", ".join(f"{n[len(start) :]} {labels.text(mean(v)[0])}" for n in names if (v := s.values(n)))
        for s in sides
    ]
    return picture(
        draw, 1.2 + 0.24 * len(names) * (1 + len(sides)), f"Decode tok/s by category. {'. '.join(said)}",
        "Decode speed by category",
    )  # fmt: skip


def kl(sides: Sequence[Side]) -> Picture | None:
    """Mean KL of each corpus with its interval (over boots, else over documents), and the reference's own floor."""
    every = set().union(*(side.names() for side in sides))
    corpora = sorted({m[1] for n in every if (m := re.fullmatch(r"kl\.mean_nats\.([^.]+)", n))})
    if not corpora:
        return None
    rows: list[tuple[int, int, float, float, float]] = []
    floors: dict[int, float] = {}
    for row, corpus in enumerate(corpora):
        name = f"kl.mean_nats.{corpus}"
        for number, side in enumerate(sides):
            if values := side.values(name):
                centre, low, high = mean(values)
                if low is None:
                    low = side.first.metrics.get(f"{name}.ci_low", centre)
                    high = side.first.metrics.get(f"{name}.ci_high", centre)
                rows.append((row, number, centre, low, high))
        known = [value for side in sides for value in side.values(f"kl.floor_nats.{corpus}")]
        if known:
            floors[row] = max(known)

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        for row, number, centre, low, high in rows:
            at = row + SHIFT * (number - (len(sides) - 1) / 2)
            spread = [[max(centre - low, 0.0)], [max(high - centre, 0.0)]]
            first = all(row <= r for r, n, *_ in rows if n == number)
            axes.errorbar(
                centre, at, xerr=spread, fmt=MARKERS[number % len(MARKERS)], color=paper.color(number), capsize=4,
                label=sides[number].title if first else "",
            )  # fmt: skip
        for row, value in floors.items():
            label = "floor" if row == min(floors) else ""
            axes.plot([value] * 2, [row - 0.4, row + 0.4], "--", color=paper.ink, linewidth=1.8, label=label)
        if all(low > 0 for *_, low, _ in rows) and all(value > 0 for value in floors.values()):
            axes.set_xscale("log")
        axes.set_yticks(range(len(corpora)), corpora)
        axes.set_ylim(len(corpora) - 0.4, -0.6)
        axes.set_xlabel("KL (nats)")
        _legend(figure, axes, paper)

    said = [
        f"{corpora[row]}, {sides[number].title}: {labels.text(centre)} ({labels.text(low)} to {labels.text(high)}), "
        f"floor {labels.text(floors.get(row))}"
        for row, number, centre, low, high in rows
    ]
    caption = "KL against the reference; dashed: the floor, what the reference itself has on a second pass"
    return picture(draw, 1.6 + 0.6 * len(corpora), f"Mean KL in nats by corpus: {'; '.join(said)}", caption)


def in_boot_order(sides: Sequence[Side], metrics: Sequence[str], caption: str) -> Picture | None:
    """A dot for each boot at its place in time, a strip for each metric: drift, and boots of two kinds, are seen."""
    shown = [name for name in metrics if any(side.values(name) for side in sides)][:MOST_IN_ORDER]
    if not shown:
        return None

    def draw(figure: Figure, paper: Paper) -> None:
        strips = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(strips, shown, strict=True):
            for number, side in enumerate(sides):
                of = [(s.number, s.metrics[name]) for s in side.samples if name in s.metrics]
                if of:
                    color = paper.color(number)
                    marker = MARKERS[number % len(MARKERS)]
                    axes.axhline(mean([v for _, v in of])[0], color=color, linewidth=1, alpha=0.6)
                    axes.plot(*zip(*of, strict=True), marker, color=color, label=side.title)
            axes.set_title(name, loc="left", fontsize=9)
            axes.margins(x=0.05, y=0.2)
            axes.ticklabel_format(axis="y", useOffset=False)
            _at_least(axes, LEAST_SPAN)
        last = max(s.number for side in sides for s in side.samples)
        strips[-1].set_xticks(range(1, last + 1) if last <= 16 else range(1, last + 1, 1 + last // 12))
        strips[-1].set_xlabel("Boot, in the order they were made")
        _legend(figure, strips[0], paper)

    said = []
    for name in shown:
        dots = sorted(
            (s.number, side.key, s.metrics[name]) for side in sides for s in side.samples if name in s.metrics
        )
        said.append(f"{name}: " + ", ".join(f"{number} ({key}) {labels.text(value)}" for number, key, value in dots))
    return picture(draw, 1.1 + 1.15 * len(shown), f"Each boot in its order. {'. '.join(said)}", caption)


def _line(
    axes: Axes, places: Sequence[float], values: Sequence[Sequence[float]], number: int, color: str, label: str
) -> None:
    """Means with their intervals, where boots give one."""
    found = [mean(of) for of in values]
    centres = [centre for centre, _, _ in found]
    axes.plot(places, centres, f"-{MARKERS[number % len(MARKERS)]}", color=color, label=label, markersize=5)
    for at, (_, low, high) in zip(places, found, strict=True):
        if low is not None:
            axes.plot([at, at], [low, high], color=color, linewidth=1.2)


def _at_least(axes: Axes, share: float) -> None:
    """An upward axis on which values that are equal, or nearly, lie in the middle."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    middle = (low + high) / 2
    half = share * abs(middle) / 2 or 0.5
    if high - low < 2 * half:
        axes.set_ylim(middle - half, middle + half)


def _legend(figure: Figure, axes: Axes, paper: Paper) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, names, loc="outside upper left", frameon=False, labelcolor=paper.ink, fontsize=9,
            ncols=1 if max(map(len, names)) > 24 else 2,
        )  # fmt: skip
