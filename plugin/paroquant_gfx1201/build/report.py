"""Progress as JSON lines."""

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Writes one JSON object per line through ``write``."""

    write: Callable[[str], None] = lambda line: print(line, flush=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` units of the step named ``what``."""
        event = {"event": "progress", "done": done, "total": total, "what": what}
        self.write(json.dumps(event))

    def done(self, out: str, **numbers: float) -> None:
        """The build finished; ``out`` is the new directory."""
        self.write(json.dumps({"event": "done", "out": out, **numbers}))
