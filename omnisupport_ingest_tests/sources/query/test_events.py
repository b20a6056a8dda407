"""Rows as events, many at once: times, windows and the hash of a batch are those of each row alone."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import EVENT_SCHEMA, LandedEvent
from omnisupport_ingest.sources.query import events as of_rows
from omnisupport_ingest.sources.query.cursor import HIGHEST, micros, micros_of
from omnisupport_ingest.sources.query.events import ContentHash, RowWindows, blocks
from omnisupport_ingest.windows import MAX_AHEAD
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.sources.query.tickets import GRID

NOW = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
_MOMENTS = st.datetimes(datetime(1000, 1, 1), datetime(9999, 12, 31))
_ZONES = st.sampled_from(["+00", "+00:00", "+05:30", "-03"])


@settings(max_examples=examples(200))
@given(moments=st.lists(_MOMENTS | st.none(), min_size=1), zones=st.lists(_ZONES, min_size=1, max_size=2))
def test_a_text_of_a_time_is_the_same_number_whatever_stands_beside_it(
    moments: list[datetime | None], zones: list[str]
) -> None:
    texts = [
        None if each is None else str(each) + zones[number % len(zones)]
        for number, each in enumerate(moments)
    ]
    wanted = [None if each is None else micros(datetime.fromisoformat(each)) for each in texts]
    assert micros_of(pa.array(texts, pa.string())).to_pylist() == wanted
    plain = [None if each is None else str(each) for each in moments]
    utc = [None if each is None else micros(each.replace(tzinfo=UTC)) for each in moments]
    assert micros_of(pa.array(plain, pa.string())).to_pylist() == utc


def test_times_that_no_calendar_has_are_the_highest_or_the_lowest() -> None:
    texts = ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "12026-01-01 00:00:00+00", "soon", None]
    found = micros_of(pa.array([*texts, "2026-11-20 12:30:00+00"], pa.string())).to_pylist()
    assert found == [HIGHEST, -HIGHEST, -HIGHEST, HIGHEST, None, None, micros(NOW)]


def event(number: int, moment: datetime) -> LandedEvent:
    return LandedEvent(1, 0, number, "r", moment, None, None, "s", "t", f'["{number}"]', None, "{}", None,
                       None, None, "i")  # fmt: skip


_AROUND = st.integers(-3_000_000, 3_000_000).map(lambda seconds: NOW + timedelta(seconds=seconds))
_ODD = st.sampled_from([datetime(1000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)])


@settings(max_examples=examples(200))
@given(
    moments=st.lists(_AROUND | _ODD | st.just(GRID.first), max_size=40),
    most=st.integers(1, 5),
    sorted_by_time=st.booleans(),
    rows_from=st.none() | _AROUND,
)
def test_blocks_have_each_event_in_its_window_in_the_order_in_which_they_came(
    moments: list[datetime], most: int, sorted_by_time: bool, rows_from: datetime | None
) -> None:
    windows = RowWindows(GRID, NOW, rows_from)
    moments = sorted(moments) if sorted_by_time else moments
    events = [event(number, moment) for number, moment in enumerate(moments)]
    table = events_table(events) if events else EVENT_SCHEMA.empty_table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_rows, "BLOCK_ROWS", most)
        found = list(blocks(table, windows))
    by_window: dict[str, list[int]] = {}
    for each in events:
        by_window.setdefault(windows.of(each.source_ts), []).append(each.ordinal)
    landed: dict[str, list[int]] = {}
    for block in found:
        rows = block.table()
        assert 0 < rows.num_rows == block.rows <= most
        times = rows.column("source_ts").to_pylist()
        counted = [each if each <= NOW + MAX_AHEAD else GRID.first for each in times]
        assert block.highest_ts == min(max(counted), NOW)
        landed.setdefault(block.window, []).extend(rows.column("ordinal").to_pylist())
    assert landed == by_window
    assert list(landed) == sorted(landed)


@pytest.mark.parametrize(
    ("moment", "window"),
    [
        (GRID.first, "2026-01-01T0000"),
        (GRID.first - timedelta(days=9), "2026-11-10T1200"),
        (GRID.first + timedelta(days=9), "2026-11-10T1200"),
        (NOW, "2026-11-20T1200"),
        (NOW + 2 * MAX_AHEAD, "2026-01-01T0000"),
    ],
    ids=["no time", "before the first window", "before the epoch", "after it", "far ahead"],
)
def test_a_row_that_is_older_than_its_epoch_lands_in_the_window_in_which_that_began(
    moment: datetime, window: str
) -> None:
    """A full refresh reads rows whose own windows may be sealed. The first window never is."""
    assert RowWindows(GRID, NOW, datetime(2026, 11, 10, 12, 59, tzinfo=UTC)).of(moment) == window


def test_a_batch_has_the_name_that_the_stream_of_its_events_has() -> None:
    """Batches of earlier versions are known by it."""
    parts = [events_table([event(number, NOW) for number in range(start, start + 9)]) for start in (0, 9)]
    told = hashlib.sha256(json.dumps([3, "desk"]).encode())
    for part in parts:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.schema) as stream:
            stream.write_table(part)
        told.update(sink.getvalue())
    found = ContentHash(3, "desk")
    found.add(parts[0])
    assert found.hexdigest() != told.hexdigest()
    found.add(parts[1])
    assert found.hexdigest() == told.hexdigest()
