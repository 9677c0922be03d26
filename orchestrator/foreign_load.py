"""How much of the box's processor time other programs used while a server was measured.

Of the time of all processors between two looks at /proc/stat, what was used (user, nice, system, and stolen from a
virtual machine) less what the processes of this run used: the orchestrator, the server, and their children, each with
what its ended children left it in /proc/PID/stat (proc(5): utime, stime, cutime, cstime). Interrupts are nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TELLING = 0.10  # from here on a person is told
PROC = Path("/proc")
USED = (0, 1, 2, 7)  # of the fields after "cpu": user, nice, system, steal
COUNTED = 8  # fields that add up to the time of all processors; guests are in user and nice already


@dataclass(frozen=True)
class Ticks:
    """Clock ticks since the box began: of all its processors, of those the used ones, and of those this run's own."""

    all: int
    used: int
    own: int


def read(roots: Sequence[int], proc: Path = PROC) -> Ticks | None:
    """What was used until now; own are the trees of processes below `roots`. None where the kernel does not tell."""
    try:
        words = (proc / "stat").read_text().split("\n", 1)[0].split()
        fields = [int(word) for word in words[1 : 1 + COUNTED]]
    except (OSError, ValueError):
        return None
    if len(fields) < COUNTED:
        return None
    parents, ticks = _processes(proc)
    own, below = set(roots) & ticks.keys(), set(roots)
    while below := {pid for pid, parent in parents.items() if parent in below and pid not in own}:
        own |= below
    return Ticks(sum(fields), sum(fields[n] for n in USED), sum(ticks[pid] for pid in own))


def share(before: Ticks | None, after: Ticks | None) -> float | None:
    """Of all processor time in between, what neither stood still nor was this run's; None where it is not known."""
    if before is None or after is None or after.all <= before.all:
        return None
    foreign = (after.used - before.used) - (after.own - before.own)
    return min(max(foreign / (after.all - before.all), 0.0), 1.0)  # the two are not read at one moment


@dataclass
class Watch:
    """What others used during each bench of a boot. `roots` are pids: the orchestrator's, the server's; without any,
    nothing can be told."""

    roots: Sequence[int]
    look: Callable[[Sequence[int]], Ticks | None] = read
    shares: dict[str, float] = field(default_factory=dict, init=False)
    _spans: list[tuple[Ticks, Ticks]] = field(default_factory=list, init=False)

    @contextmanager
    def during(self, bench: str) -> Iterator[None]:
        before = self.look(self.roots) if self.roots else None
        yield
        after = self.look(self.roots) if before else None
        if (found := share(before, after)) is not None:
            self.shares[bench] = found
            self._spans.append((before, after))

    @property
    def share(self) -> float | None:
        """Over all benches together, a long one for more than a short one; None where nothing is known."""
        if not self._spans:
            return None
        time = sum(after.all - before.all for before, after in self._spans)
        shares = self.shares.values()
        return sum(f * (after.all - before.all) for f, (before, after) in zip(shares, self._spans, strict=True)) / time

    def note(self, title: str) -> str | None:
        """The line for a person, where a bench had to share the processors."""
        most = max(self.shares, key=self.shares.__getitem__, default=None)
        if most is None or self.shares[most] < TELLING:
            return None
        return (
            f"other programs used {percent(self.share)} of the processors while {title} was measured, "
            f"{percent(self.shares[most])} during {most}: its times may be longer than they are alone"
        )


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _processes(proc: Path) -> tuple[dict[int, int], dict[int, int]]:
    """(parent, ticks used) of every process by its pid; what ended meanwhile is left out."""
    parents, ticks = {}, {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()  # a name may hold anything before
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
        except (OSError, ValueError, IndexError):
            continue
    return parents, ticks
