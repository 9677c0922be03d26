"""SIGKILLs an A/B at random moments, ten times, resumes it after each, and prints what came of it as JSON.

usage: kill_often.py ROOT SEED. It imports MLflow once and forks, so that a kill costs no import.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from orchestrator import ab_run, catalog, mlflow_store
from orchestrator.attempts import DESIGN
from tests.ab.simulated import World
from tests.boot.test_boot import free_port

KILLS = 10


def parent_run(world: World) -> catalog.Entry | None:
    """The A/B that has a design, if any has."""
    entries = catalog.entries(world.root / "tracking")
    return next((e for e in entries if e.is_ab and (e.artifacts / DESIGN).exists()), None)


def child(world: World, port: int) -> int:
    """Start the A/B, or go on with it, in a process of its own; returns its pid."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        test = world.test(port=port)
        entry = parent_run(world)
        code = ab_run.resume(entry, test.paths, [], quiet=True) if entry else ab_run.start(test, [], quiet=True)
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(root: Path, seed: int) -> None:
    port, chance, kills, took_s = free_port(), random.Random(seed), 0, []
    mlflow_store.connect(root / "template")  # imports MLflow, and makes an empty store
    whole = World(root / "whole", b_better=0.004).install(setattr)
    began = time.monotonic()
    _, status = os.waitpid(child(whole, port), 0)
    took_s = time.monotonic() - began
    expected = os.waitstatus_to_exitcode(status)
    world = World(root / "killed", b_better=0.004).install(setattr)
    while True:
        pid = child(world, port)
        if kills < KILLS:
            time.sleep(chance.uniform(0.02, 0.3) * took_s)
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills += 1
                continue
            raise SystemExit(f"the A/B was done after {kills} kills")
        _, status = os.waitpid(pid, 0)
        break
    a, b = parent_run(whole), parent_run(world)
    print(
        json.dumps(
            {"whole": [a.run_id, expected], "killed": [b.run_id, os.waitstatus_to_exitcode(status)], "kills": kills}
        )
    )


main(Path(sys.argv[1]), int(sys.argv[2]))
