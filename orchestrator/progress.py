"""What a person sees while a run works: which boot, which bench, how far, how long still. All of it on stderr.

On a terminal one line a stage is redrawn; elsewhere a stage is a line when it starts and a line when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REDRAWS_PER_S = 4


@dataclass
class Stage:
    """One piece of work that takes a while. `expected_s` is used until `advance` says more."""

    label: str
    expected_s: float | None
    clock: Callable[[], float]
    started_s: float
    done: int = 0
    total: int = 0
    note: str = ""

    def advance(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` steps are complete; `note` says what is being done now."""
        self.done, self.total, self.note = done, total, note

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds still to go, negative when overdue; None where nothing is known.

        At the pace of the steps so far, and before the first step is complete from what was expected.
        """
        if self.done and self.total:
            return self.elapsed_s * (self.total - self.done) / self.done
        return None if self.expected_s is None else self.expected_s - self.elapsed_s

    @property
    def fraction(self) -> float | None:
        if self.total:
            return min(self.done / self.total, 1.0)
        return min(self.elapsed_s / self.expected_s, 1.0) if self.expected_s else None


class Progress:
    """The stages in progress, outermost first. `quiet` shows nothing; errors are not progress and still appear."""

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet = quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._stages: list[Stage] = []
        self._live: Any = None

    @contextmanager
    def stage(self, label: str, expected_s: float | None = None) -> Iterator[Stage]:
        """Show `label` until the block ends, then how long it took, or that it failed."""
        stage = Stage(label, expected_s, self._clock, self._clock())
        self._stages.append(stage)
        try:
            self._begin(stage)
            try:
                yield stage
            except BaseException:
                self._end(stage, "stopped")
                raise
            self._end(stage, "done")
        finally:
            self._stages.remove(stage)
            if not self._stages and self._live is not None:
                self._live.stop()
                self._live = None

    def note(self, line: str) -> None:
        """One line that stays, above the stages."""
        self._print(line)

    def _begin(self, stage: Stage) -> None:
        if self.quiet:
            return
        if not self._stream.isatty():
            expected = "" if stage.expected_s is None else f" (about {span(stage.expected_s)})"
            self._print(f"{self._indent(stage)}{stage.label}: started{expected}")
        elif self._live is None:
            from rich.live import Live

            self._live = Live(
                console=self._console(),
                get_renderable=self._table,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
                redirect_stdout=False,  # stdout is for results
            )
            self._live.start()

    def _end(self, stage: Stage, outcome: str) -> None:
        steps = f", {stage.done} of {stage.total}" if stage.total and stage.done != stage.total else ""
        self._print(f"{self._indent(stage)}{stage.label}: {outcome} in {span(stage.elapsed_s)}{steps}")

    def _print(self, line: str) -> None:
        if self.quiet:
            return
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            print(line, file=self._stream, flush=True)
        except OSError:  # nobody reads it any more; the work goes on, and the interpreter's last flush must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _indent(self, stage: Stage) -> str:
        return "  " * self._stages.index(stage)

    def _console(self) -> Console:
        from rich.console import Console

        return Console(file=self._stream)

    def _table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=16)
        table.add_column(justify="right", no_wrap=True, min_width=26)
        for stage in list(self._stages):
            steps = f"  {stage.done}/{stage.total}" if stage.total else ""
            text = f"{self._indent(stage)}{stage.label}{steps}" + (f"  {stage.note}" if stage.note else "")
            fraction = stage.fraction
            bar = ProgressBar(
                total=1.0, completed=fraction or 0.0, pulse=fraction is None, animation_time=self._clock()
            )
            table.add_row(Text(text), bar, Text(_times(stage)))
        return table


def _times(stage: Stage) -> str:
    remaining = stage.remaining_s
    if remaining is None:
        return span(stage.elapsed_s)
    left = f"{span(remaining)} left" if remaining >= 0 else f"{span(-remaining)} over"
    return f"{span(stage.elapsed_s)}, {left}"


def span(seconds: float) -> str:
    """A duration for people: `0.4 s`, `42 s`, `3 min 05 s`, `1 h 02 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
