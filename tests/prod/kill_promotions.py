"""SIGKILLs promotions, one after each act of theirs, lets the guard make a pass, and prints what came of each as JSON.

usage: kill_promotions.py ROOT PORT. Servers are stubs. MLflow is imported once, and every promotion and every pass of
the guard is a fork.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from orchestrator import config, prod, prod_server
from orchestrator.checkpoint import Checkpoint
from orchestrator.plan import render
from orchestrator.plugin_build import PluginBuild
from orchestrator.progress import Progress
from orchestrator.promoting import promote, promotion, promotion_runs
from orchestrator.recorded import mlflow_store
from orchestrator.stack import Stack
from tests.prod import promoting
from tests.prod.conftest import STUB, Site
from tests.prod.killing import ACTS, RESTORING, forked, kill_after, title, was_killed


def site_at(root: Path, port: int) -> Site:
    experiment = config.load(["+variant=bf16", "box=cpu", f"box.port={port}"])
    build, stack = PluginBuild("0.1.0", "a" * 64, "b" * 64, str(root / "plugin")), Stack({}, "stack0000")
    plan = render(experiment, Checkpoint("/nowhere", {}, "none"), build, root / "site", stack, root / "cache")
    tail = plan.argv[plan.argv.index("--model") :]
    made = Site(root, plan, experiment)
    made.plan = replace(plan, argv=(sys.executable, str(STUB), *tail, "--broken", str(made.broken)))
    return made


def main(root: Path, port: int) -> None:
    mlflow_store.connect(root / "tracking")  # imports MLflow, and makes an empty store
    site, quiet = site_at(root, port), Progress(quiet=True)
    prod_server.POLL_S = 0.02
    promoting.shorten_prose(setattr)
    promoting.serve(site, "plan0")
    told = []
    for number, act in enumerate((*ACTS, *RESTORING), 1):
        restoring = number > len(ACTS)
        to = promoting.target(site, f"plan{number}", *(["--says", "nothing"] if restoring else []))
        before = site.slot()

        def killed(to=to, act=act) -> None:
            new = promoting.promotion_to(site, to)
            kill_after(act)
            promote.conduct(new, site.state, root, quiet)

        began_s = time.monotonic()
        status = forked(killed)
        after_s = time.monotonic()
        moving = promotion.load(site.state, "cpu")
        guarded = forked(lambda: prod.guard(site.state, quiet))
        now, entries = site.slot(), promoting.ledger(site)
        told.append(
            {
                "act": title(act) + (" restoring" if restoring else ""),
                "killed": was_killed(status),
                "cut_off_while": moving.step if moving else "done",
                "guard": guarded,
                "at_rest": promoting.at_rest(site),
                "on": {before.plan.variant: "previous", to.plan.variant: "candidate"}.get(now.plan.variant, "neither"),
                "ledger": [entries[-1].variant == to.plan.variant, entries[-1].outcome],
                "seconds": [round(after_s - began_s, 2), round(time.monotonic() - after_s, 2)],
            }
        )
    forked(lambda: promotion_runs.copy(root / "tracking", "cpu", promoting.ledger(site)))
    prod_server.end(site.slot())
    print(json.dumps(told))


main(Path(sys.argv[1]), int(sys.argv[2]))
