"""The rule of the safe low watermark, without a server: which marks a snapshot may take."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.safe_watermark import (
    Mark,
    SafeWatermarks,
    Visibility,
    page_end,
    widened,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
IDS = st.integers(100, 130)


def mark(lsn: int, *holders: int) -> Mark:
    return Mark(Lsn(lsn), NOON, frozenset(holders))


def sees(xmax: int, *running: int) -> Visibility:
    return Visibility(xmax, frozenset(running))


@given(st.integers(3, (1 << 48) - 1), st.integers(-(1 << 31) + 1, (1 << 31) - 1))
def test_an_id_of_32_bits_is_the_nearest_of_64(near: int, away: int) -> None:
    xid = max(3, near + away)
    assert widened(xid % (1 << 32), near) == xid


def test_a_transaction_is_finished_below_xmax_and_not_running() -> None:
    assert sees(110, 105).unfinished({104, 105, 109, 110, 200}) == {105, 110, 200}


@given(st.lists(st.tuples(st.integers(1, 10_000), st.sets(IDS, max_size=3)), min_size=1), st.sets(IDS), IDS)
def test_what_is_given_is_safe_and_the_newest_that_is_known_to_be(
    offered: list[tuple[int, set[int]]], running: set[int], xmax: int
) -> None:
    marks, visibility = SafeWatermarks(), sees(xmax, *running)
    known = [marks.offer(mark(lsn, *holders)) for lsn, holders in offered][-1]
    found = marks.newest_safe(known, visibility)
    safe = [lsn for lsn, holders in offered[-64:] if not visibility.unfinished(holders)]
    assert (found.lsn.value if found else None) == max(safe, default=None)
    assert found is None or not visibility.unfinished(found.holders)


def test_an_older_mark_stays_in_force_however_many_follow_under_a_long_transaction() -> None:
    marks = SafeWatermarks()
    assert marks.newest_safe(marks.offer(mark(10)), sees(105)) == mark(10)
    for lsn in range(11, 300):
        known = marks.offer(mark(lsn, 105))
    assert marks.newest_safe(known, sees(110, 105)) == mark(10)
    assert marks.newest_safe(known, sees(110)) == mark(299, 105)


def test_a_mark_that_another_read_offers_after_a_snapshot_is_not_for_that_snapshot() -> None:
    marks = SafeWatermarks()
    known = marks.offer(mark(10))
    # The snapshot is taken here. Transaction 105 commits below LSN 20 then, and is seen by everybody else.
    later = marks.offer(mark(20))
    assert marks.newest_safe(later, sees(110)) == mark(20)
    assert marks.newest_safe(known, sees(106, 105)) == mark(10)


def test_the_end_of_a_wal_page_is_told_as_the_stream_tells_it() -> None:
    page = 5 * 8192
    assert page_end(Lsn(page)) == page_end(Lsn(page + 24)) == page_end(Lsn(page + 40)) == Lsn(page)
    assert page_end(Lsn(page + 48)) == Lsn(page + 48)
    assert page_end(Lsn(page - 8)) == Lsn(page - 8)
