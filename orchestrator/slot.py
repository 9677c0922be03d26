"""What serves as prod on a box, and who has taken it down: two small files that outlive every process.

`<state>/prod/<box>.json` is the slot: while it is there, prod should serve. `<state>/prod/<box>.displaced.json` is
written before a run stops prod and removed when prod is proven back; a kill in between leaves it for the next start.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator import owner
from orchestrator.errors import OrchestratorError
from orchestrator.owner import Owner
from orchestrator.plan import ServePlan
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.schema import Box, Engine

JOURNAL_SUFFIX = ".displaced.json"


@dataclass(frozen=True)
class Slot:
    """The frozen plan that serves as prod, what it is started with, and the nonce of its present boot.

    `failed_boots` counts those in a row that did not come up; one that does sets it to 0. `early_ends` counts those in
    a row that came up, at `healthy_utc`, and soon ended by themselves. The present boot began at `booting_utc`.
    """

    plan: ServePlan
    engine: Engine
    box: Box
    since_utc: str
    by: str
    nonce: str
    failed_boots: int = 0
    early_ends: int = 0
    healthy_utc: str = ""
    booting_utc: str = ""

    @property
    def base_url(self) -> str:
        return f"http://{self.plan.host}:{self.plan.port}"

    @property
    def model(self) -> str:
        """The served name that only the present boot answers to."""
        return f"{self.plan.served_model}@{self.nonce}"


@dataclass(frozen=True)
class Displacement:
    """Who took prod down. `damage` says why the entry cannot be read; prod has to come back all the same."""

    owner: Owner | None
    purpose: str
    since_utc: str
    damage: str = ""

    def __str__(self) -> str:
        if self.owner is None:
            return f"its displacement record is damaged ({self.damage})"
        return f"process {self.owner.pid} took it down ({self.purpose}, {self.since_utc})"


def boxes(state: Path) -> list[str]:
    """The boxes with a slot, or with a displacement whose slot is lost."""
    names = {path.name.removesuffix(JOURNAL_SUFFIX).removesuffix(".json") for path in (state / "prod").glob("*.json")}
    return sorted(names)


def load(state: Path, box: str) -> Slot | None:
    """The slot of the box; None where nothing should serve. Raises OrchestratorError where it cannot be read."""
    path = _slot_path(state, box)
    try:
        return from_jsonable(Slot, json.loads(path.read_text()))
    except FileNotFoundError:
        if not _journal_path(state, box).exists():
            return None
        reason = "it is missing, though prod was displaced"
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
    raise OrchestratorError(
        f"prod slot {path} cannot be read ({reason}); empty it with `python -m orchestrator prod stop box={box}`, "
        "fill it again with `prod start +variant=NAME`"
    )


def save(state: Path, slot: Slot) -> None:
    write_json(_slot_path(state, slot.box.name), to_jsonable(slot))


def remove(state: Path, box: str) -> None:
    """Nothing should serve any more."""
    _slot_path(state, box).unlink(missing_ok=True)
    _journal_path(state, box).unlink(missing_ok=True)


def directory(state: Path, slot: Slot) -> Path:
    """Of the present boot: its log and attestations."""
    return state / "prod" / slot.box.name / slot.nonce


def nonces(state: Path, box: str) -> list[str]:
    """Of every boot that prod of the box has had and whose log is kept."""
    return sorted(path.name for path in (state / "prod" / box).glob("*") if path.is_dir())


def displacement(state: Path, box: str) -> Displacement | None:
    """The open entry, damaged ones included; None where prod was not taken down."""
    try:
        record: dict[str, Any] = json.loads(_journal_path(state, box).read_text())
        return Displacement(owner.from_mapping(record["owner"]), str(record["purpose"]), str(record["since_utc"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        return Displacement(None, "", "", f"{type(error).__name__}: {error}".splitlines()[0])


def open_displacement(state: Path, box: str, purpose: str) -> None:
    """Record, before prod is stopped, that this process stops it."""
    record = {"owner": asdict(owner.current()), "purpose": purpose, "since_utc": now_utc()}
    write_json(_journal_path(state, box), record)


def close_displacement(state: Path, box: str) -> None:
    """Record that prod was seen healthy again."""
    _journal_path(state, box).unlink(missing_ok=True)


def now_utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _slot_path(state: Path, box: str) -> Path:
    return state / "prod" / f"{box}.json"


def _journal_path(state: Path, box: str) -> Path:
    return state / "prod" / f"{box}{JOURNAL_SUFFIX}"
