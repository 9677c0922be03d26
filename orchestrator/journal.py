"""The boots that are under way, on disk before they start, so that the next start can end what a kill left behind."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from orchestrator import owner
from orchestrator.engines.process import kill_processes_of
from orchestrator.records import write_json


def new_nonce() -> str:
    """A name for one boot that no other has."""
    return secrets.token_hex(6)


def open_boot(state: Path, nonce: str, purpose: str, plan_fingerprint: str) -> Path:
    """Record that a boot is about to start; returns its directory, for its log and attestations."""
    directory = state / "boots" / nonce
    (directory / "attest").mkdir(parents=True)
    record = {"owner": asdict(owner.current()), "purpose": purpose, "plan": plan_fingerprint, "ended": False}
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
        nonce = path.parent.name
        killed = kill_processes_of(nonce)
        write_json(path, {**record, "ended": True})
        lines.append(
            f"boot {nonce} of process {record['owner']['pid']}, which is gone: ended {killed} server processes"
        )
    return lines
