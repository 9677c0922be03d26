"""The boots that are under way, on disk before they start, so that the next start can end what a kill left behind."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator import engines, owner
from orchestrator.errors import OrchestratorError
from orchestrator.records import write_json

ENGINES = ("process", "docker", "podman")


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
    try:
        record = _read(path)
    except (OSError, ValueError):
        record = {"owner": asdict(owner.current())}
    write_json(path, {**record, "ended": True})


def reap(state: Path) -> list[str]:
    """End the servers of boots whose orchestrator is gone; returns a line for each boot closed.

    A journal that cannot be understood is moved aside, after the processes of its boot were ended.
    """
    lines = []
    for path in sorted((state / "boots").glob("*/journal.json")):
        nonce = path.parent.name
        try:
            record = _read(path)
            if record["ended"] or owner.from_mapping(record["owner"]).alive():
                continue
            of = f"of process {record['owner']['pid']}, which is gone"
        except OSError as error:
            lines.append(f"boot {nonce} is left as it is: {path} cannot be read ({error.strerror})")
            continue
        except ValueError:
            record, of = None, f"has a damaged journal, moved to {path.name}.damaged"
        try:
            ended = engines.reap(**_engine_of(record), nonce=nonce)
            if record is None:
                path.replace(path.with_name(f"{path.name}.damaged"))
                record = {"owner": asdict(owner.current())}
            write_json(path, {**record, "ended": True})
        except OrchestratorError as error:
            of = of.partition(", moved")[0]
            lines.append(f"boot {nonce} {of}, may still run; the next start tries again: {error}")
            continue
        lines.append(f"boot {nonce} {of}: ended {ended} server processes or containers")
    return lines


def _engine_of(record: dict[str, Any] | None) -> dict[str, Any]:
    return (record or {}).get("engine", {"kind": "process", "socket": None})


def _read(path: Path) -> dict[str, Any]:
    """A boot's record. Raises ValueError where it is not one."""
    record = json.loads(path.read_text())
    try:
        owner.from_mapping(record["owner"]).alive()
        engine = _engine_of(record)
        sound = isinstance(record["ended"], bool) and engine.keys() == {"kind", "socket"}
        sound = sound and engine["kind"] in ENGINES and isinstance(engine["socket"], str | None)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: no record of a boot") from error
    if not sound:
        raise ValueError(f"{path}: no record of a boot")
    return record
