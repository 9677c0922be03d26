"""How an A/B stands that has no verdict yet: how far it is, how long still, and what goes on with it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from orchestrator.abtest import attempts, hours
from orchestrator.abtest.attempts import Attempt
from orchestrator.abtest.design import Design
from orchestrator.judging import verdict_text


def left(design: Design, found: Sequence[Attempt]) -> str:
    """Boots that are made, and the time of those that may follow."""
    pending, per_boot = attempts.pending(design, found), attempts.revised(design, found)
    done, most = len(design.order) - len(pending), len(design.order)
    return f"{done} of at most {most} boots; at most {hours.text(per_boot.of(pending))} left, {per_boot.basis}"


def as_markdown(design: Design, found: Sequence[Attempt], run_id: str, ended: str = "") -> str:
    """For the description of its run. `ended` says why it is not at work; empty where it is."""
    what = f"**ENDED before its verdict** ({verdict_text.escaped(ended)})" if ended else "**RUNNING**"
    lines = [f"{what}: {verdict_text.escaped(left(design, found))}."]
    finished = [attempt for attempt in found if attempt.state == "finished"]
    if finished:
        lines += ["", verdict_text.as_markdown(attempts.so_far(design, found), design, pictures=bool(ended))]
    when = "Go on with it" if ended else "Should it be cut off, go on with it"
    lines += ["", f"{when}: `{resume_command(run_id)}`"]
    return "\n".join(lines)


def resume_command(run_id: str) -> str:
    return shlex.join([sys.executable, "-m", "orchestrator", "ab", "--resume", run_id])


def resume_hint(run_id: str) -> str:
    return f"go on with it: {resume_command(run_id)}"
