"""The verbs about the machine: its prod slot, what killed runs left, what it lacks, what is cached."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.verbs.options import Options

OF_MACHINE = ("box=", "box.", "engine=", "engine.", "paths.")  # words that say where, for verbs that serve no variant


def prod(options: Options) -> int:
    from orchestrator import config, prod

    box = chosen_box(options)
    print(prod.show(config.state_dir(config.load_machine(options.overrides).paths), box))
    return 0


def chosen_box(options: Options) -> str | None:
    """The box that `box=` names, None for all. Raises UsageError for a word that is not of the machine."""
    other = [word for word in options.overrides if not word.startswith(OF_MACHINE)]
    if other:
        raise UsageError(f"{other[0]}: {options.verb} takes box=NAME and paths.*; leave it out")
    named = [word.removeprefix("box=") for word in options.overrides if word.startswith("box=")]
    return named[-1] if named and named[-1] != "auto" else None


def prod_start(options: Options) -> int:
    from orchestrator import config, prod
    from orchestrator.progress import Progress
    from orchestrator.run import prepare_only

    experiment = config.load(options.overrides)
    prepare_only(experiment, options.overrides, quiet=options.quiet)
    print(prod.start(experiment, Progress(quiet=options.quiet)))
    return 0


def prod_stop(options: Options) -> int:
    from orchestrator import config, prod
    from orchestrator.progress import Progress

    machine = config.load_machine(options.overrides)
    state, tracking = config.state_dir(machine.paths), Path(machine.paths.tracking).resolve()
    print(prod.stop(state, machine.box.name, Progress(quiet=options.quiet), options.now, tracking))
    return 0


def guard(options: Options) -> int:
    from orchestrator import config, prod, units
    from orchestrator.progress import Progress

    paths = config.load_machine(options.overrides).paths
    state = config.state_dir(paths)
    places = prod.Places(config.cache_dir(paths), Path(paths.tracking).resolve())
    if options.units is not None:
        print(units.written(Path(options.units), paths))
        return 0
    while True:
        outcomes = prod.guard(state, Progress(quiet=options.quiet), places)
        for outcome in outcomes:
            print(outcome.line, file=sys.stdout if outcome.ok else sys.stderr, flush=True)
        if options.watch is None:
            return 0 if all(outcome.ok for outcome in outcomes) else 1
        time.sleep(options.watch)


def knobs(options: Options) -> int:
    from orchestrator.errors import UsageError
    from orchestrator.knobs import REGISTRY, matching

    found = matching(options.overrides)
    if not found:
        raise UsageError(
            f"no knob has {' and '.join(options.overrides)} in its name or text; `knobs` lists all of them"
        )
    names, allowed = (max(map(len, of)) for of in (REGISTRY, [knob.wanted() for knob in REGISTRY.values()]))
    print("set one with +variant.knobs.NAME=VALUE, in an A/B with +a.knobs.NAME=VALUE or +b.knobs.NAME=VALUE\n")
    print(f"{'name':<{names}}  default  {'allowed':<{allowed}}  what it does")
    for knob in found:
        print(f"{knob.name:<{names}}  {knob.default:<7}  {knob.wanted():<{allowed}}  {knob.doc}")
    return 0


def doctor(options: Options) -> int:
    from orchestrator import config, doctor

    machine = config.load_machine(options.overrides)
    checks = doctor.examine(machine, config.state_dir(machine.paths), config.cache_dir(machine.paths))
    doctor.show(checks)
    return 0 if all(check.ok for check in checks) else 1


def cache_list(options: Options) -> int:
    from orchestrator import cache, config

    paths = config.load_machine(options.overrides).paths
    cache.show(cache.entries(config.cache_dir(paths), config.state_dir(paths)))
    return 0


def cache_prune(options: Options) -> int:
    from orchestrator import cache, config, shipped

    paths = config.load_machine(options.overrides).paths
    where = config.cache_dir(paths), config.state_dir(paths)
    keep = None if options.keep is None else int(options.keep)
    gone = cache.prune(*where, shipped.names("box"), options.older_than, keep, options.dry_run)
    cache.show(gone)
    print("nothing was removed (--dry-run)" if options.dry_run else f"removed {len(gone)} of them")
    return 0
