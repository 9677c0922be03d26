"""A run as far as prod sees it: takes the lease, displaces prod, and then sleeps, ends or raises.

usage: a_run.py sleep|end|raise [Hydra overrides]
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path

from orchestrator import cli, config, lease, prod
from orchestrator.errors import OrchestratorError
from orchestrator.inputs import Inputs
from orchestrator.plugin_build import PluginBuild
from orchestrator.progress import Progress
from orchestrator.stack import Stack


def main(does: str, overrides: list[str]) -> int:
    experiment = config.load(["+variant=int5", "box=cpu", *overrides])
    state = config.state_dir(experiment.paths)
    build = PluginBuild("0", "a" * 64, "b" * 64, "/nowhere")
    inputs = Inputs(experiment, Path("/nowhere"), state, build, Stack({}, "stack"), "c" * 64)
    with lease.hold("cpu", "a run", state), prod.displaced(inputs, Progress()):
        with socket.socket() as probe:  # the port has to be free by now
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((experiment.box.host, experiment.box.port))
        print("displaced", flush=True)
        if does == "sleep":
            time.sleep(600)
        if does == "raise":
            raise RuntimeError("the bench is broken")
    return 0


signal.signal(signal.SIGTERM, cli._interrupt)
try:
    sys.exit(main(sys.argv[1], sys.argv[2:]))
except OrchestratorError as error:
    print(f"orchestrator: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
