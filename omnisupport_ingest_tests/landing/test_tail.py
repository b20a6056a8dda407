"""Landed events are read back in the order of their positions."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from omnisupport_ingest.landing import tail
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.tail import events_of, last_events
from omnisupport_ingest_tests.landing.batches import NOON, SKEW, event, open_writer, span

ALL = frozenset("crudtmb")


def land_two_windows(store: LandingStore) -> None:
    """One batch whose events alternate between two windows and two tables."""
    with open_writer(store, 0) as writer:
        for ordinal in range(6):
            at = NOON - timedelta(hours=ordinal % 2)
            writer.add(event(1, 2 * ordinal, at=at, table="tickets" if ordinal < 3 else "agents"))
        writer.seal(stream=span(0, 100), max_clock_skew=SKEW)


def test_events_of_several_files_come_in_the_order_of_their_positions(store: LandingStore) -> None:
    land_two_windows(store)
    (batch,) = store.manifests()
    assert len(batch.files) == 2
    assert [each.ordinal for each in events_of(store, batch)] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("name", ["agents", "public.agents"])
def test_events_of_one_table(store: LandingStore, name: str) -> None:
    land_two_windows(store)
    (batch,) = store.manifests()
    assert [each.ordinal for each in events_of(store, batch, name)] == [6, 8, 10]
    assert not list(events_of(store, batch, "other.agents"))


def test_the_last_events_reach_back_over_batches(store: LandingStore) -> None:
    land_two_windows(store)
    with open_writer(store, 100) as writer:
        writer.add(event(101, 0))
        writer.add(event(101, 2)._replace(op="b"))
        writer.seal(stream=span(100, 200), max_clock_skew=SKEW)
    found = last_events(store, store.manifests(), 3, operations=ALL - {"b"})
    assert [(each.commit_lsn, each.ordinal) for _, each in found] == [(1, 8), (1, 10), (101, 0)]
    assert last_events(store, store.manifests(), 0, operations=ALL) == []


def test_the_last_events_of_a_large_batch_are_found_from_its_end(
    store: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_writer(store, 0) as writer:
        for ordinal in range(5000):
            at = NOON - timedelta(hours=ordinal % 2)
            writer.add(event(1, 2 * ordinal, at=at, table="tickets" if ordinal < 4000 else "agents"))
        writer.seal(stream=span(0, 100), max_clock_skew=SKEW)
    made, known = Counter[str](), tail.LandedEvent

    def counted(**columns: object) -> LandedEvent:
        made["events"] += 1
        return known(**columns)  # type: ignore[arg-type]

    monkeypatch.setattr(tail, "LandedEvent", counted)
    for table, last in (("agents", 9998), ("tickets", 7998)):
        found = last_events(store, store.manifests(), 3, operations=ALL, table=table)
        assert [each.ordinal for _, each in found] == [last - 4, last - 2, last]
    assert made["events"] < 6000
    assert len(last_events(store, store.manifests(), 6000, operations=ALL)) == 5000


def test_a_file_that_cannot_be_read_is_named(store: LandingStore) -> None:
    land_two_windows(store)
    (batch,) = store.manifests()
    path = store.path_of(batch.files[0])
    path.write_bytes(b"")
    with pytest.raises(DamagedBatch, match="truncated"):
        list(events_of(store, batch))
