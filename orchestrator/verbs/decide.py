"""The verbs about decisions."""

from __future__ import annotations

from pathlib import Path

from orchestrator.verbs.options import Options


def cases(options: Options) -> int:
    from orchestrator import cases as recorded
    from orchestrator.errors import UsageError

    if len(options.overrides) != 1:
        raise UsageError("cases takes one file, as in `python -m orchestrator cases decisions.yaml`")
    return recorded.run(Path(options.overrides[0]))
