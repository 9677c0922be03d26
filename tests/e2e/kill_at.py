"""SIGKILLs promotions of real servers, one after each act of theirs, lets the guard or the next command settle it, and
prints what came of each as a line of JSON.

usage: kill_at.py ROOT PORT [ACT ...]     ACT counts from 1; none: all of them

Each promotion goes to whichever of the two plans does not serve, so that one that was restored is tried again. MLflow
is imported once, and every promotion and what settles it is a fork.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from orchestrator import prod
from orchestrator.promoting import canary, promote, promotion
from orchestrator.promoting.promotions import Target
from orchestrator.recorded import mlflow_store
from tests.e2e.promotable import QUIET, Site
from tests.prod.killing import ACTS, RESTORING, forked, kill_after, title, was_killed

ALL = (*ACTS, *RESTORING)
MARGIN = 3.0  # what is killed is not measured: a canary that fails on a busy machine would be another test
GRACE_S = 4.0  # nobody asks for anything, and vLLM's worker would take 15 s to end by itself


def failing(of: canary.Canary) -> canary.Canary:
    """The same canary, with limits that no server keeps."""
    return replace(of, expected=tuple(replace(one, worst=one.worst / 1000) for one in of.expected))


def hurried(target: Target) -> Target:
    return replace(target, engine=replace(target.engine, stop_grace_s=GRACE_S))


def main(root: Path, port: int, chosen: list[int]) -> None:
    site = Site(root, port)
    mlflow_store.connect(site.tracking)  # imports MLflow
    canary.TRIES = 1
    targets = [hurried(target) for target in site.targets(MARGIN).values()]
    for number in chosen or range(1, len(ALL) + 1):
        act, restoring = ALL[number - 1], number > len(ACTS)
        before = site.slot()
        (to,) = [one for one in targets if one.plan.fingerprint != before.plan.fingerprint]
        entries, began_s = len(site.ledger()), time.monotonic()

        def killed(to=to, act=act, restoring=restoring) -> None:
            new = site.begun(replace(to, canary=failing(to.canary)) if restoring else to)
            kill_after(act)
            promote.conduct(new, site.state, site.cache, QUIET)

        def settled(number=number) -> None:
            if number % 2:  # what a person starts next, and in the other cases a pass of the guard
                with promote.held(site.state, "cpu", "the next command", QUIET):
                    return
            wrong = [outcome.line for outcome in prod.guard(site.state, QUIET) if not outcome.ok]
            if wrong:
                raise RuntimeError("; ".join(wrong))

        status = forked(killed)
        killed_s, moving = time.monotonic(), promotion.load(site.state, "cpu")
        code = forked(settled)
        now, ledger = site.slot(), site.ledger()
        on = {before.plan.fingerprint: "previous", to.plan.fingerprint: "candidate"}
        told = {
            "number": number,
            "act": title(act) + (" restoring" if restoring else ""),
            "killed": was_killed(status),
            "cut_off_while": moving.step if moving else "done",
            "settled": code,
            "wrong": site.at_rest(),
            "on": on.get(now.plan.fingerprint, "neither"),
            "entries": len(ledger) - entries,
            "ledger": [ledger[-1].target.plan.fingerprint == to.plan.fingerprint, ledger[-1].outcome],
            "seconds": [round(killed_s - began_s, 1), round(time.monotonic() - killed_s, 1)],
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
