"""A table that is rewritten while its snapshot is being taken (PostgreSQL manual, "Caveats" of MVCC).

TRUNCATE and the rewriting forms of ALTER TABLE do not heed older snapshots: a read through one finds
the table empty afterwards. The stream tells of a TRUNCATE and says nothing of a rewrite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.capture import Capture
from omnisupport_ingest.sources.postgres.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

ROWS = {'["1"]': {"id": "1", "v": "10"}, '["2"]': {"id": "2", "v": "20"}}


@pytest.fixture
def two_tables(source: SourceUnderTest) -> SourceUnderTest:
    """Tables ``early`` and ``late``, which a snapshot reads in this order."""
    for name in ("early", "late"):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")
        source.sql(f"INSERT INTO {name} VALUES (1, 10), (2, 20)")
        source.tables.append(contract(name, ("id", "v")))
    return source


def capture_with(source: SourceUnderTest, after_early: Callable[[], None]) -> None:
    """Capture up to now; ``after_early`` is called when the snapshot is done with ``early``."""

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and batch.chunk.boundary and batch.chunk.table == "early":
            after_early()

    capture = Capture(source.settings, source.home, Contracts(tuple(source.tables)), landed)
    capture.run(current_wal_lsn(source.dsn), threading.Event())


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        pytest.param("ALTER TABLE late ALTER COLUMN v TYPE bigint", ROWS, id="rewritten"),
        pytest.param("TRUNCATE late", {}, id="truncated"),
        pytest.param(
            "DROP TABLE late; CREATE TABLE late (id int PRIMARY KEY, v int);"
            " INSERT INTO late VALUES (1, 10), (2, 20);",
            ROWS,
            id="made anew",
        ),
    ],
)
def test_a_table_rewritten_under_the_snapshot_is_not_landed_as_read_but_read_again(
    two_tables: SourceUnderTest, statement: str, left: dict[str, dict[str, str]]
) -> None:
    with pytest.raises(SourceUnavailable, match=r"public\.late was rewritten") as refused:
        capture_with(two_tables, lambda: two_tables.sql(statement))
    assert "Start capture again" in refused.value.fix
    assert not any(batch.chunk and batch.chunk.table == "late" for batch in two_tables.manifests())

    two_tables.catch_up()
    events = two_tables.events()
    assert folded(events, "late") == left
    assert folded(events, "early") == ROWS


def test_a_column_renamed_under_the_snapshot_is_named_and_read_at_the_next_start(
    two_tables: SourceUnderTest,
) -> None:
    two_tables.sql("ALTER TABLE late ADD COLUMN more int")
    with pytest.raises(SourceUnavailable, match=r'late cannot be read .*: column "more" does not exist'):
        capture_with(two_tables, lambda: two_tables.sql("ALTER TABLE late RENAME COLUMN more TO other"))
    two_tables.catch_up()
    assert set(folded(two_tables.events(), "late")['["1"]']) == {"id", "v", "other"}


def test_a_table_altered_without_a_rewrite_is_read_as_it_was(two_tables: SourceUnderTest) -> None:
    capture_with(two_tables, lambda: two_tables.sql("ALTER TABLE late ADD COLUMN more int DEFAULT 7"))
    assert folded(two_tables.events(), "late") == ROWS


def test_partitions_are_looked_at_one_by_one(two_tables: SourceUnderTest) -> None:
    two_tables.sql(
        "DROP TABLE late",
        "CREATE TABLE late (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE late_1 PARTITION OF late FOR VALUES FROM (0) TO (2)",
        "CREATE TABLE late_2 PARTITION OF late FOR VALUES FROM (2) TO (9)",
        "INSERT INTO late VALUES (1, 10), (2, 20)",
    )
    with pytest.raises(SourceUnavailable, match=r"public\.late was rewritten"):
        capture_with(two_tables, lambda: two_tables.sql("TRUNCATE late_2"))
    two_tables.catch_up()
    assert folded(two_tables.events(), "late") == {'["1"]': {"id": "1", "v": "10"}}
