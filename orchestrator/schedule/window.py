"""Local hours in which a box may be used, as instants: the clock's changes and midnight included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from orchestrator.errors import UsageError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
LOCALTIME = Path("/etc/localtime")
HORIZON_DAYS = 15  # a weekday comes back within 7; a night that a clock change leaves without length is passed over


@dataclass(frozen=True)
class Night:
    """One occurrence of a window: [opens, closes) in UTC; `date` is the local one on which it opens."""

    date: date
    opens: datetime
    closes: datetime

    @property
    def length_s(self) -> float:
        return (self.closes - self.opens).total_seconds()

    def holds(self, now: datetime) -> bool:
        return self.opens <= now < self.closes


@dataclass(frozen=True)
class Window:
    """Every `days` from `start` to `end`, local times of `zone`; where `end` is not later, it is the next day's.

    A local time stands for the first instant at which the zone's clocks show it or a later one: of a doubled hour the
    first, of a hour that is left out the instant of the change. So prod is back when a clock first shows the end.
    """

    start: time
    end: time
    zone: str
    days: tuple[str, ...] = DAYS

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M} {self.zone}"

    def at(self, now: datetime) -> Night:
        """The night that holds `now`, or the next one. Raises UsageError where none comes."""
        for night in self.nights(now):
            if night.closes > now:
                return night
        raise UsageError(f"window {self}: no such night within {HORIZON_DAYS} days; correct its days")

    def nights(self, since: datetime) -> Iterator[Night]:
        """Those of HORIZON_DAYS, oldest first, beginning at the one before `since`; none is without length."""
        zone = ZoneInfo(self.zone)
        today = since.astimezone(zone).date()
        for day in (today + timedelta(days=offset) for offset in range(-1, HORIZON_DAYS)):
            if DAYS[day.weekday()] not in self.days:
                continue
            last = day if self.end > self.start else day + timedelta(days=1)
            opens, closes = instant(day, self.start, zone), instant(last, self.end, zone)
            if closes > opens:
                yield Night(day, opens, closes)


def instant(day: date, at: time, zone: ZoneInfo) -> datetime:
    """The first instant, in UTC, at which the zone's clocks show this local time or a later one of that day."""
    local = datetime.combine(day, at)
    early = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    late = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    if early <= late:  # once, or twice and this is the first
        return early
    low, high = late, early  # left out: PEP 495 puts the change between the two readings
    offset = low.astimezone(zone).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        low, high = (middle, high) if middle.astimezone(zone).utcoffset() == offset else (low, middle)
    return high.replace(microsecond=0)


def parse(text: str, zone: str | None, days: Sequence[str] = DAYS, key: str = "window") -> Window:
    """The window of a text such as "01:00-06:30"; a zone of None is this machine's.

    Raises UsageError, naming `key`, for what is none.
    """
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text)
    if not found:
        raise UsageError(f'{key}: {text!r} is no window; write local times as in "01:00-06:30"')
    hours = [int(number) for number in found.groups()]
    start, end = time(*hours[:2]), time(*hours[2:])
    if start == end:
        raise UsageError(f"{key}: {text!r} has no length; write another end")
    zone = zone or local_zone()
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f"{key}: there is no time zone {zone!r}; write an IANA name such as Europe/Berlin") from None
    if not days or (unknown := sorted(set(days) - set(DAYS))):
        wrong = ", ".join(unknown) if days else "no day"
        raise UsageError(f"{key}: days: {wrong}; choose from {', '.join(DAYS)}")
    return Window(start, end, zone, tuple(days))


def local_zone() -> str:
    """The IANA name of this machine's zone: what /etc/localtime links to, else UTC."""
    try:
        name = str(LOCALTIME.resolve(strict=True)).partition("zoneinfo/")[2]
        ZoneInfo(name)
        return name
    except (OSError, ValueError, ZoneInfoNotFoundError):
        return "UTC"
