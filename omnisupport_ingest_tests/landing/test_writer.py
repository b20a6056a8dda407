"""A batch is written: what goes in comes out, cut at windows and at sizes."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.contracts.subject_keys import SubjectKeysUnreadable
from omnisupport_ingest.durable import create_exclusively
from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.landing import parts, writer_threads
from omnisupport_ingest.landing.columns import events_table, row_group
from omnisupport_ingest.landing.errors import ChainContested, DamagedBatch, LandingFailed
from omnisupport_ingest.landing.manifest import ChunkSpan, FileSpan, Manifest, RelationVersion
from omnisupport_ingest.landing.names import chunk_batch_id, file_batch_id
from omnisupport_ingest.landing.rows import LANDED_SCHEMA
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, Covered, EventBlock, WriterLimits
from omnisupport_ingest.landing.writer_threads import WriterThreads
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.landing.batches import GRID, NOON, event, land, open_writer, span
from omnisupport_ingest_tests.waiting import PATIENCE

SMALL = WriterLimits(group_rows=10, file_bytes=1)


def rows_of(store: LandingStore, batch: Manifest) -> list[dict[str, Any]]:
    return [row for file in batch.files for row in pq.read_table(store.path_of(file)).to_pylist()]


def test_every_column_comes_back_as_it_went_in(store: LandingStore) -> None:
    full = event(9)._replace(
        op="u",
        key='["1", "ü"]',
        before='{"id": null}',
        after='{"body": "naïve \\u0000 🐘"}',
        unchanged=["body", "notes"],
        moved_from_key='["0"]',
        chunk_id="s1-tickets-1",
        source_ts=NOON + timedelta(microseconds=123457),
    )
    bare = event(9, 2)._replace(tx_id=None, lsn=None, key=None, after=None, op="t")
    with open_writer(store, 8) as writer:
        writer.add(full)
        writer.add(bare)
        batch = writer.seal(stream=span(8, 20))
    file = store.path_of(batch.files[0])
    assert pq.read_schema(file).equals(LANDED_SCHEMA)
    assert rows_of(store, batch) == [
        {**full._asdict(), "batch_id": batch.batch_id},
        {**bare._asdict(), "batch_id": batch.batch_id},
    ]
    assert store.read(batch.batch_id) == batch
    store.verify(batch)


def test_manifest_describes_the_file(store: LandingStore) -> None:
    relation = RelationVersion("public", "tickets", ("id",), ("bigint",), ("id",), "default")
    with open_writer(store, 8) as writer:
        for ordinal in (0, 2, 4):
            writer.add(event(9, ordinal, table="agents" if ordinal == 4 else "tickets"))
        assert writer.rows == 3
        assert writer.bytes > 3 * len("printer on fire")
        batch = writer.seal(stream=span(8, 20), relations=(relation,))
    (file,) = batch.files
    assert (file.first, file.last) == (Position(1, Lsn(9), 0), Position(1, Lsn(9), 4))
    assert file.ordered
    assert file.rows_per_table == {"public.agents": 1, "public.tickets": 2}
    assert batch.rows == 3
    assert batch.relations == (relation,)


def test_files_are_cut_at_windows(store: LandingStore) -> None:
    moments = {
        "2026-03-02T1100": NOON - timedelta(microseconds=1),
        "2026-03-02T1200": NOON,
        OUT_OF_RANGE: GRID.first - timedelta(microseconds=1),
    }
    with open_writer(store, 8) as writer:
        for ordinal, moment in enumerate([*moments.values(), NOON + timedelta(days=3)]):
            writer.add(event(9, ordinal, at=moment))
        batch = writer.seal(stream=span(8, 20))
    assert batch.windows == tuple(sorted(moments))
    assert {file.window: file.rows for file in batch.files}[OUT_OF_RANGE] == 2


def test_huge_transaction_spills_into_several_files_of_one_window(store: LandingStore) -> None:
    with open_writer(store, 8, limits=SMALL) as writer:
        for ordinal in range(0, 70, 2):
            writer.add(event(9, ordinal))
        batch = writer.seal(stream=span(8, 20))
    assert [file.rows for file in batch.files] == [10, 10, 10, 5]
    assert [row["ordinal"] for row in rows_of(store, batch)] == list(range(0, 70, 2))
    assert all(file.ordered for file in batch.files)
    store.verify(batch)


def test_buffers_are_bounded_over_many_windows_and_open_files_too(
    store: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_OPEN_FILES", 3)
    limits = WriterLimits(group_rows=10, buffered_groups=2)
    most = 0
    with open_writer(store, 8, limits=limits) as writer:
        for i in range(200):
            writer.add(event(9, i, at=NOON - timedelta(hours=i % 8)))
            most = max(most, sum(len(buffer.events) for buffer in writer._buffers.values()))
        batch = writer.seal(stream=span(8, 20))
    assert most <= 20
    assert len(batch.windows) == 8
    assert sorted(row["ordinal"] for row in rows_of(store, batch)) == list(range(200))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3)), min_size=1, max_size=12))
def test_ordered_means_that_positions_rise_strictly(positions: list[tuple[int, int]]) -> None:
    group = row_group("w", events_table([event(lsn, ordinal) for lsn, ordinal in positions]), "b")
    assert group.ordered == (positions == sorted(set(positions)))
    assert group.first[1:] == min(positions)
    assert group.last[1:] == max(positions)


def test_order_is_judged_across_row_groups(store: LandingStore) -> None:
    with open_writer(store, 8, limits=WriterLimits(group_rows=2)) as writer:
        for ordinal in (4, 6, 0, 2):
            writer.add(event(9, ordinal))
        (file,) = writer.seal(stream=span(8, 20)).files
    assert not file.ordered
    assert (file.first.ordinal, file.last.ordinal) == (0, 6)


def block(ordinals: range, table: Callable[[], pa.Table] | None = None) -> EventBlock:
    events = [event(9, ordinal) for ordinal in ordinals]
    return EventBlock(
        GRID.key_of(NOON, NOON), len(events), 1000, NOON, table or (lambda: events_table(events))
    )


def test_blocks_and_single_events_keep_their_order(store: LandingStore) -> None:
    with open_writer(store, 8) as writer:
        writer.add(event(9, 0))
        writer.add_block(block(range(2, 10, 2)))
        writer.add(event(9, 10))
        writer.add_block(block(range(12, 20, 2)))
        assert writer.rows == 10
        batch = writer.seal(stream=span(8, 20))
    (file,) = batch.files
    assert file.ordered
    assert [row["ordinal"] for row in rows_of(store, batch)] == list(range(0, 20, 2))
    assert batch.arrival.highest_commit_ts == NOON


def test_small_tables_wait_for_others_of_their_window(store: LandingStore) -> None:
    limits = WriterLimits(group_rows=10, buffered_groups=2)
    with open_writer(store, 8, limits=limits) as writer:
        for ordinal in range(0, 60, 3):
            at = NOON - timedelta(hours=ordinal % 2)
            writer.add_table(GRID.key_of(at, NOON), events_table([event(9, ordinal, at=at)] * 2), at)
            writer.add(event(9, ordinal + 1, at=at))
            assert sum(buffer.rows for buffer in writer._buffers.values()) < 20
        assert writer.rows == 60
        batch = writer.seal(stream=span(8, 20))
    assert [file.rows for file in batch.files] == [30, 30]
    for file in batch.files:
        assert pq.ParquetFile(store.path_of(file)).num_row_groups == 3
    told = sorted(row["ordinal"] for row in rows_of(store, batch))
    assert told == sorted([*range(0, 60, 3), *range(0, 60, 3), *range(1, 60, 3)])
    assert batch.arrival.highest_commit_ts == NOON


def test_block_that_cannot_be_made_lands_nothing_and_says_why(store: LandingStore) -> None:
    def fail() -> pa.Table:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with open_writer(store, 8) as writer:
        writer.add_block(block(range(3)))
        writer.add_block(block(range(3, 6), fail))
        with pytest.raises(UnicodeDecodeError):
            writer.seal(stream=span(8, 20))
    assert store.batch_ids() == []
    assert list((store.folder / "data").iterdir()) == []


def test_blocks_wait_for_the_writer_so_that_memory_stays_bounded(store: LandingStore) -> None:
    waiting: list[int] = []
    most = 0

    def made(number: int) -> pa.Table:
        waiting.remove(number)
        return events_table([event(9, number)])

    with open_writer(store, 8) as writer:
        for number in range(50):
            waiting.append(number)
            writer.add_block(block(range(number, number + 1), lambda number=number: made(number)))
            most = max(most, len(waiting))
        batch = writer.seal(stream=span(8, 20))
    assert most <= 5
    assert batch.rows == 50


def test_data_is_readable_by_its_owner_only(store: LandingStore) -> None:
    batch = land(store, 8, 20)
    path = store.path_of(batch.files[0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_keepalive_batch_has_no_data_folder(store: LandingStore) -> None:
    batch = land(store, 8, 20, at=None)
    assert (batch.files, batch.rows) == ((), 0)
    assert not store.data_folder(batch.batch_id).exists()


def test_abandoned_batch_leaves_nothing(store: LandingStore) -> None:
    writer = open_writer(store, 8, limits=SMALL)
    for ordinal in range(25):
        writer.add(event(9, ordinal))
    writer.abandon()
    writer.abandon()
    assert store.batch_ids() == []
    assert list((store.folder / "data").iterdir()) == []
    land(store, 8, 20)


def test_failed_write_surfaces_and_lands_nothing(store: LandingStore) -> None:
    with open_writer(store, 8, limits=SMALL) as writer:
        writer.add(event(9))
        store.data_folder(writer.batch_id).rmdir()
        with pytest.raises(LandingFailed, match="cannot be written"):
            writer.seal(stream=span(8, 20))
    assert store.batch_ids() == []


def test_failed_write_surfaces_in_add_within_a_bounded_number_of_row_groups(store: LandingStore) -> None:
    with open_writer(store, 8, limits=SMALL) as writer:
        store.data_folder(writer.batch_id).rmdir()
        with pytest.raises(LandingFailed):
            for ordinal in range(10 * 10):
                writer.add(event(9, ordinal))


def test_batch_whose_data_file_is_missing_is_not_landed(store: LandingStore, tmp_path: Path) -> None:
    batch = land(store, 8, 20)
    elsewhere = LandingStore(tmp_path / "elsewhere", store.source)
    with pytest.raises(DamagedBatch, match="is missing"):
        elsewhere.publish(batch)
    assert elsewhere.batch_ids() == []


def test_data_of_a_batch_that_landed_survives_an_error_right_after(
    store: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes) -> bool:
        create_exclusively(path, content)
        raise OSError("fsync of the folder failed")

    monkeypatch.setattr("omnisupport_ingest.landing.store.create_exclusively", fail)
    with pytest.raises(LandingFailed, match="fsync of the folder failed"):
        land(store, 8, 20)
    (batch,) = store.landed().batches
    store.verify(batch)


class Interrupted(Exception):
    """What ends a wait: a stop of the process, or a source that has gone."""


def test_batch_that_is_given_up_while_row_groups_wait_never_lands_without_them(
    store: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_threads, "MEANWHILE_SECONDS", 0.05)
    let_go, write = threading.Event(), parts.PartFiles.write

    def written(self: parts.PartFiles, group: parts.RowGroup) -> None:
        assert let_go.wait(PATIENCE)
        write(self, group)

    def interrupt() -> None:
        threading.Timer(0.2, let_go.set).start()
        raise Interrupted

    monkeypatch.setattr(parts.PartFiles, "write", written)
    with pytest.raises(Interrupted), open_writer(store, 8, limits=SMALL) as writer:
        for ordinal in range(30):
            writer.add(event(9, ordinal))
        writer.meanwhile = interrupt
        writer.seal(stream=span(8, 20))
    assert [batch.rows for batch in store.landed().batches] in ([], [30])
    assert len(list((store.folder / "data").iterdir())) == len(store.batch_ids())


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[WriterThreads]:
    made = WriterThreads(request.param)
    yield made
    made.close()


def on(threads: WriterThreads, store: LandingStore, previous_end: int) -> BatchWriter:
    """A writer that shares ``threads`` and takes in one event."""
    writer = open_writer(store, previous_end, limits=WriterLimits(group_rows=1))
    writer.share(threads)
    writer.add(event(previous_end + 1))
    return writer


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No batch lands before this is set."""
    event, publish = threading.Event(), LandingStore.publish

    def published(self: LandingStore, manifest: Manifest) -> None:
        assert event.wait(PATIENCE)
        publish(self, manifest)

    monkeypatch.setattr(LandingStore, "publish", published)
    yield event
    event.set()


def test_the_next_batch_takes_events_in_while_one_is_landing(
    store: LandingStore, threads: WriterThreads, let_go: threading.Event
) -> None:
    landing = on(threads, store, 8).begin_seal(Covered(stream=span(8, 20)))
    second = on(threads, store, 20)
    assert not landing.done() and store.batch_ids() == []
    let_go.set()
    assert (landing.result(PATIENCE), second.seal(stream=span(20, 30))) == store.landed().batches
    third = on(threads, store, 30)
    third.abandon()
    assert len(store.batch_ids()) == 2 and not store.data_folder(third.batch_id).exists()


def test_few_row_groups_of_the_next_batch_wait_for_one_that_is_landing(
    store: LandingStore, threads: WriterThreads, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_threads, "MEANWHILE_SECONDS", 0.05)
    landing = on(threads, store, 8).begin_seal(Covered(stream=span(8, 20)))
    second, waited_at = on(threads, store, 20), list[int]()

    def meanwhile() -> None:
        waited_at.append(second.rows)
        let_go.set()

    second.meanwhile = meanwhile
    for ordinal in range(1, 20):
        second.add(event(21, ordinal))
    assert waited_at and waited_at[0] <= 4
    assert landing.result(PATIENCE).rows == 1
    assert second.seal(stream=span(20, 30)).rows == 20


def test_a_batch_of_which_a_row_group_is_not_written_never_lands(
    store: LandingStore, threads: WriterThreads
) -> None:
    first = open_writer(store, 8, limits=WriterLimits(group_rows=1))
    first.share(threads)
    store.data_folder(first.batch_id).rmdir()
    first.add(event(9))
    landing = first.begin_seal(Covered(stream=span(8, 20)))
    second = open_writer(store, 20, limits=WriterLimits(group_rows=1))
    second.share(threads)
    with pytest.raises(LandingFailed, match=first.batch_id):
        for ordinal in range(10):
            second.add(event(21, ordinal))
    with pytest.raises(LandingFailed, match=first.batch_id):
        landing.result(PATIENCE)
    first.abandon()
    second.abandon()
    assert store.batch_ids() == [] and list((store.folder / "data").iterdir()) == []


def _refusing(folder: Path, refused: int) -> LandingStore:
    """A landing of which the event with the ordinal ``refused`` cannot be encrypted."""

    def as_landed(events: pa.Table) -> pa.Table:
        if refused in events["ordinal"].to_pylist():
            raise SubjectKeysUnreadable("No keys.", fix="Restore them.")
        return events

    return LandingStore(folder, "support_desk", as_landed=as_landed)


def test_a_batch_of_which_a_row_group_cannot_be_encrypted_never_lands(tmp_path: Path) -> None:
    store = _refusing(tmp_path, 2)
    with open_writer(store, 8, limits=WriterLimits(group_rows=1)) as writer:
        for ordinal in range(3):
            writer.add(event(9, ordinal))
        # Row groups behind the one that failed are whole, and do not make the batch so.
        writer.add(event(9, 3))
        with pytest.raises(SubjectKeysUnreadable):
            writer.seal(stream=span(8, 20))
    assert store.batch_ids() == [] and list((store.folder / "data").iterdir()) == []


def test_whoever_adds_events_hears_that_an_earlier_one_cannot_be_encrypted(tmp_path: Path) -> None:
    store = _refusing(tmp_path, 2)
    with open_writer(store, 8, limits=WriterLimits(group_rows=1)) as writer:
        with pytest.raises(SubjectKeysUnreadable):
            for ordinal in range(20):
                writer.add(event(9, ordinal))
        with pytest.raises(SubjectKeysUnreadable):
            writer.seal(stream=span(8, 20))
    assert store.batch_ids() == [] and list((store.folder / "data").iterdir()) == []


def test_second_writer_of_a_batch_is_refused_while_the_first_is_open(store: LandingStore) -> None:
    with open_writer(store, 8) as first:
        first.add(event(9))
        with pytest.raises(ChainContested, match="being written"):
            open_writer(store, 8)
        batch = first.seal(stream=span(8, 20))
    with pytest.raises(ChainContested, match="already landed"):
        open_writer(store, 8)
    store.verify(batch)


def test_span_must_fit_the_name_of_the_batch(store: LandingStore) -> None:
    with open_writer(store, 8) as writer, pytest.raises(FieldProblem, match="batch_id"):
        writer.seal(stream=span(9, 20))
    assert store.batch_ids() == []


def test_chunk_and_file_batches_land_beside_the_stream(tmp_path: Path) -> None:
    store = LandingStore(tmp_path, "support_desk")
    stream = land(store, 8, 20)
    chunk = ChunkSpan("s1", "public.Läden/2026", 3, 1, Lsn(5), Lsn(6), NOON, start="1", end="9")
    chunk_id = chunk_batch_id(1, "s1", chunk.table, 3, 1)
    with BatchWriter(store, GRID, 1, chunk_id, clock=lambda: NOON) as writer:
        writer.add(event(5, -4)._replace(op="r"))
        landed_chunk = writer.seal(chunk=chunk)
    digest = "ab" * 32
    with BatchWriter(store, GRID, 1, file_batch_id(digest), clock=lambda: NOON) as writer:
        landed_file = writer.seal(file=FileSpan(digest, "events.jsonl", "seed"))
    assert store.landed().batches == (landed_chunk, stream, landed_file)
    assert landed_chunk.arrival.watermark == stream.arrival.watermark
    assert landed_chunk.arrival.watermark_before == stream.arrival.watermark


def test_a_batch_records_the_newest_epoch_that_had_begun_when_it_landed(store: LandingStore) -> None:
    def before(previous_end: int, end: int, epoch: int, at: datetime | None = NOON) -> int | None:
        return land(store, previous_end, end, epoch=epoch, at=at).arrival.newest_epoch_before

    assert before(8, 20, epoch=1) == 0
    assert before(20, 30, epoch=1) == 1
    store.begin_epoch("the slot was lost", None)
    assert before(30, 40, epoch=1) == 1, "an epoch that is recorded only has not begun"
    assert before(50, 60, epoch=2, at=None) == 1
    assert before(40, 50, epoch=1) == 1, "an idle stretch has no event, so it begins no epoch"
    assert before(60, 70, epoch=2) == 1
    assert before(50, 60, epoch=1) == 2, "this one came too late"
    assert before(70, 80, epoch=2) == 2


def test_a_delivery_of_files_begins_its_epoch_too(store: LandingStore) -> None:
    digest = "ab" * 32
    with BatchWriter(store, GRID, 3, file_batch_id(digest), clock=lambda: NOON) as writer:
        writer.add(event(0, -4)._replace(op="r", epoch=3))
        assert writer.seal(file=FileSpan(digest, "a.jsonl", "seed")).arrival.newest_epoch_before == 0
    assert land(store, 8, 20, epoch=2).arrival.newest_epoch_before == 3
