"""MLflow's copy of the ledger of promotions: a run for each entry, and the aliases `prod` and `previous`.

The copy is made from the ledger and from nothing else, so that a database that was lost is made again by `copy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.promoting import promotions
from orchestrator.promoting.promotions import Entry
from orchestrator.recorded import catalog, mlflow_store
from orchestrator.records import to_jsonable

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "promotions"
HASH = "promotion.hash"
ALIASES = ("prod", "previous")


@dataclass(frozen=True)
class Copied:
    """How many runs were added and how many were there; `unknown` are entries that MLflow has and the ledger has not,
    as where its last lines were lost."""

    added: int
    present: int
    unknown: tuple[str, ...]


def copy(directory: Path, box: str, entries: Sequence[Entry]) -> Copied:
    """Bring MLflow's runs and aliases in line with the ledger of the box. Raises TrackingError."""
    from orchestrator.recorded.tracking import Tracker

    tracker = Tracker(directory, EXPERIMENT)
    there: dict[str, str] = {}
    for found in catalog.entries(directory):
        if found.experiment == EXPERIMENT and found.tags.get("box") == box:
            if found.status == "FINISHED":
                there[found.tags.get(HASH, "")] = found.run_id
            else:
                tracker.remove(found.run_id)  # its writer was killed
    known = {entry.hash for entry in entries}
    unknown = tuple(sorted(run_id for of, run_id in there.items() if of not in known))
    missing = [entry for entry in entries if entry.hash not in there]
    for entry in missing:
        there[entry.hash] = _record(tracker, entry)
    with mlflow_store.explained(mlflow_store.database(directory)):
        _move_aliases(mlflow_store.connect(directory), directory, box, entries, there)
    return Copied(len(missing), len(entries) - len(missing), unknown)


def _record(tracker: Any, entry: Entry) -> str:
    target = entry.target
    tags = {
        "kind": "promotion",
        "source": "ledger",
        "box": entry.box,
        "variant": entry.variant,
        "promotion.number": str(entry.number),
        "promotion.kind": entry.kind,
        "promotion.outcome": entry.outcome,
        "promotion.at": entry.at_utc,
        "promotion.by": entry.by,
        "promotion.reason": entry.reason,
        "promotion.forced": "; ".join(entry.forced),
        HASH: entry.hash,
    }
    if target is not None:
        tags |= {"plan": target.plan.fingerprint, "verdict": target.verdict or "none", "ab": target.run_id or "none"}
    log = tracker.start(f"{entry.number} {entry.kind} {entry.variant}", {}, tags)
    log.log_json("entry.json", to_jsonable(entry))
    if entry.gap_s is not None:
        log.log_metrics({"promotion.gap_s": entry.gap_s})
    log.finish("FINISHED", f"{entry.outcome}: {entry.reason}" if entry.reason else entry.outcome)
    return log.run_id


def _move_aliases(
    client: MlflowClient, directory: Path, box: str, entries: Sequence[Entry], runs: dict[str, str]
) -> None:
    """The registered model of the box has a version for each entry that served; its aliases are what serves now."""
    wanted = dict(zip(ALIASES, (promotions.serving(entries), promotions.predecessor(entries)), strict=True))
    name = f"prod-{box}"
    models = {model.name: model for model in client.search_registered_models(f"name = '{name}'")}
    if name not in models:
        if not any(wanted.values()):
            return
        client.create_registered_model(name, description=f"What serves as prod on box {box}")
    versions = {found.tags.get(HASH, ""): found.version for found in client.search_model_versions(f"name = '{name}'")}
    for alias, entry in wanted.items():
        if entry is None:
            client.delete_registered_model_alias(name, alias)
            continue
        if entry.hash not in versions:
            run_id = runs[entry.hash]
            source = (directory / "artifacts" / run_id / "artifacts").resolve().as_uri()
            tags = {
                HASH: entry.hash,
                "variant": entry.variant,
                "plan": entry.target.plan.fingerprint,
                "verdict": entry.target.verdict or "none",
                "ab": entry.target.run_id or "none",
            }
            versions[entry.hash] = client.create_model_version(name, source, run_id=run_id, tags=tags).version
        client.set_registered_model_alias(name, alias, versions[entry.hash])
