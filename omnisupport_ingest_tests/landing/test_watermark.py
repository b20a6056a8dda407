"""The watermark of the stream and the facts frozen at arrival."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.landing.manifest import ArrivalFacts, ChunkSpan
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.watermark import stream_facts
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.landing.batches import (
    GRID,
    NOON,
    SKEW,
    event,
    land,
    manifest,
    open_writer,
    span,
)

MINUTE = timedelta(minutes=1)
moments = st.integers(-90, 90).map(lambda minutes: NOON + minutes * MINUTE)
arrivals = st.tuples(st.lists(moments, max_size=3), st.none() | moments, moments)


@given(st.lists(arrivals, min_size=1, max_size=8))
def test_watermark_never_moves_back_and_never_passes_the_clock(
    batches: list[tuple[list[datetime], datetime | None, datetime]],
) -> None:
    previous, before, clock = None, None, NOON - timedelta(days=1)
    for number, (commits, confirmed, landed_at) in enumerate(batches):
        clock = max(clock, landed_at)
        facts = stream_facts(
            previous,
            1,
            tuple(commits),
            confirmed_clock=confirmed,
            landed_at=landed_at,
            max_clock_skew=SKEW,
        )
        assert facts.watermark_before == before
        if before is not None:
            assert facts.watermark is not None and facts.watermark >= before
        if facts.watermark is not None:
            assert facts.watermark <= clock - SKEW
        before = facts.watermark
        previous = replace(manifest(number, number + 1), arrival=facts)


def test_watermark_follows_commit_times_then_a_confirmed_clock(store: LandingStore) -> None:
    first = land(store, 8, 20, at=NOON - 5 * MINUTE)
    assert first.arrival.watermark_before is None
    assert first.arrival.watermark == NOON - 5 * MINUTE - SKEW
    idle = land(store, 20, 30, at=None, now=NOON + MINUTE, confirmed_clock=NOON)
    assert idle.arrival.watermark_before == first.arrival.watermark
    assert idle.arrival.watermark == NOON - SKEW
    assert idle.arrival.highest_commit_ts_before == NOON - 5 * MINUTE
    unproved = land(store, 30, 40, at=None, now=NOON + 2 * MINUTE)
    assert unproved.arrival.watermark == idle.arrival.watermark


def test_a_time_no_clock_error_explains_does_not_move_the_watermark(store: LandingStore) -> None:
    with open_writer(store, 8) as writer:
        writer.add(event(9, 0, at=NOON - MINUTE))
        writer.add(event(9, 2, at=NOON + timedelta(days=400)))
        batch = writer.seal(stream=span(8, 20, NOON + timedelta(days=400)), max_clock_skew=SKEW)
    assert batch.arrival.watermark == NOON - MINUTE - SKEW
    assert batch.arrival.highest_commit_ts == NOON - MINUTE


def test_new_epoch_starts_its_own_watermark_and_remembers_the_old_one(store: LandingStore) -> None:
    old = land(store, 8, 20, at=NOON)
    restored = land(store, 5, 9, epoch=2, at=NOON - 60 * MINUTE)
    assert restored.arrival.watermark_before == old.arrival.watermark
    assert restored.arrival.watermark == NOON - 60 * MINUTE - SKEW


def test_a_manifest_lost_after_others_have_followed_changes_no_fact_of_what_lands_behind_the_gap(
    tmp_path: Path,
) -> None:
    """Its batch had arrived; once it is restored, all is judged as if it had never been lost."""

    def landed(store: LandingStore, *, loses: bool) -> list[ArrivalFacts]:
        first = land(store, 0, 10, at=NOON - 30 * MINUTE)
        lost = land(store, 10, 20, at=NOON - 20 * MINUTE)
        land(store, 20, 30, at=NOON - 10 * MINUTE)
        if loses:
            (store.folder / "manifests" / f"{lost.batch_id}.json").unlink()
            assert [each.batch_id for each in store.landed().batches] == [first.batch_id]
        name = chunk_batch_id(1, "s", "tickets", 0, 1)
        chunk = BatchWriter(store, GRID, 1, name, clock=lambda: NOON)
        read = chunk.seal(chunk=ChunkSpan("s", "tickets", 0, 1, Lsn(30), Lsn(30), NOON))
        return [read.arrival, land(store, 30, 40).arrival]

    whole, damaged = (LandingStore(tmp_path / name, "support_desk") for name in ("whole", "damaged"))
    facts = landed(whole, loses=False)
    assert facts[0].watermark_before == NOON - 10 * MINUTE - SKEW
    assert landed(damaged, loses=True) == facts
