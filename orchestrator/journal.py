"""The boots that are under way, on disk before they start, so that the next start can end what a kill left behind."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from orchestrator import engines, owner
from orchestrator.errors import OrchestratorError
from orchestrator.records import write_json


def new_nonce() -> str:
    """A name for one boot that no other has."""
    return secrets.token_hex(6)


def open_boot(
    state: Path, nonce: str, purpose: str, plan_fingerprint: str, kind: str = "process", socket: str | None = None
) -> Path:
    """Record that a boot is about to start; returns its directory, for its log and attestations.

    `socket` is the API socket of the container engine `kind`, None for processes.
    """
    directory = state / "boots" / nonce
    (directory / "attest").mkdir(parents=True)
    record = {
        "owner": asdict(owner.current()),
        "purpose": purpose,
        "plan": plan_fingerprint,
        "engine": {"kind": kind, "socket": socket},
        "ended": False,
    }
    write_json(directory / "journal.json", record)
    return directory


def close_boot(directory: Path) -> None:
    """Record that nothing of the boot runs any more."""
    path = directory / "journal.json"
    write_json(path, {**json.loads(path.read_text()), "ended": True})


def reap(state: Path) -> list[str]:
    """End the servers of boots whose orchestrator is gone; returns a line for each boot closed."""
    lines = []
    for path in sorted((state / "boots").glob("*/journal.json")):
        try:
            record = json.loads(path.read_text())
            abandoned = not record["ended"] and not owner.from_mapping(record["owner"]).alive()
        except (ValueError, KeyError):
            abandoned, record = True, {"owner": {"pid": "unknown"}}
        if not abandoned:
            continue
        nonce, of = path.parent.name, f"of process {record['owner']['pid']}, which is gone"
        try:
            ended = engines.reap(**record.get("engine", {"kind": "process", "socket": None}), nonce=nonce)
        except OrchestratorError as error:
            lines.append(f"boot {nonce} {of}, may still run; the next start tries again: {error}")
            continue
        write_json(path, {**record, "ended": True})
        lines.append(f"boot {nonce} {of}: ended {ended} server processes or containers")
    return lines
