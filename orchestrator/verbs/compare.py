"""The verbs about A/Bs and what is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.verbs.options import Options

if TYPE_CHECKING:
    from orchestrator.recorded.catalog import Entry
    from orchestrator.schema import ABTest, Paths


class NoVerdict(OrchestratorError):
    """What stopped an A/B is no verdict, and must not leave with the exit status of FAIL."""

    exit_code = 3


def ab(options: Options) -> int:
    from orchestrator.prod_server import NotBack

    try:
        return _resume(options) if options.resume else _ab(options)
    except NotBack:  # the verdict was shown; that prod does not serve is what one has to know
        raise
    except OrchestratorError as error:
        if error.exit_code != 1:
            raise
        raise NoVerdict(str(error), error.detail) from error


def _ab(options: Options) -> int:
    from orchestrator import config
    from orchestrator.abtest import ab_run, sweep

    test = config.load_ab(options.overrides)
    if options.power:
        return _power(test)
    return (sweep if test.sweep else ab_run).start(test, options.overrides, quiet=options.quiet)


def _resume(options: Options) -> int:
    from orchestrator.abtest import ab_run, sweep
    from orchestrator.recorded import catalog

    places = [word for word in options.overrides if word.startswith(("paths.", "box="))]
    paths = _paths(places)
    entry = catalog.find(Path(paths.tracking), options.resume)
    begun = f" {entry.tags.get('overrides', '')} "
    for word in options.overrides:
        if word not in places and f" {word} " not in begun:
            raise UsageError(
                f"--resume: run {entry.run_id} was not begun with {word}; leave it out, or start another A/B with it"
            )
    if entry.parent:  # an A/B of a sweep: the rest of the sweep is to follow
        entry = catalog.find(Path(paths.tracking), entry.parent)
    kind = sweep if entry.tags.get("kind") == "sweep" else ab_run
    return kind.resume(entry, paths, places, quiet=options.quiet)


def _power(test: ABTest) -> int:
    from orchestrator import console
    from orchestrator.abtest import ab_run, power_text, sweep

    if test.sweep:
        print(f"a sweep: for each of its {len(test.sweep.values) - 1} A/Bs, which share alpha")
        test = sweep.pair(test, *test.sweep.values[:2])
    ab_run.require_sound(test)
    design = ab_run.plan(test, ab_run.gathered(test))
    if table := power_text.table(design):
        console.stdout().print(table)
    for line in power_text.notes(design):
        print(line)
    return 0


def verdict(options: Options) -> int:
    from orchestrator.abtest import attempts
    from orchestrator.abtest.ab import EXIT
    from orchestrator.judging import verdict_text
    from orchestrator.recorded import catalog

    (run_id,), paths = _ids(options, "verdict takes one run, as in `verdict RUN_ID`", 1, 1)
    directory = Path(paths.tracking)
    entry = catalog.find(directory, run_id)
    if entry.tags.get("kind") == "sweep":
        raise UsageError(
            f"run {run_id} is a sweep; ask for one of its A/Bs: {', '.join(_children(directory, entry.run_id))}"
        )
    found = attempts.recomputed(directory, entry)
    if options.json:
        from orchestrator.records import to_jsonable

        print(json.dumps(to_jsonable(found), indent=2))
    else:
        verdict_text.show(found, attempts.read_design(entry), entry.run_id)
    if entry.status != "FINISHED":
        print(f"the A/B has not ended ({entry.status}): that is what its boots say so far", file=sys.stderr)
    return EXIT[found.state]


def _children(directory: Path, run_id: str) -> list[str]:
    from orchestrator.recorded import catalog

    return [entry.run_id for entry in catalog.entries(directory, parent=run_id)]


def compare(options: Options) -> int:
    from orchestrator import config, console
    from orchestrator.judging import floors
    from orchestrator.pages import paired_report
    from orchestrator.recorded import catalog, side_by_side, sides

    usage = "compare takes two runs or more, as in `compare RUN_ID RUN_ID`, or one A/B"
    ids, paths = _ids(options, usage, 1, None)
    directory = Path(paths.tracking)
    known = catalog.entries(directory)
    entries = [catalog.find(directory, run_id, known) for run_id in ids]
    if twice := [entry.run_id for n, entry in enumerate(entries) if entry in entries[:n]]:
        raise UsageError(f"run {twice[0]} is there twice, and a run differs in nothing from itself; name another run")
    if len(entries) == 1:
        return _compare_ab(directory, entries[0], usage)
    columns = side_by_side.read(entries)
    why = side_by_side.why_not(columns) if options.unpaired else []
    if not options.unpaired:
        side_by_side.require_paired(columns)
    first = entries[0].tags
    noise = floors.load(config.state_dir(paths), first.get("box", "unknown"), first.get("stack", "unknown"))
    shown = sides.of_runs(entries, [column.measurements for column in columns])
    found = sides.differences(shown, noise, paired_up=not why)
    console.stdout().print(side_by_side.table(shown, found))
    unpaired = [f"not paired: {reason}" for reason in why]
    notes = [*unpaired, *side_by_side.notes(columns), *side_by_side.no_interval(found)]
    for note in notes:
        print(f"- {note}")
    html = paired_report.render(shown, floors=noise, notes=notes, paired_up=not why)
    print(f"report: {_write_report(directory, [entry.run_id for entry in entries], html)}")
    return 0


def _compare_ab(directory: Path, entry: Entry, usage: str) -> int:
    """The arms of an A/B side by side: its report once more, from its records alone."""
    from orchestrator.abtest import attempts
    from orchestrator.judging import verdict_text
    from orchestrator.pages import paired_report

    if not entry.is_ab or entry.tags.get("kind") == "sweep":
        raise UsageError(f"{usage}; run {entry.run_id} is neither")
    verdict = attempts.recomputed(directory, entry)
    verdict_text.show(verdict, attempts.read_design(entry), entry.run_id)
    html = paired_report.of_ab(directory, entry, verdict)
    print(f"report: {_write_report(directory, [entry.run_id], html)}")
    return 0


def _write_report(directory: Path, run_ids: list[str], html: str) -> Path:
    from orchestrator.recorded import mlflow_store
    from orchestrator.records import write_bytes

    path = (directory / "reports" / f"compare-{'-'.join(run_id[:8] for run_id in run_ids[:4])}.html").resolve()
    with mlflow_store.explained(path):
        write_bytes(path, html.encode())
    return path


def list_runs(options: Options) -> int:
    from orchestrator import console
    from orchestrator.recorded import catalog, listing

    _, paths = _ids(options, "list takes no run; `list --all` shows the boots of A/Bs and published results too", 0, 0)
    entries = catalog.entries(Path(paths.tracking))
    if options.json:
        keys = ("run_id", "name", "experiment", "status", "started_s", "ended_s", "tags", "metrics")
        print(json.dumps([{key: getattr(entry, key) for key in keys} for entry in entries], indent=2))
    elif entries:
        console.stdout().print(listing.runs(entries, options.all))
        if (published := sum(entry.is_published for entry in entries)) and not options.all:
            print(f"and {published} published results: `list --all` shows them, and the boots of A/Bs")
    else:
        print(f"nothing is recorded in {Path(paths.tracking).resolve()}")
    return 0


def floor(options: Options) -> int:
    from datetime import UTC, datetime

    from orchestrator import config, console
    from orchestrator.judging import floors
    from orchestrator.recorded import listing

    _, paths = _ids(options, "floor takes no run", 0, 0)
    state = config.state_dir(paths)
    if found := floors.every(state):
        console.stdout().print(listing.floors(found, datetime.now(UTC)))
    else:
        print(f"no floor is measured yet ({state / 'floors'}); `ab +variant@a=X +variant@b=X kind=floor` measures them")
    return 0


def ledger_list(options: Options) -> int:
    from orchestrator import shipped
    from orchestrator.recorded import ledger

    sources = ledger.read(shipped.experiments_dir() / "ledger")
    for source in sources:
        for result in source.results:
            print(f"{result.date}  {source.box:<8} {result.id:<32} {result.what}")
    return 0


def ledger_import(options: Options) -> int:
    from orchestrator import shipped
    from orchestrator.recorded import ledger
    from orchestrator.recorded.tracking import Tracker

    _, paths = _ids(options, "ledger import takes no run", 0, 0)
    sources = ledger.read(shipped.experiments_dir() / "ledger")
    done = ledger.import_all(sources, Tracker(Path(paths.tracking), ledger.EXPERIMENT, paths.tracking_server))
    counts = f"{len(done.added)} added, {len(done.replaced)} replaced, {len(done.unchanged)} there already"
    print(f"published results: {counts}; in MLflow they are the experiment {ledger.EXPERIMENT}")
    return 0


def _ids(options: Options, usage: str, least: int, most: int | None) -> tuple[list[str], Paths]:
    """The run ids of the command line, and the places that its overrides name."""
    ids = [word for word in options.overrides if "=" not in word]
    if len(ids) < least or (most is not None and len(ids) > most):
        raise UsageError(usage)
    return ids, _paths([word for word in options.overrides if "=" in word])


def _paths(overrides: list[str] | tuple[str, ...]) -> Paths:
    from orchestrator import config

    return config.load_machine(overrides).paths
