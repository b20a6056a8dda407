"""A table that is rewritten while snapshots are being taken (PostgreSQL manual, "Caveats" of MVCC).

TRUNCATE and the rewriting forms of ALTER TABLE do not heed older snapshots: a read through one finds
the table empty afterwards. The stream tells of a TRUNCATE and says nothing of a rewrite. So a chunk's read
holds the table before it takes its snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from psycopg2.errors import LockNotAvailable

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

ROWS = {'["1"]': {"id": "1", "v": "10"}, '["2"]': {"id": "2", "v": "20"}}


@pytest.fixture
def two_tables(source: SourceUnderTest) -> SourceUnderTest:
    """Tables ``early`` and ``late``, which a snapshot reads in this order."""
    for name in ("early", "late"):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")
        source.sql(f"INSERT INTO {name} VALUES (1, 10), (2, 20)")
        source.tables.append(contract(name, ("id", "v")))
    source.overrides["snapshot_threads"] = 1
    return source


def capture_with(source: SourceUnderTest, after_early: Callable[[], None]) -> None:
    """Capture up to now; ``after_early`` is called when the snapshot is done with ``early``."""

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and batch.chunk.boundary and batch.chunk.table == "early":
            after_early()

    capture = Capture(source.settings, source.home, Contracts(tuple(source.tables)), landed)
    capture.run(current_wal_lsn(source.dsn), threading.Event())
    capture.raise_left_out()


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        pytest.param("ALTER TABLE late ALTER COLUMN v TYPE bigint", ROWS, id="rewritten"),
        pytest.param("TRUNCATE late", {}, id="truncated"),
        pytest.param("ALTER TABLE late ADD COLUMN more int DEFAULT 7", None, id="with one more column"),
    ],
)
def test_table_changed_between_the_reads_of_a_snapshot_is_read_as_it_is_then(
    two_tables: SourceUnderTest, statement: str, left: dict[str, dict[str, str]] | None
) -> None:
    capture_with(two_tables, lambda: two_tables.sql(statement))
    two_tables.catch_up()
    events = two_tables.events()
    ((columns,),) = two_tables.query(
        "SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = 'late'::regclass AND attnum > 0"
        " AND NOT attisdropped"
    )
    assert folded(events, "late") == (two_tables.rows("late", columns) if left is None else left)
    assert folded(events, "early") == ROWS


def test_table_made_anew_between_the_reads_of_a_snapshot_is_named_and_read_again(
    two_tables: SourceUnderTest,
) -> None:
    made = "DROP TABLE late; CREATE TABLE late (id int PRIMARY KEY, v int); INSERT INTO late VALUES (3, 30)"
    with pytest.raises(TableMissedChanges, match="late was dropped and made anew"):
        capture_with(two_tables, lambda: two_tables.sql(made))
    SnapshotRequests(two_tables.store.folder).write("late", "a test")
    two_tables.catch_up()
    assert folded(two_tables.events(), "late") == {'["3"]': {"id": "3", "v": "30"}}
    assert folded(two_tables.events(), "early") == ROWS


@pytest.mark.parametrize(
    ("statement", "repair"),
    [
        ("DROP TABLE late", "CREATE TABLE late (id int PRIMARY KEY, v int); INSERT INTO late VALUES (3, 30)"),
        ("ALTER TABLE late RENAME TO later", "ALTER TABLE later RENAME TO late"),
    ],
    ids=["dropped", "renamed"],
)
def test_table_gone_when_its_turn_comes_is_named_until_it_is_there_and_then_read(
    two_tables: SourceUnderTest, statement: str, repair: str
) -> None:
    with pytest.raises(PreflightFailed, match=r"public\.late"):
        capture_with(two_tables, lambda: two_tables.sql(statement))
    assert folded(two_tables.events(), "early") == two_tables.rows("early", ("id", "v")), "it goes on"
    with pytest.raises(TableMissedChanges, match=r"public\.late"):
        two_tables.catch_up()
    two_tables.sql(repair, "UPDATE early SET v = 11 WHERE id = 1")
    # What became of its rows meanwhile is not known, so it stays left out until it is read again.
    with pytest.raises(TableMissedChanges, match=r"late.*public\.late does not exist"):
        two_tables.catch_up()
    assert folded(two_tables.events(), "early") == two_tables.rows("early", ("id", "v"))
    SnapshotRequests(two_tables.store.folder).write("late", "a test")
    two_tables.catch_up()
    for table in ("early", "late"):
        assert folded(two_tables.events(), table) == two_tables.rows(table, ("id", "v"))


def test_table_that_is_being_rewritten_when_its_turn_comes_is_read_afterwards(
    two_tables: SourceUnderTest,
) -> None:
    """A snapshot taken while the rewrite runs, and used when it is over, would find the table empty."""
    with two_tables.connected() as rewriting, rewriting.cursor() as cursor:
        ending = threading.Timer(1.0, cursor.execute, ["COMMIT"])

        def rewrite() -> None:
            cursor.execute("BEGIN; ALTER TABLE late ALTER COLUMN v TYPE bigint")
            ending.start()

        capture_with(two_tables, rewrite)
        ending.join()
    two_tables.catch_up()
    assert folded(two_tables.events(), "late") == ROWS


@pytest.mark.parametrize("statement", ["ALTER TABLE late ALTER COLUMN v TYPE bigint", "TRUNCATE late_2"])
def test_rewrite_waits_for_the_chunk_that_is_being_read_and_no_change_of_a_row_does(
    two_tables: SourceUnderTest, statement: str
) -> None:
    two_tables.sql(
        "DROP TABLE late",
        "CREATE TABLE late (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE late_1 PARTITION OF late FOR VALUES FROM (-9999) TO (2)",
        "CREATE TABLE late_2 PARTITION OF late FOR VALUES FROM (2) TO (9)",
        "INSERT INTO late VALUES (1, 10), (2, 20)",
    )
    two_tables.sql("ALTER TABLE late ADD filling text", "UPDATE late SET filling = repeat('x', 3000)")
    two_tables.sql("INSERT INTO late SELECT 1 - n, n, repeat('x', 3000) FROM generate_series(2, 900) n")
    two_tables.overrides |= {"snapshot_rows_per_second": 300, "snapshot_fetch_bytes": 65536}
    reading = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COPY%late%' AND xact_start IS NOT NULL"
    capture = threading.Thread(target=two_tables.catch_up)
    capture.start()
    try:
        until(lambda: two_tables.query(reading) == [(1,)])
        two_tables.sql("UPDATE late SET v = 11 WHERE id = 1")
        with pytest.raises(LockNotAvailable):
            two_tables.sql(f"SET lock_timeout = '300ms'; {statement}")
    finally:
        capture.join()
    two_tables.catch_up()
    assert folded(two_tables.events(), "late") == two_tables.rows("late", ("id", "v", "filling"))
