"""The verbs that move what prod is, and those that show and mend the ledger of such moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError
from orchestrator.verbs.machine import chosen_box
from orchestrator.verbs.options import Options

if TYPE_CHECKING:
    from orchestrator.schema import Machine


def promote(options: Options) -> int:
    from orchestrator import config
    from orchestrator.progress import Progress
    from orchestrator.promoting import candidate, promote
    from orchestrator.recorded import catalog

    ids, overrides = _words(options)
    if len(ids) != 1:
        raise UsageError("promote takes the run of one A/B, as in `promote RUN_ID`; `list` shows them")
    _require_reason(options)
    directory = Path(config.load_machine(overrides).paths.tracking)
    entry = catalog.find(directory, ids[0])
    candidate.design_of(entry)  # before the box is waited for: what is no A/B will be none later either
    if "box" in entry.tags and not any(word.startswith("box=") for word in overrides):
        overrides.append(f"box={entry.tags['box']}")
    machine = config.load_machine(overrides)
    state, progress = config.state_dir(machine.paths), Progress(quiet=options.quiet)
    with promote.held(state, machine.box.name, f"promotion of run {entry.run_id}", progress) as current:
        promote.ledger_of(state, machine.box.name, current)
        found = candidate.of_ab(directory, entry, machine, current)
        for line in found.notes:
            progress.note(line)
        _conduct("promote", found, current, machine, options)
    return 0


def rollback(options: Options) -> int:
    from orchestrator import config
    from orchestrator.progress import Progress
    from orchestrator.promoting import candidate, promote, promotions

    ids, overrides = _words(options)
    if ids:
        raise UsageError("rollback takes no run; `rollback --to N` goes back to entry N of `prod history`")
    _require_reason(options)
    machine = config.load_machine(overrides)
    box, state = machine.box.name, config.state_dir(machine.paths)
    with promote.held(state, box, "rollback", Progress(quiet=options.quiet)) as current:
        entries = promote.ledger_of(state, box, current)
        if options.to is not None and options.to != int(options.to):
            raise UsageError(f"--to {options.to:g}: entries have whole numbers; `prod history` shows them")
        if options.to is not None:
            chosen = promotions.numbered(entries, int(options.to), box)
        elif (chosen := promotions.predecessor(entries)) is None:
            raise UsageError(f"nothing served on box {box} before what serves now; `prod history` shows what did")
        found = candidate.served_before(chosen, entries, current, machine.box.canary_margin)
        _conduct("rollback", found, current, machine, options)
    return 0


def _conduct(kind, found, current, machine: Machine, options: Options) -> None:
    from orchestrator import config, prod_server, slot, units
    from orchestrator.progress import Progress
    from orchestrator.promoting import promote

    state, cache = config.state_dir(machine.paths), config.cache_dir(machine.paths)
    tracking = str(Path(machine.paths.tracking).resolve())
    reason = options.reason if options.force else ""
    new = promote.begun(kind, found, current, reason, tracking)
    entry = promote.conduct(new, state, cache, Progress(quiet=options.quiet), options.now)
    print(prod_server.line("serves", slot.load(state, entry.box)))
    for line in entry.checks:
        print(f"  {line}")
    print(promote.said(entry))
    if options.units is not None:
        print(units.written(Path(options.units), machine.paths))


def history(options: Options) -> int:
    from orchestrator import config, console
    from orchestrator.promoting import promoted, promotions

    only = chosen_box(options)
    state = config.state_dir(config.load_machine(options.overrides).paths)
    boxes = [box for box in promotions.boxes(state) if only in (None, box)]
    if not boxes:
        where = f" on box {only}" if only else ""
        print(f"no plan has served as prod{where} yet; `python -m orchestrator promote RUN_ID` promotes one")
    for box in boxes:
        entries = promotions.read(state, box)
        console.stdout().print(promoted.history(entries))
        print(f"{promotions.path_of(state, box)}: {len(entries)} entries, every hash follows from the one before")
    return 0


def sync(options: Options) -> int:
    from orchestrator import config
    from orchestrator.promoting import promotion_runs, promotions

    only, paths = chosen_box(options), config.load_machine(options.overrides).paths
    state, lost = config.state_dir(paths), []
    for box in [box for box in promotions.boxes(state) if only in (None, box)]:
        copied = promotion_runs.copy(Path(paths.tracking), box, promotions.read(state, box))
        print(f"box {box}: {copied.added} runs added to MLflow, {copied.present} were there")
        lost += copied.unknown
    for run_id in lost:
        print(f"MLflow's run {run_id} is an entry that the ledger has lost; its entry.json has it")
    return 1 if lost else 0


def _words(options: Options) -> tuple[list[str], list[str]]:
    ids = [word for word in options.overrides if "=" not in word]
    return ids, [word for word in options.overrides if "=" in word]


def _require_reason(options: Options) -> None:
    if options.force != bool(options.reason and options.reason.strip()):
        raise UsageError('--force and --reason "WHY" go together: what is forced is recorded with its reason')
