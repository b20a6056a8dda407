"""The forecast of kept WAL: which end is nearest, when, and when a person is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.server import SlotFacts, SlotReader
from omnisupport_ingest.sources.postgres.slot.retention import (
    Forecast,
    Level,
    Thresholds,
    WalLimits,
    WalMark,
    forecast,
    wal_rate,
    warnings,
)

GB = 1 << 30
NOW = datetime(2026, 1, 1, tzinfo=UTC)
UNREAD = SlotFacts("s", "pgoutput", "db", None, Lsn(0), Lsn(0), "reserved", GB, 3 * GB)
READ = replace(UNREAD, active_pid=1, reader=SlotReader(1, "app", "me", None))
MUCH = Thresholds(warning=5 * GB, alarm=10 * GB)
LIMITED, UNLIMITED = WalLimits(4 * GB, None), WalLimits(None, None)


def _warned(slot: SlotFacts, room: WalLimits, rate: float | None) -> list[str]:
    ahead = forecast(slot, room, rate)
    return [each.problem for each in warnings(slot, room, ahead, "Start it.", MUCH)]


def test_rate_is_known_only_over_a_minute_or_more() -> None:
    earlier = WalMark(Lsn(0), NOW)
    assert wal_rate(None, earlier) is None
    assert wal_rate(earlier, WalMark(Lsn(600), NOW + timedelta(seconds=59))) is None
    assert wal_rate(earlier, WalMark(Lsn(600), NOW + timedelta(seconds=60))) == 10.0
    # A server restored from a backup is behind; that is for the proof of continuity to say.
    assert wal_rate(WalMark(Lsn(900), NOW), WalMark(Lsn(600), NOW + timedelta(seconds=60))) == 0.0


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (LIMITED, Forecast(GB, "max_slot_wal_keep_size", 3 * GB, 3.0)),
        (WalLimits(4 * GB, 2 * GB), Forecast(GB, "disk", 2 * GB, 2.0)),
        (WalLimits(4 * GB, 9 * GB), Forecast(GB, "max_slot_wal_keep_size", 3 * GB, 3.0)),
        (UNLIMITED, Forecast(GB, None, None, None)),
    ],
)
def test_the_nearest_end_is_told(room: WalLimits, expected: Forecast) -> None:
    slot = UNREAD if room.limit else replace(UNREAD, safe_bytes=None)
    assert forecast(slot, room, float(GB)) == expected


def test_nothing_written_means_no_end() -> None:
    assert forecast(UNREAD, LIMITED, 0.0).seconds is None
    assert forecast(UNREAD, LIMITED, None).seconds is None


@pytest.mark.parametrize(
    ("slot", "room", "rate", "told"),
    [
        (READ, LIMITED, float(GB), None),
        (UNREAD, LIMITED, 1.0, None),
        (UNREAD, LIMITED, 3 * GB / 3600, "max_slot_wal_keep_size is reached in 1.0 hours"),
        (UNREAD, WalLimits(4 * GB, GB), GB / 7200, "the disk is full in 2.0 hours"),
        (replace(READ, safe_bytes=GB // 2), LIMITED, None, "12% of max_slot_wal_keep_size is left"),
        (replace(READ, safe_bytes=-5, wal_status="unreserved"), LIMITED, None, "next checkpoint"),
        (replace(UNREAD, safe_bytes=None), UNLIMITED, None, "nothing limits the WAL"),
        (replace(READ, safe_bytes=None), UNLIMITED, None, None),
    ],
)
def test_warned_before_the_danger_and_not_without_one(
    slot: SlotFacts, room: WalLimits, rate: float | None, told: str | None
) -> None:
    found = _warned(slot, room, rate)
    assert (found == []) if told is None else (len(found) == 1 and told in found[0])


def test_remedy_starts_the_reader_or_names_what_holds_it_back_and_gives_room() -> None:
    low = replace(UNREAD, safe_bytes=1)
    (unread,) = warnings(low, LIMITED, forecast(low, LIMITED, None), "Start it.", MUCH)
    assert unread.fix.startswith("Start it. Or give it more room: ALTER SYSTEM SET")
    assert "max_slot_wal_keep_size = '8192MB'; SELECT pg_reload_conf();" in unread.fix
    slow = replace(low, reader=READ.reader)
    (read,) = warnings(slow, LIMITED, forecast(slow, LIMITED, None), "Start it.", MUCH)
    assert "backend_xid IS NOT NULL" in read.fix


@pytest.mark.parametrize(
    ("slot", "room", "rate", "level"),
    [
        (replace(READ, safe_bytes=GB // 2), LIMITED, None, Level.WARNING),
        (replace(READ, safe_bytes=GB // 4), LIMITED, None, Level.ALARM),
        (replace(READ, safe_bytes=-5, wal_status="unreserved"), LIMITED, None, Level.ALARM),
        (UNREAD, LIMITED, 3 * GB / 7200, Level.WARNING),
        (UNREAD, LIMITED, 3 * GB / 3000, Level.ALARM),
        (replace(UNREAD, safe_bytes=None), UNLIMITED, None, Level.WARNING),
        (replace(READ, safe_bytes=None, retained_bytes=6 * GB), UNLIMITED, None, Level.WARNING),
        (replace(READ, safe_bytes=None, retained_bytes=10 * GB), UNLIMITED, None, Level.ALARM),
    ],
)
def test_alarm_is_raised_where_changes_are_soon_lost(
    slot: SlotFacts, room: WalLimits, rate: float | None, level: Level
) -> None:
    (found,) = warnings(slot, room, forecast(slot, room, rate), "Start it.", MUCH)
    assert found.level is level


def test_wal_that_is_kept_over_a_threshold_is_told_with_both_sizes() -> None:
    slot = replace(READ, safe_bytes=None, retained_bytes=12 * GB)
    (found,) = warnings(slot, UNLIMITED, forecast(slot, UNLIMITED, None), "Start it.", MUCH)
    assert "keeps 12.9 GB of WAL for the slot s, over the 10.7 GB" in found.problem
