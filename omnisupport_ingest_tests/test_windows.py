"""Windows: each moment has one, whatever its arrival, and ranges join them without a gap."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.windows import (
    MAX_AHEAD,
    OUT_OF_RANGE,
    WindowGrid,
    WindowRange,
    WindowSize,
    WindowSizeRefused,
    WindowUnknown,
    without_sentinel,
)

FIRST = datetime(2026, 1, 31, tzinfo=UTC)
sizes = st.sampled_from(["hourly", "daily", "minutes:1", "minutes:15", "minutes:30"])
grids = sizes.map(lambda text: WindowGrid(WindowSize.parse(text), FIRST))
zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(hours=-11))])
moments = st.datetimes(datetime(2026, 2, 1), datetime(2027, 1, 1), timezones=zones)


@given(grids, moments)
def test_moment_lies_in_its_window(grid: WindowGrid, moment: datetime) -> None:
    key = grid.key_of(moment, moment)
    assert grid.start_of(key) <= moment < grid.end_of(key)


@given(grids, moments, st.timedeltas(timedelta(0), timedelta(days=900)))
def test_window_does_not_depend_on_arrival(grid: WindowGrid, moment: datetime, delay: timedelta) -> None:
    assert grid.key_of(moment, moment) == grid.key_of(moment, moment + delay)


@given(grids, moments, moments)
def test_keys_sort_as_time_does(grid: WindowGrid, a: datetime, b: datetime) -> None:
    if a <= b:
        assert grid.key_of(a, a) <= grid.key_of(b, b)


@given(grids, st.sets(st.integers(0, 60), min_size=1))
def test_ranges_hold_exactly_the_keys_given(grid: WindowGrid, numbers: set[int]) -> None:
    keys = [grid.truncate(FIRST + number * grid.size.length).strftime("%Y-%m-%dT%H%M") for number in numbers]
    ranges = grid.ranges(keys)
    held = [key for each in ranges for key in grid.keys_between(each.first, each.last)]
    assert held == sorted(keys)
    for before, after in pairwise(ranges):
        assert grid.end_of(before.last) < grid.start_of(after.first)


def test_ranges_of_repeated_unsorted_keys() -> None:
    grid = WindowGrid(WindowSize(60), FIRST)
    keys = ["2026-01-31T0300", "2026-01-31T0100", "2026-01-31T0200", "2026-01-31T0100", "2026-02-01T0000"]
    assert grid.ranges(keys) == [
        WindowRange("2026-01-31T0100", "2026-01-31T0300"),
        WindowRange("2026-02-01T0000", "2026-02-01T0000"),
    ]
    assert grid.ranges([]) == []


def test_times_that_cannot_be_right_fall_out_of_range() -> None:
    grid = WindowGrid(WindowSize(60), FIRST)
    now = FIRST + timedelta(days=3)
    tick = timedelta(microseconds=1)
    assert grid.key_of(FIRST - tick, now) == OUT_OF_RANGE
    assert grid.key_of(FIRST, now) == "2026-01-31T0000"
    assert grid.key_of(now + MAX_AHEAD, now) == "2026-02-04T0000"
    assert grid.key_of(now + MAX_AHEAD + tick, now) == OUT_OF_RANGE
    assert without_sentinel([OUT_OF_RANGE, "2026-01-31T0000"]) == ["2026-01-31T0000"]


@pytest.mark.parametrize("key", ["2026-01-31T0030", "2026-01-30T2300", "yesterday", "", OUT_OF_RANGE])
def test_key_that_is_no_window_is_refused(key: str) -> None:
    with pytest.raises(IngestError, match="not a window of this lake"):
        WindowGrid(WindowSize(60), FIRST).start_of(key)


@pytest.mark.parametrize("text", ["", "weekly", "minutes:0", "minutes:7", "minutes:-5", "minutes:120", "60"])
def test_size_that_does_not_divide_an_hour_is_refused(text: str) -> None:
    with pytest.raises(WindowSizeRefused, match="is not a window size") as raised:
        WindowSize.parse(text)
    assert raised.value.exit_code == 2, "as for every other setting"


@given(sizes)
def test_size_reads_back_from_its_text(text: str) -> None:
    assert str(WindowSize.parse(text)) == text


def test_grid_starts_at_a_window() -> None:
    with pytest.raises(ValueError, match="not the start of a window"):
        WindowGrid(WindowSize(60), FIRST + timedelta(minutes=1))


def test_cron_ticks_at_window_starts() -> None:
    crons = {text: WindowSize.parse(text).cron for text in ("hourly", "daily", "minutes:15")}
    assert crons == {"hourly": "0 * * * *", "daily": "0 0 * * *", "minutes:15": "*/15 * * * *"}


@pytest.mark.parametrize(
    ("size", "text", "key"),
    [
        ("hourly", "2026-01-31T1700", "2026-01-31T1700"),
        ("hourly", "2026-01-31T17:00", "2026-01-31T1700"),
        ("hourly", "2026-01-31 17:00:00", "2026-01-31T1700"),
        ("hourly", "2026-01-31T17:00:00Z", "2026-01-31T1700"),
        ("hourly", "2026-01-31T19:00+02:00", "2026-01-31T1700"),
        ("hourly", "2026-01-31T17:23", "2026-01-31T1700"),
        ("hourly", "2026-01-31T17", "2026-01-31T1700"),
        ("minutes:1", "2026-01-31T17:23", "2026-01-31T1723"),
        ("minutes:15", "2026-01-31T17:23:59", "2026-01-31T1715"),
        ("daily", "2026-01-31", "2026-01-31T0000"),
        ("hourly", OUT_OF_RANGE, OUT_OF_RANGE),
    ],
)
def test_a_window_is_named_by_its_key_or_by_any_time_in_it(size: str, text: str, key: str) -> None:
    assert WindowGrid(WindowSize.parse(size), FIRST).named(text) == key


BEYOND_TIME = ("0001-01-01T00:00+14:00", "9999-12-31T23:59-10:00")
"""Times that are none in UTC, which begins with year 1 and ends with year 9999."""


@pytest.mark.parametrize(
    "text", ["yesterday", "", "2026-01-30T23:00", "2026-02-30T00:00", "17:00", *BEYOND_TIME]
)
def test_what_names_no_window_is_a_wrong_argument(text: str) -> None:
    with pytest.raises(WindowUnknown, match="not a window of this lake") as refused:
        WindowGrid(WindowSize(60), FIRST).named(text)
    assert refused.value.exit_code == 2
    assert "2026-01-31T0000" in str(refused.value)
