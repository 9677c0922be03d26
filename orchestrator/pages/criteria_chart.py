"""The picture of a verdict: each criterion's effect with its interval, and what the gate asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.judging.comparison import CriterionResult
from orchestrator.judging.gate import Criterion, Gate
from orchestrator.pages.charts import Paper, Picture, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CRITERIA = 24


def effects(criteria: Sequence[CriterionResult], gate: Gate) -> Picture | None:
    """B against A in percent for each criterion that has an interval, and what the gate asks for."""
    shown = [c for c in criteria if c.unit in ("relative", "share") and c.interval is not None and c.effect is not None]
    shown = [c for c in shown if all(math.isfinite(end) for end in c.interval)][:MOST_CRITERIA]
    if not shown:
        return None
    limits = [_limits(c, gate) for c in shown]

    def draw(figure: Figure, paper: Paper) -> None:
        axes = figure.subplots()
        axes.axvline(0, color=paper.ink, linewidth=1)
        for row, (c, of) in enumerate(zip(shown, limits, strict=True)):
            low, high = (100 * end for end in c.interval)
            at = 100 * c.effect
            color = {"PASS": paper.more[0], "FAIL": paper.second}.get(c.state, paper.first)
            axes.errorbar(at, row, xerr=[[at - low], [high - at]], fmt="o", color=color, capsize=4)
            axes.plot([100 * end for end in of], [row] * len(of), "|", color=paper.more[1], markersize=16, mew=2.5)
        axes.set_yticks(range(len(shown)), [f"{c.metric}\n{c.state.lower()}" for c in shown], fontsize=8.5)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(*_seen(shown, limits))
        axes.set_xlabel("B against A (%)")

    said = [
        f"{c.metric} {c.state}: {100 * c.effect:+.2f}% ({100 * c.interval[0]:+.2f}% to {100 * c.interval[1]:+.2f}%)"
        for c in shown
    ]
    caption = "B against A with the interval of this look; upright marks: the gate's thresholds"
    return picture(draw, 1.0 + 0.42 * len(shown), f"B against A by criterion: {'; '.join(said)}", caption)


def _seen(shown: Sequence[CriterionResult], limits: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """Ends of the axis in percent: every effect and threshold, and of intervals what is not far beyond them."""
    inner = [0.0, *(100 * c.effect for c in shown), *(100 * end for of in limits for end in of)]
    span = max(max(inner) - min(inner), 1.0)
    low = max(min(min(inner), *(100 * c.interval[0] for c in shown)), min(inner) - span)
    high = min(max(max(inner), *(100 * c.interval[1] for c in shown)), max(inner) + span)
    return low - 0.08 * (high - low), high + 0.08 * (high - low)


def _limits(result: CriterionResult, gate: Gate) -> tuple[float, ...]:
    """Where the gate's thresholds are on the axis of the effect."""
    found = [c for c in gate.criteria.values() if c.claim == result.claim and _about(c, result.metric)]
    if not found or result.threshold is None:
        return ()
    share, higher = result.threshold, found[0].better == "higher" or result.claim == "accuracy_not_worse"
    if result.claim == "equivalent":
        return (-share, share)
    worse = result.claim != "superior"
    return (share if higher != worse else -share,)


def _about(criterion: Criterion, metric: str) -> bool:
    return re.fullmatch(re.escape(criterion.metric).replace(r"\*", r"[^.]+"), metric) is not None
