"""Both clocks of the machine: windows are kept by the wall clock, durations by the one that nobody sets."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator import owner

JUMP_S = 60.0  # between the clocks, from which on it is said


class Clock:
    """The machine's own. `steady_s` counts from the machine's boot, sleep included."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def steady_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        return owner.current().boot_id

    def wait(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Return after so many seconds, or sooner where `wake` is set."""
        if wake is None:
            time.sleep(seconds)
        else:
            wake.wait(seconds)


@dataclass(frozen=True)
class Reading:
    """Both clocks at one moment of one boot of the machine."""

    wall_s: float  # since the epoch
    steady_s: float
    boot_id: str


def read(clock: Clock) -> Reading:
    return Reading(clock.now().timestamp(), clock.steady_s(), clock.boot_id())


def what_happened(before: Reading, now: Reading) -> str:
    """In words what the clocks say besides that time went by; empty where nothing.

    Across a reboot the steady clock begins anew, so that the wall clock alone can tell how long it took.
    """
    wall_s = now.wall_s - before.wall_s
    if before.boot_id != now.boot_id:
        return f"the machine rebooted; by its wall clock {wall_s / 60:.0f} minutes were lost"
    jump_s = wall_s - (now.steady_s - before.steady_s)
    if abs(jump_s) < JUMP_S:
        return ""
    return f"the wall clock was set {'forward' if jump_s > 0 else 'back'} by {abs(jump_s) / 60:.0f} minutes"
