"""What a bench has of a measurement that is not complete: JSON lines beside the run, one a finished item.

They belong to one plan and one set of parameters. A complete measurement discards them, so that the next one of the
same plan measures anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import digest
from orchestrator.bench.context import BenchContext


@dataclass(frozen=True)
class Unfinished:
    """`path` is None where the context keeps nothing."""

    path: Path | None

    @staticmethod
    def of(bench: str, context: BenchContext, config: Mapping[str, Any]) -> Unfinished:
        """The file of this bench with this configuration."""
        if context.unfinished is None:
            return Unfinished(None)
        return Unfinished(context.unfinished / f"{bench}-{digest.of_value(dict(config))[:16]}.jsonl")

    def read(self) -> list[dict[str, Any]]:
        """The finished items. A last line that was cut off while it was written is none."""
        if self.path is None or not self.path.exists():
            return []
        *lines, _cut_off = self.path.read_text("utf-8").split("\n")
        return [json.loads(line) for line in lines]

    def add(self, item: Mapping[str, Any]) -> None:
        """Append one item; it survives this process."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend(self.path)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(item) + "\n")

    def discard(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _mend(path: Path) -> None:
    """Take away a last line that was cut off; the next one would be glued to it."""
    with path.open("ab+") as stream:
        size = stream.tell()
        if not size:
            return
        stream.seek(size - 1)
        if stream.read(1) != b"\n":
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
