"""How much one client may ask for: a token bucket for each name, and the longest body."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LONGEST_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0


@dataclass
class Rate:
    """At most `burst` requests at once and `per_s` a second in the long run, for each name."""

    per_s: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _left: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    def wait_s(self, name: str) -> float:
        """0 where the request is allowed, which counts it; else the seconds until one is."""
        now = self.clock()
        left, at = self._left.get(name, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        allowed = left >= 1
        self._left[name] = (left - allowed, now)
        return 0.0 if allowed else (1 - left) / self.per_s
