"""A policy of conf/schedule: when a box may be used, and what is done about what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

import yaml

from orchestrator import shipped
from orchestrator.errors import UsageError
from orchestrator.records import from_jsonable
from orchestrator.schedule import window as windows
from orchestrator.schedule.window import DAYS, Night, Window


@dataclass(frozen=True)
class Policy:
    """conf/schedule/nightly.yaml says what each field means."""

    window: str
    zone: str | None = None
    days: tuple[str, ...] = DAYS
    return_min: float = 15.0
    ready_min: float = 60.0
    margin: float = 1.25
    boot_deadline: float = 3.0
    boot_deadline_min: float = 15.0
    tries: int = 3
    retry_min: float = 10.0
    nights: int = 14
    webhook: str | None = None
    webhook_timeout_s: float = 10.0

    def usable_s(self, night: Night) -> float:
        """Seconds of the night in which boots may run: in the rest of it prod comes back."""
        return night.length_s - 60 * self.return_min

    def hours(self, window: str = "", zone: str = "") -> Window:
        """The policy's window, or the one given instead of it. Raises UsageError for what is none."""
        return windows.parse(window or self.window, zone or self.zone, self.days)


LEAST = {"margin": 1.0, "boot_deadline": 1.0, "tries": 1, "nights": 1, "webhook_timeout_s": 0.1}


def load(name: str) -> Policy:
    """conf/schedule/NAME.yaml. Raises UsageError, naming file and key, for what is wrong in it."""
    known = shipped.names("schedule")
    if name not in known:
        raise UsageError(f"schedule={name}: there is no schedule {name!r}; choose from: {', '.join(known)}")
    path = shipped.conf_dir() / "schedule" / f"{name}.yaml"
    try:
        policy = from_jsonable(Policy, yaml.safe_load(path.read_text("utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    return checked(policy, str(path))


def checked(policy: Policy, where: str) -> Policy:
    """The policy; raises UsageError, naming `where` and the key, for a value out of its range."""
    windows.parse(policy.window, policy.zone, policy.days, f"{where}: window")
    for field in fields(policy):
        value = getattr(policy, field.name)
        least = LEAST.get(field.name, 0)
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise UsageError(f"{where}: {field.name}: {value} is out of range; write {least:g} or more")
    if policy.webhook is not None and urlsplit(policy.webhook).scheme not in ("http", "https"):
        raise UsageError(
            f"{where}: webhook: {policy.webhook!r} is no address; write http://... or https://..., or null"
        )
    return policy


def of(schedule: str, window: str = "", zone: str = "") -> Policy:
    """The policy of this name, with another window and zone where they are given."""
    policy = load(schedule)
    return replace(policy, window=window or policy.window, zone=zone or policy.zone)
