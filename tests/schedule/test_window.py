"""Windows in local time, held against what a clock on the wall would show minute by minute."""

from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from orchestrator.errors import UsageError
from orchestrator.schedule.window import HORIZON_DAYS, Window, instant, parse

BERLIN = "Europe/Berlin"


def utc(*parts) -> datetime:
    return datetime(*parts, tzinfo=UTC)


def first_shown(day: date, at: time, zone: ZoneInfo) -> datetime:
    """The definition, walked: the first minute at which the wall clock shows this time of that day, or a later one."""
    moment = datetime.combine(day, time(), tzinfo=UTC) - timedelta(hours=15)
    while moment.astimezone(zone).replace(tzinfo=None) < datetime.combine(day, at):
        moment += timedelta(minutes=1)
    return moment


@given(
    day=some.dates(date(2024, 1, 1), date(2027, 12, 31)),
    at=some.times().map(lambda t: t.replace(second=0, microsecond=0)),
    zone=some.sampled_from([BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
)
@settings(max_examples=40, deadline=None)
def test_a_local_time_is_the_first_minute_at_which_a_clock_shows_it_or_a_later_one(day, at, zone):
    assert instant(day, at, ZoneInfo(zone)) == first_shown(day, at, ZoneInfo(zone))


@pytest.mark.parametrize("zone", [BERLIN, "America/New_York", "Australia/Lord_Howe"])
def test_so_it_is_at_every_quarter_of_an_hour_of_the_days_on_which_clocks_change(zone):
    days = {BERLIN: [(2026, 3, 29), (2026, 10, 25)], "America/New_York": [(2026, 3, 8), (2026, 11, 1)]}
    for day in days.get(zone, [(2026, 4, 5), (2026, 10, 4)]):
        for quarter in range(5 * 4):
            at = time(quarter // 4, quarter % 4 * 15)
            assert instant(date(*day), at, ZoneInfo(zone)) == first_shown(date(*day), at, ZoneInfo(zone))


def test_a_night_is_an_hour_longer_in_autumn_and_an_hour_shorter_in_spring():
    window = parse("01:00-06:30", BERLIN)
    assert window.at(utc(2026, 10, 24, 12)).length_s == 6.5 * 3600
    assert window.at(utc(2026, 3, 28, 12)).length_s == 4.5 * 3600
    assert window.at(utc(2026, 6, 1, 12)).length_s == 5.5 * 3600


def test_a_window_crosses_midnight():
    window = parse("22:00-05:00", BERLIN)
    night = window.at(utc(2026, 6, 2, 1))
    assert night.date == date(2026, 6, 1)
    assert (night.opens, night.closes) == (utc(2026, 6, 1, 20), utc(2026, 6, 2, 3))
    assert window.at(night.closes).date == date(2026, 6, 2)


def test_a_window_has_its_days_by_the_date_on_which_it_opens():
    window = parse("22:00-05:00", "UTC", ["fri"])
    assert window.at(utc(2026, 6, 6, 4)).date == date(2026, 6, 5)
    assert window.at(utc(2026, 6, 6, 5)).date == date(2026, 6, 12)


def test_a_night_that_the_change_leaves_without_length_is_passed_over():
    window = parse("02:10-02:50", BERLIN)
    assert window.at(utc(2026, 3, 28, 12)).date == date(2026, 3, 30)


@pytest.mark.parametrize(
    ("text", "zone", "days", "said"),
    [
        ("1-6", None, ["mon"], "is no window"),
        ("25:00-06:00", None, ["mon"], "is no window"),
        ("01:00-01:00", None, ["mon"], "no length"),
        ("01:00-02:00", "Europe/Berlinn", ["mon"], "no time zone"),
        ("01:00-02:00", "../../etc/passwd", ["mon"], "no time zone"),
        ("01:00-02:00", "UTC", ["monday"], "monday; choose from"),
        ("01:00-02:00", "UTC", [], "no day"),
    ],
)
def test_what_is_no_window_is_refused_in_one_line(text, zone, days, said):
    with pytest.raises(UsageError, match=said):
        parse(text, zone, days)


@given(now=some.datetimes(datetime(2024, 1, 1), datetime(2027, 12, 31)), start=some.times(), end=some.times())
@settings(max_examples=60, deadline=None)
def test_there_is_always_a_next_night_and_nights_never_overlap(now, start, end):
    start, end = (t.replace(second=0, microsecond=0) for t in (start, end))
    if start == end:
        return
    now = now.replace(tzinfo=UTC)
    nights = list(Window(start, end, BERLIN).nights(now))
    assert Window(start, end, BERLIN).at(now).closes > now and len(nights) - 1 <= HORIZON_DAYS
    assert all(a.closes <= b.opens for a, b in pairwise(nights))
