"""A night's machines: simulated servers, under the real scheduler, state machine, records, lease and prod.

Every number that is measured here is drawn, and its runs are tagged as simulated. Prod is a real process that answers
HTTP, and is taken down and brought back as on a real box.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import cli, prod
from orchestrator.abtest import ab_run
from orchestrator.abtest.design import Hours
from orchestrator.fleet import LocalFleet, RayFleet
from orchestrator.inputs import Inputs
from orchestrator.schedule import unit, watch
from orchestrator.schedule.clock import Clock
from orchestrator.schedule.decide import Node
from orchestrator.schedule.unit import Order, Outcome
from tests.ab.simulated import GATE, Simulated, World
from tests.schedule.fast_time import FastClock

BOOT_S = 15 * 60.0
POLL_S = 300.0
KINDS = {  # name -> how much better arm B is, and the looks
    "better": (0.05, (1, 2)),
    "worse": (-0.05, (1, 2)),
    "hangs": (0.05, (1, 2)),
    "long": (0.05, (7,)),
    "shorter": (0.05, (4,)),
}


@dataclass
class Sleeping(Simulated):
    """Boots that take their time, prod down meanwhile. One that "hangs" does so once, at its second boot."""

    clock: FastClock = None
    hangs: Path | None = None  # this file is there when it has hung
    inputs: dict = None
    progress: object = None
    prod_down: ExitStack = None
    _is_down: bool = False

    def make_ready(self, log) -> None:
        if not self._is_down:
            self.prod_down.enter_context(prod.displaced(self.inputs["a"], self.progress))
            self._is_down = True

    def boot(self, slot, log) -> None:
        if self.hangs is not None and not self.hangs.exists() and (slot.block, slot.position) == (0, 1):
            self.hangs.touch()
            self.clock.wait(None)
        self.clock.wait(BOOT_S)
        super().boot(slot, log)


class Alike(World):
    """A machine that has its model, its plugin and its caches at the same paths as the others of its kind."""

    def gather(self, experiment) -> Inputs:
        own, shared = super().gather(experiment), self.root.parent
        return replace(own, cache=shared / "cache", plugin=replace(own.plugin, source=str(shared / "plugin")))


def overrides(name: str) -> tuple[str, ...]:
    return (f"simulated={name}", "box=cpu")


def site(order: Order, root: Path) -> Order:
    """The order as it is on the box whose files are below `root`."""
    places = (f"paths.{name}={root / name}" for name in ("cache", "state", "tracking"))
    return replace(order, overrides=(*order.overrides, *places))


def work(order: Order, directory: Path, root: Path, clock: FastClock, server: str = "") -> int:
    """What `schedule unit` does, in a world of simulated servers; `server` is a tracking server."""
    signal.signal(signal.SIGTERM, cli._interrupt)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    name = order.overrides[0].partition("=")[2]
    better, looks = KINDS[name]
    box_port = int((root.parent / "port" if server else root / "port").read_text())
    world = Alike(root, b_better=better) if server else World(root, b_better=better)

    def executor(inputs, plans, progress, _detected, prod_down, _titles) -> Sleeping:
        hangs = root.parent / f"{name} hung" if name == "hangs" else None
        return Sleeping(world, plans, {}, clock, hangs, inputs, progress, prod_down)

    world.executor = executor
    world.install(setattr)
    ab_run.hours.expected = lambda *_: Hours({"a": BOOT_S / 3600, "b": BOOT_S / 3600}, "simulated")

    def load_ab(_overrides):
        test = world.test(replace(GATE, looks=looks), port=box_port, seed=order_seed(order))
        return replace(test, paths=replace(test.paths, tracking_server=server)) if server else test

    unit.config = type("Configuration", (), {"load_ab": staticmethod(load_ab)})
    return unit.Own(order, clock, directory).work()


def order_seed(order: Order) -> int:
    return int(order.job.rpartition("/")[2])


def child_of(order: Order) -> str:
    return f"unit {order.job} until {order.stop_by_utc}"


HERE = threading.local()  # `clock`: that of whoever watches a unit in this thread


class Over(threading.Event):
    """What a fleet sets when the outcome of a unit is there: only then does its watch leave."""

    def set(self) -> None:
        super().set()
        HERE.clock.leave()


@dataclass
class Unit:
    """A unit's process, as `watch` sees one: where it takes part in time no more, no time passes until it is gone."""

    process: subprocess.Popen
    name: str
    clock: FastClock

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll() if self.clock.knows(self.name) else self.process.wait(60)


def conduct(
    order: Order, _clock: Clock, node: Node, root: Path, port: int, server: str = "", **watching: Any
) -> Outcome:
    """`watch.conduct` in fast time, on one of several machines that are one as far as their files are concerned."""
    mine = HERE.clock = FastClock(port, f"watch {order.job}")
    place = root / node.name

    def start(order: Order, directory: Path) -> Unit:
        mine.expect(child_of(order))
        command = [sys.executable, "-m", "tests.schedule.night", directory / "order.json", place, str(port), server]
        with (directory / watch.LOG).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return Unit(process, child_of(order), mine)

    def end(unit: Unit, number: int) -> None:
        mine.rouse(unit.name)
        unit.process.send_signal(number)

    return watch.conduct(site(order, place), mine, start=start, end=end, poll_s=POLL_S, **watching)


def conduct_on_ray(*args: Any, **more: Any) -> Outcome:
    try:
        return conduct(*args, **more)
    finally:
        HERE.clock.leave()


class FastRayFleet(RayFleet):
    """`clock` is told of every unit before it is there."""

    clock: FastClock

    def start(self, job_id, order, node, tell) -> None:
        self.clock.expect(f"watch {order.job}")
        super().start(job_id, order, node, tell)


class FastFleet(LocalFleet):
    """Two machines in one, as far as their files are concerned."""

    def start(self, job_id, order, node, tell) -> None:
        self.clock.expect(f"watch {order.job}")
        super().start(job_id, order, node, tell)


def main(path: Path, root: Path, port: int, server: str) -> int:
    """The process of a unit whose order is in a file."""
    unit.end_with_parent()
    order = unit.read_order(path)
    clock = FastClock(port, child_of(order))
    clock.now()
    try:
        return work(order, path.parent, root, clock, server)
    except KeyboardInterrupt:
        return cli.INTERRUPTED


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(status)  # at once: while an interpreter ends it takes part in time no more
