"""The scheduler of two machines in fast time, as a process of its own: python -m tests.schedule.scheduler ROOT PORT."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

from orchestrator.schedule import daemon
from orchestrator.schedule.decide import Node
from orchestrator.schedule.policy import Policy
from orchestrator.schedule.queue import Queue
from tests.schedule import night
from tests.schedule.fast_time import FastClock

BERLIN = "Europe/Berlin"
POLICY = Policy("01:00-06:30", BERLIN, ready_min=15)
PERIOD_S = 300.0
MACHINES = (Node("left", ("cpu",)), Node("right", ("cpu",)))
NAME = "scheduler"


def serve(root: Path, port: int) -> None:
    """From its machine's boot on; it is killed at the end."""
    clock = FastClock(port, NAME)
    fleet = night.FastFleet(clock, night.Over(), partial(night.conduct, root=root, port=port), MACHINES)
    queue = Queue(root / "state", FastClock(port).iso)  # units tell it from threads of their own
    scheduler = daemon.Scheduler(queue, fleet, clock, root / "state", lambda *_: POLICY)
    stop = threading.Event()
    daemon.loop(scheduler, lambda line: print(clock.iso(), line, flush=True), threading.Event(), stop, PERIOD_S)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, file=sys.stdout)
    try:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)  # its machine is not held up by threads that watch units
