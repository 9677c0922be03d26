"""The verbs that show what is recorded in MLflow: its UI, and the copies on a tracking server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError
from orchestrator.verbs.options import Options

if TYPE_CHECKING:
    from orchestrator.schema import Paths


def ui(options: Options) -> int:
    from orchestrator import ui

    return ui.serve(Path(_paths(options, "ui takes no run").tracking))


def sync(options: Options) -> int:
    from orchestrator.recorded.mirror import Mirror

    paths = _paths(options, "sync takes no run")
    if paths.tracking_server is None:
        raise UsageError("no tracking server is set; add paths.tracking_server=http://HOST:5000")
    mirror = Mirror(Path(paths.tracking), paths.tracking_server)
    done = mirror.push()
    removed = f", {len(done.removed)} removed" if done.removed else ""
    print(f"{len(done.sent)} runs uploaded{removed}; {mirror.server} has all of {Path(paths.tracking).resolve()}")
    return 0


def _paths(options: Options, usage: str) -> Paths:
    from orchestrator import config

    if any("=" not in word for word in options.overrides):
        raise UsageError(usage)
    return config.load_machine(options.overrides).paths
