"""What a kill left: boots that no live process owns, prod that no live process owes, records that are damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from orchestrator import owner, prod_server, slot
from orchestrator.doctor.check import Check
from orchestrator.errors import OrchestratorError


def checks(state: Path) -> Iterator[Check]:
    stale = []
    for path in (state / "boots").glob("*/journal.json"):
        try:
            record = json.loads(path.read_text())
            left = not record["ended"] and not owner.from_mapping(record["owner"]).alive()
        except (OSError, ValueError, KeyError, TypeError):
            left = True
        stale += [f"boot {path.parent.name}"] if left else []
    mend = f"python -m orchestrator guard paths.state={state}"
    yield Check("boots left behind", not stale, ", ".join(stale[:5]) or "none", mend if stale else "")
    for box in slot.boxes(state):
        try:
            prod, taken = slot.load(state, box), slot.displacement(state, box)
        except OrchestratorError as error:
            yield Check(
                f"prod of box {box}",
                False,
                str(error),
                f"python -m orchestrator prod stop box={box} paths.state={state}",
            )
            continue
        if prod is None:
            continue
        owed = taken is not None and taken.owner is not None and taken.owner.alive()
        ok = owed or (taken is None and prod_server.is_healthy(prod))
        found = str(taken) if taken else f"{prod.plan.variant} at {prod.base_url}" + ("" if ok else " does not serve")
        yield Check(f"prod of box {box}", ok, found, "" if ok else mend)
