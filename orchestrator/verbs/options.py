"""What a verb is asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """A parsed command line."""

    verb: str
    overrides: tuple[str, ...]
    json: bool = False
    diff: tuple[str, str] | None = None
    multirun: bool = False
    quiet: bool = False
    now: bool = False
    dry_run: bool = False
    watch: float | None = None
    older_than: float | None = None
    keep: float | None = None
    resume: str | None = None
    power: bool = False
    all: bool = False
    unpaired: bool = False
    force: bool = False
    reason: str = ""
    to: float | None = None
    units: str | None = None
