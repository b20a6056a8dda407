"""Repair by recovery: what the lake has already is not read again, and the end is the source's state."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_policies import lake_columns
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning, GapInSource
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered
from omnisupport_ingest_tests.sources.postgres import folded_lake
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.source_under_test import (
    SourceUnderTest,
    contract,
    folded,
)

COLUMNS = ("id", "a", "b")
Keys = Sequence[str] | None
REASON = "the slot was dropped"
LONG = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 200))"


@pytest.fixture
def lost(source: SourceUnderTest) -> SourceUnderTest:
    """A table of 500 rows in chunks of 50, captured; and then its slot is dropped."""
    source.sql(
        "CREATE TABLE tickets (id int PRIMARY KEY, a text, b text)",
        f"INSERT INTO tickets SELECT n, 'old', {LONG} FROM generate_series(1, 500) n",
    )
    columns = (Column("id", "integer"), Column("a", "text"), Column("b", "text"))
    source.tables.append(replace(contract("tickets", COLUMNS), columns=columns))
    source.overrides |= {"snapshot_chunk_rows": 50, "snapshot_threads": 1}
    source.catch_up()
    source.sql("UPDATE tickets SET a = 'captured' WHERE id % 10 = 0")
    source.catch_up()
    source.sql(f"SELECT pg_drop_replication_slot('{source.slot}')")
    return source


def recover(source: SourceUnderTest, scratch: Path, stop: threading.Event | None = None) -> list[Recovered]:
    told: list[Recovered] = []
    lake = FoldedLake(source, scratch)
    _, done = source.capture().recover(REASON, lake, stop or threading.Event(), told.append)
    assert done == (len(told) == len(source.tables))
    return told


def same_as_source(source: SourceUnderTest, table: str = "tickets") -> bool:
    return folded(source.events(), table) == source.rows(table, COLUMNS)


def complete(source: SourceUnderTest) -> bool:
    epoch = source.store.current_epoch()
    return epoch is not None and incomplete_now(source.manifests(), "tickets", epoch.number, ()) is None


def test_nothing_is_read_again_where_nothing_was_lost(lost: SourceUnderTest, tmp_path: Path) -> None:
    with pytest.raises(GapInSource):
        lost.catch_up()
    assert recover(lost, tmp_path) == [Recovered("tickets", 11, 0, 0, 0, 0)]
    assert not complete(lost)
    lost.sql("UPDATE tickets SET a = 'after' WHERE id = 7")
    lost.catch_up()
    assert [event.op for event in lost.events() if event.epoch == 2] == ["u"]
    assert same_as_source(lost) and complete(lost)


def test_recovery_answers_for_what_changed_before(lost: SourceUnderTest, tmp_path: Path) -> None:
    """Each row is compared, so no schema change asks for a whole read any more."""
    lost.sql("ALTER TABLE tickets DROP b, ADD b text")
    (done,) = recover(lost, tmp_path)
    assert done.read_again
    lost.catch_up()
    changes = SchemaChanges(lost.store.folder)
    assert [each.kind for each in changes.all()] == ["column_added_again"]
    assert changes.open_changes("tickets") == ()
    assert same_as_source(lost) and complete(lost)


def test_chunks_are_compared_row_by_row_where_the_lake_orders_keys_in_another_way(
    lost: SourceUnderTest, tmp_path: Path
) -> None:
    lost.tables[0] = contract("tickets", COLUMNS)
    lost.sql("UPDATE tickets SET a = 'lost' WHERE id = 120")
    (done,) = recover(lost, tmp_path)
    assert (done.chunks, done.by_rows, done.read_again, done.ended) == (11, 11, 1, 0)
    lost.catch_up()
    assert same_as_source(lost) and complete(lost)


def test_no_value_that_a_policy_hides_is_fetched_to_compare_it(
    lost: SourceUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    class Looking(DimensionRows):
        def same(self, rows: Path) -> bool:
            seen.update(pq.read_schema(rows).names)
            return super().same(rows)

    monkeypatch.setattr(folded_lake, "DimensionRows", Looking)
    at_source = tuple(
        replace(each, pii="drop", personal=True) if each.name == "b" else each
        for each in lost.tables[0].columns
    )
    lost.tables[0] = replace(lost.tables[0], columns=lake_columns(at_source), unprotected=at_source)
    lost.sql("DELETE FROM tickets WHERE id = 3")
    (done,) = recover(lost, tmp_path)
    assert (done.by_rows, done.ended, seen) == (done.chunks, 1, {"id", "a"})
    lost.catch_up()
    assert same_as_source(lost) and complete(lost)


def test_only_chunks_that_differ_are_read_and_rows_that_are_gone_end(
    lost: SourceUnderTest, tmp_path: Path
) -> None:
    lost.sql(
        "UPDATE tickets SET a = 'lost' WHERE id = 120",
        "INSERT INTO tickets VALUES (1000, 'lost', 'b')",
        "DELETE FROM tickets WHERE id IN (3, 4, 499)",
    )
    # Row 120 is in the third chunk, row 1000 in the last, of 48; a delete alone asks for no reading.
    (done,) = recover(lost, tmp_path)
    assert (done.read_again, done.ended) == (2, 3) and done.rows == 98
    # By its checksum, the one from which rows are gone differs too.
    assert done.by_rows == 3
    lost.catch_up()
    of_the_epoch = [event for event in lost.events() if event.epoch == 2]
    assert sorted(event.key or "" for event in of_the_epoch if event.op == "d") == [
        '["3"]',
        '["4"]',
        '["499"]',
    ]
    assert all(event.ordinal < 0 for event in of_the_epoch) and not lost.events("b")[1:]
    assert same_as_source(lost) and complete(lost)


def test_row_that_came_back_with_the_same_value_after_the_repair_began_lives(
    lost: SourceUnderTest, tmp_path: Path
) -> None:
    lost.sql("DELETE FROM tickets WHERE id = 5")
    recover(lost, tmp_path)
    lost.sql("INSERT INTO tickets VALUES (5, 'again', 'b')")
    lost.catch_up()
    assert same_as_source(lost)
    assert folded(lost.events(), "tickets")['["5"]']["a"] == "again"


def test_row_moved_to_a_key_that_looks_unchanged_has_its_unsent_column(
    lost: SourceUnderTest, tmp_path: Path
) -> None:
    """The key changed in the new epoch, before its chunk was read: the stream lacks the long column."""
    lost.sql("CREATE TABLE kept AS SELECT * FROM tickets WHERE id = 9", "DELETE FROM tickets WHERE id = 9")
    lost.sql("INSERT INTO tickets SELECT 9999, a, b FROM kept")

    class Late(FoldedLake):
        def rows(self, table: TableContract) -> object:  # type: ignore[override]
            lost.sql("UPDATE tickets SET id = 9 WHERE id = 9999")
            return super().rows(table)

    told: list[Recovered] = []
    lost.capture().recover(REASON, Late(lost, tmp_path), threading.Event(), told.append)
    assert told == [Recovered("tickets", 11, 0, 0, 0, 0)]
    lost.catch_up()
    moved = [event for event in lost.events("c") if event.moved_from_key is not None]
    assert [event.unchanged for event in moved] == [["b"]]
    assert same_as_source(lost) and complete(lost)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(3))
def test_table_that_is_written_while_it_is_compared_ends_as_the_source(
    lost: SourceUnderTest, tmp_path: Path, seed: int
) -> None:
    chance, over = random.Random(seed), threading.Event()

    def statement() -> str:
        one, other = chance.randint(1, 520), chance.randint(1, 520)
        return chance.choice(
            [
                f"UPDATE tickets SET a = '{chance.randint(1, 3)}' WHERE id = {one}",
                f"UPDATE tickets SET b = {LONG} WHERE id = {one}",
                f"DELETE FROM tickets WHERE id = {one}",
                f"INSERT INTO tickets VALUES ({one}, 'new', {LONG}) ON CONFLICT DO NOTHING",
                f"UPDATE tickets SET id = {other} WHERE id = {one}"
                f" AND NOT EXISTS (SELECT FROM tickets WHERE id = {other})",
            ]
        )

    def write() -> None:
        with lost.connected() as connection, connection.cursor() as cursor:
            while not over.is_set():
                cursor.execute(statement())

    lost.sql(*(statement() for _ in range(60)))
    lost.overrides["snapshot_rows_per_second"] = 1500
    writer = threading.Thread(target=write)
    writer.start()
    try:
        (done,) = recover(lost, tmp_path)
    finally:
        over.set()
        writer.join()
    assert done.read_again and done.ended
    lost.catch_up()
    assert same_as_source(lost) and complete(lost)


@pytest.mark.parametrize("batches", [0, 1, 5, 10])
def test_recovery_that_is_stopped_leaves_its_table_to_a_whole_snapshot(
    lost: SourceUnderTest, tmp_path: Path, batches: int
) -> None:
    lost.sql("UPDATE tickets SET a = 'lost' WHERE id % 100 = 0", "DELETE FROM tickets WHERE id = 77")
    stop = threading.Event()

    class Stopping(FoldedLake):
        @contextmanager
        def rows(self, table: TableContract) -> Iterator[DimensionRows]:
            with super().rows(table) as rows:
                compared = 0
                has = rows.has

                def counting(checksum: RowChecksum, by: Sequence[str], start: Keys, end: Keys) -> bool:
                    nonlocal compared
                    if compared == batches - 1:
                        stop.set()
                    compared += 1
                    return has(checksum, by, start, end)

                rows.has = counting  # type: ignore[method-assign]
                if not batches:
                    stop.set()
                yield rows

    told: list[Recovered] = []
    epoch, done = lost.capture().recover(REASON, Stopping(lost, tmp_path), stop, told.append)
    assert not done and told == [] and epoch.number == 2
    lost.catch_up()
    plans = SnapshotPlans(lost.store.folder).all(2)
    assert [plan.compared for plan in plans] == ([True, False] if batches else [False])
    assert len([event for event in lost.events("b") if event.epoch == 2]) == 1
    assert same_as_source(lost) and complete(lost)


def test_recovery_changes_nothing_while_capture_runs_or_the_lake_is_behind(
    lost: SourceUnderTest, tmp_path: Path
) -> None:
    with take_lease(lost.home.run, lost.settings.source), pytest.raises(CaptureRunning):
        recover(lost, tmp_path)

    class Behind(FoldedLake):
        def pin(self) -> None:
            raise IngestError("behind", fix="wait")

    with pytest.raises(IngestError, match="behind"):
        lost.capture().recover(REASON, Behind(lost, tmp_path), threading.Event(), lambda _: None)
    assert len(lost.store.epochs()) == 1
