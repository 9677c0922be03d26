"""SIGKILLs an A/B at random moments, ten times, resumes it after each, and prints what came of it as JSON.

usage: kill_often.py ROOT SEED. It imports MLflow once and forks, so that a kill costs no import.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from orchestrator.abtest import ab_run
from orchestrator.abtest.attempts import DESIGN
from orchestrator.recorded import catalog, mlflow_store
from tests.ab.simulated import GATE, World
from tests.boot.test_boot import free_port

KILLS = 10
EARLY = 2  # of them at any time from the start on, the others while boots are made
LOOKS = (3, 4)  # 12 boots or more, of which the kills let through 8 at most


def parent_run(world: World) -> catalog.Entry | None:
    """The A/B that has a design, if any has."""
    entries = catalog.entries(world.root / "tracking")
    return next((e for e in entries if e.is_ab and (e.artifacts / DESIGN).exists()), None)


def child(world: World, port: int) -> tuple[int, int]:
    """Start the A/B, or go on with it, in a process of its own; returns its pid, and a pipe that tells of every boot
    that it begins."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        return pid, read
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        world.boots_fd = write
        test = world.test(replace(GATE, looks=LOOKS), port=port)
        entry = parent_run(world)
        code = ab_run.resume(entry, test.paths, [], quiet=True) if entry else ab_run.start(test, [], quiet=True)
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(root: Path, seed: int) -> None:
    port, chance = free_port(), random.Random(seed)
    mlflow_store.connect(root / "template")  # imports MLflow, and makes an empty store
    worlds = [World(root / name, b_better=0.004) for name in ("whole", "killed")]
    for world in worlds:
        (world.root / "tracking").mkdir(parents=True)
        shutil.copyfile(root / "template" / "mlflow.db", world.root / "tracking" / "mlflow.db")
    whole, world = worlds
    pid, begins = child(whole.install(setattr), port)
    began_s, _ = time.monotonic(), os.read(begins, 1)
    ready_s = time.monotonic() - began_s
    expected = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    boot_s = (time.monotonic() - began_s - ready_s) / (4 * LOOKS[0])
    world.install(setattr)
    for kill in range(KILLS):
        pid, begins = child(world, port)
        if kill >= EARLY:
            os.read(begins, 1)
        longest_s = ready_s if kill < EARLY else boot_s
        select.select([begins], [], [], chance.uniform(0, longest_s))  # at the next boot's begin at the latest
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            raise SystemExit(f"the A/B was done after {kill} kills")
    pid, _ = child(world, port)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = {"whole": [parent_run(whole).run_id, expected], "killed": [parent_run(world).run_id, code], "kills": KILLS}
    print(json.dumps(said))


main(Path(sys.argv[1]), int(sys.argv[2]))
