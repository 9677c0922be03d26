"""A promotion under way: a record of the step that comes next, on disk before the step is taken.

`<state>/promotions/<box>.json` is there from before prod is touched until the ledger has what came of it. Whoever finds
it after a kill knows from the record alone which of the two plans has to serve: `direction`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from orchestrator.errors import OrchestratorError
from orchestrator.owner import Owner
from orchestrator.promoting.promotions import Target
from orchestrator.records import from_jsonable, to_jsonable, write_json
from orchestrator.slot import Slot

Step = Literal["draining", "stopping", "booting", "checking", "moving", "restoring"]


class Damaged(OrchestratorError):
    """The record of a promotion cannot be read."""


@dataclass(frozen=True)
class Promotion:
    """`step` is what was about to be done. `candidate` is the slot that is tried, with the nonce of its boot as soon
    as one is about to start; `previous` what served when it began (None: nothing), with the nonce that it had then.
    """

    id: str
    kind: Literal["promote", "rollback"]
    step: Step
    owner: Owner
    began_utc: str
    target: Target
    candidate: Slot
    previous: Slot | None
    tracking: str  # MLflow's directory
    reason: str = ""  # of --force
    forced: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    stopped_utc: str = ""  # when the previous server was about to be stopped
    gap_s: float | None = None
    failure: str = ""  # why it is given up

    @property
    def box(self) -> str:
        return self.candidate.box.name

    @property
    def what(self) -> str:
        return f"{'promotion of' if self.kind == 'promote' else 'rollback to'} {self.target.plan.variant}"


def direction(found: Promotion) -> Literal["forward", "back"]:
    """Which plan has to serve after whatever stopped the promotion: the candidate once every check has passed."""
    return "forward" if found.step == "moving" else "back"


def advanced(state: Path, found: Promotion, step: Step, **changes: object) -> Promotion:
    """The record with its next step, on disk when this returns."""
    new = replace(found, step=step, **changes)
    save(state, new)
    return new


def save(state: Path, new: Promotion) -> None:
    write_json(path_of(state, new.box), to_jsonable(new))


def load(state: Path, box: str) -> Promotion | None:
    """The promotion of the box that is under way or was killed; None where there is none. Raises Damaged."""
    path = path_of(state, box)
    try:
        return from_jsonable(Promotion, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise Damaged(f"{path} cannot be read ({str(error).splitlines()[0]})") from None


def remove(state: Path, box: str) -> None:
    path_of(state, box).unlink(missing_ok=True)


def boxes(state: Path) -> list[str]:
    """Those with a promotion that is under way or was killed."""
    return sorted(path.stem for path in (state / "promotions").glob("*.json"))


def path_of(state: Path, box: str) -> Path:
    return state / "promotions" / f"{box}.json"
