"""The verbs about what runs overnight: the queue, the loop, its morning's summary, the boxes of a fleet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError
from orchestrator.verbs.options import Options

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from orchestrator.schedule.queue import Queue
    from orchestrator.schema import Paths
    from orchestrator.service.remote import Server


def _paths(words: tuple[str, ...] | list[str]) -> Paths:
    from orchestrator import config

    return config.load_machine([word for word in words if word.startswith("paths.")]).paths


def _state(words: tuple[str, ...] | list[str]) -> Path:
    from orchestrator import config

    return config.state_dir(_paths(words))


def _queue(words: tuple[str, ...] | list[str]) -> Queue:
    from orchestrator.schedule.queue import Queue

    return Queue(_state(words))


def _require(options: Options, words: Sequence[str], *taken: str) -> None:
    """Raises UsageError for a word that the verb does not use: who wrote it expects something of it."""
    for word in words:
        if not word.startswith((*taken, "paths.")):
            raise UsageError(f"{word}: {options.verb} takes {', '.join((*taken, 'paths.*'))}; leave it out")


def _server(words: tuple[str, ...]) -> tuple[Server | None, list[str]]:
    """The API that `server=` names, and the other words."""
    urls = [word.removeprefix("server=") for word in words if word.startswith("server=")]
    rest = [word for word in words if not word.startswith("server=")]
    if not urls:
        return None, rest
    from orchestrator.service import remote

    return remote.Server(urls[-1], remote.token()), rest


def _say_who_runs_it(words: tuple[str, ...] | list[str]) -> None:
    """A queue alone starts nothing."""
    from orchestrator.schedule import daemon

    if not daemon.runs(_state(words)):
        print(
            "nothing on this machine works on the queue; `python -m orchestrator serve` does, or `schedule run` "
            "without HTTP",
            file=sys.stderr,
        )


def add(options: Options) -> int:
    from orchestrator.progress import span
    from orchestrator.schedule import asked, policy

    server, words = _server(options.overrides)
    if server is not None:
        made = server.add(words)
        print(f"job {made.id}: {made.state}, at most {made.boots_left} boots, about {span(made.expected_s or 0)}")
        return 0
    job, basis = asked.with_duration(asked.job(options.overrides))
    asked.require_comparable(job)
    made, new = _queue(options.overrides).add(job)
    if not new:
        print(f"job {made.id} is there already, {made.state}: its key is {made.idempotency_key!r}")
        return 0
    rules = policy.of(made.schedule, made.window, made.zone)
    unnamed = "" if rules.zone else ", the zone of this machine (zone=NAME is another)"
    print(
        f"job {made.id}: at most {made.boots_left} boots, about {span(made.expected_s or 0)} ({basis}), "
        f"in {rules.hours()}{unnamed}"
    )
    _say_who_runs_it(options.overrides)
    return 0


def list_jobs(options: Options) -> int:
    import json

    from orchestrator import console
    from orchestrator.records import to_jsonable
    from orchestrator.schedule import listing

    server, words = _server(options.overrides)
    _require(options, words)
    if server is not None:
        jobs = server.jobs(options.all)
    else:
        queue = _queue(words)
        jobs = queue.list(newest_first=True) if options.all else queue.open_jobs()
    if options.json:
        print(json.dumps([to_jsonable(job) for job in jobs], indent=2))
    elif jobs:
        console.stdout().print(listing.table(jobs))
        if server is None and any(job.is_open for job in jobs):
            _say_who_runs_it(words)
    else:
        print("nothing is queued; `python -m orchestrator schedule add +experiment=NAME` queues an A/B")
    return 0


def remove(options: Options) -> int:
    server, words = _server(options.overrides)
    ids = [word for word in words if "=" not in word]
    if not ids or not all(word.isdecimal() for word in ids):
        raise UsageError("schedule remove takes ids of jobs, as in `schedule remove 17`; `schedule list` shows them")
    _require(options, [word for word in words if "=" in word])
    cancel = server.cancel if server is not None else _queue([word for word in words if "=" in word]).cancel
    for word in ids:
        job = cancel(int(word))
        print(f"job {job.id} " + ("stops at its next boot boundary" if job.state == "running" else f"is {job.state}"))
    return 0


def summary(options: Options) -> int:
    import json

    from orchestrator import console
    from orchestrator.records import to_jsonable
    from orchestrator.schedule import summary

    if any(word.startswith("server=") for word in options.overrides):
        raise UsageError(
            "server=: summaries are files of the machine that runs `serve`; ask there, or read its STATE/summaries"
        )
    _require(options, options.overrides)
    found = summary.last(_state(options.overrides))
    if options.json:
        print(json.dumps(to_jsonable(found), indent=2))
        return 0
    print(f"{found.window}, {found.opens_utc} to {found.closes_utc}: {found.headline}")
    for table in summary.tables(found):
        console.stdout().print(table)
    for line in (*found.prod, *found.clock):
        print(line)
    return 0 if found.prod_ok else 1


def run(options: Options, wake: threading.Event | None = None) -> int:
    """The loop, until a signal ends it; `serve` is this with the API beside it. `wake` starts a pass at once."""
    import threading

    from orchestrator import fleet, units
    from orchestrator.schedule import daemon
    from orchestrator.schedule.clock import Clock
    from orchestrator.schedule.queue import Queue

    _require(options, options.overrides, "fleet=")
    chosen = [word.removeprefix("fleet=") for word in options.overrides if word.startswith("fleet=")]
    state = _state(options.overrides)
    if options.units is not None:
        paths = _paths(options.overrides)
        print(units.written_scheduler(Path(options.units), paths, chosen[-1] if chosen else "local"))
        return 0
    clock, wake = Clock(), wake or threading.Event()
    found = fleet.of(chosen[-1] if chosen else "local", clock, wake)
    scheduler = daemon.Scheduler(Queue(state), found, clock, state)
    say = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True))
    say(f"the queue is {scheduler.queue.path}; boxes: {', '.join(node.name for node in found.nodes()) or 'none yet'}")
    daemon.loop(scheduler, say, wake, threading.Event())
    return 0


def unit(options: Options) -> int:
    """What the scheduler starts for each A/B; of no use by hand."""
    from orchestrator.schedule import unit
    from orchestrator.schedule.clock import Clock

    if len(options.overrides) != 1:
        raise UsageError("schedule unit is what the scheduler starts; `schedule add` queues an A/B, `ab` runs one now")
    path = Path(options.overrides[0])
    order = unit.read_order(path)
    unit.end_with_parent()
    return unit.Own(order, Clock(), path.parent).work()


def boxes(options: Options) -> int:
    """How this machine joins a Ray cluster as a box, and which boxes have."""
    import json
    import shlex
    import socket

    from orchestrator import config, fleet
    from orchestrator.inputs import gather

    words = list(options.overrides)
    experiment = config.load(["+variant=bf16", *words])
    stack = gather(experiment).stack.fingerprint
    offered = json.dumps(fleet.offer(experiment.box.name, socket.gethostname(), stack))
    start = f"ray start --address=HEAD:6379 --num-cpus=1 --resources={shlex.quote(offered)}"
    print(f"this machine as box {experiment.box.name}, stack {stack}, joins with\n  {start}")
    try:
        nodes = fleet.RayFleet().nodes()
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    for node in nodes:
        print(f"{node.name}: {', '.join(node.kinds)}, stack {node.stack or '(unknown)'}")
    return 0
