"""What a snapshot takes: as many sessions of the source as it is told to, and memory whatever the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    chunks,
    complete,
    following,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.sources.postgres.stream.test_huge_transaction import LIMIT_MB, Watched
from omnisupport_ingest_tests.waiting import until

ROW_BYTES = 4096
FEW, MANY = 12_500, 100_000
"""Rows of 51 MB and of 410 MB."""

GROWTH_MB = 40
"""How far two runs may differ: most by what happens to be on its way at a time."""


@pytest.fixture
def wide(source: SourceUnderTest) -> SourceUnderTest:
    """A source with an empty table for wide rows, which are as large for the server as they are for us."""
    source.sql(
        "CREATE TABLE tickets (id bigint PRIMARY KEY, v text)",
        "ALTER TABLE tickets ALTER COLUMN v SET STORAGE EXTERNAL",
    )
    source.tables.append(contract("tickets", COLUMNS))
    return source


def fill(source: SourceUnderTest, first: int, last: int) -> None:
    value = f"repeat(md5(g::text), {ROW_BYTES // 32})"
    source.sql(f"INSERT INTO tickets SELECT g, {value} FROM generate_series({first}, {last}) g")


def sessions_that_read(source: SourceUnderTest) -> set[int]:
    """Server processes that are at work on a chunk now.

    One that has sent all it was asked for is idle, though we may still be at work on that: so a chunk must
    be larger than what may be on its way.
    """
    rows = source.query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND query LIKE 'COPY (SELECT %tickets%'"
    )
    return {pid for (pid,) in rows}


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_are_read_at_a_time_by_as_many_sessions_as_there_are_threads(
    wide: SourceUnderTest, threads: int
) -> None:
    fill(wide, 1, 3_000)
    wide.overrides |= {
        "snapshot_threads": threads,
        "snapshot_chunk_rows": 250,
        "snapshot_fetch_bytes": 64 * 1024,
        "snapshot_rows_per_second": 2_000,
    }
    seen = list[set[int]]()

    def is_over() -> bool:
        seen.append(sessions_that_read(wide))
        return complete(wide)

    with following(wide):
        until(is_over)
    assert max(len(sessions) for sessions in seen) == threads
    # Each thread has one for all of its chunks.
    assert len(set().union(*seen)) == threads < len(chunks(wide))
    assert same_as_source(wide)


def peak_mb(source: SourceUnderTest, name: str, folder: Path) -> float:
    """The most memory of a process that captures ``source`` once, from nothing, into a home of its own."""
    slot = f"{source.slot}_{name}"
    once = SourceUnderTest(source.dsn, slot, folder / name, source.tables, source.overrides)
    with Watched(once, current_wal_lsn(once.dsn)) as capture:
        seconds = capture.wait(lambda: False, within=60)
        capture.end()
    ((rows,),) = source.query("SELECT count(*) FROM tickets")
    print(f"\n{rows:,} rows, {rows * ROW_BYTES / 1e6:.0f} MB: {seconds:.0f} s, {capture.peak_mb:.0f} MB")
    assert sum(batch.rows for batch in once.manifests() if batch.chunk and not batch.chunk.boundary) == rows
    assert capture.peak_mb > 0
    return capture.peak_mb


@pytest.mark.slow
@pytest.mark.parametrize("chunk_rows", [MANY, FEW // 5], ids=["in one chunk", "in chunks"])
def test_memory_does_not_grow_with_a_table(wide: SourceUnderTest, tmp_path: Path, chunk_rows: int) -> None:
    wide.overrides |= {"snapshot_chunk_rows": chunk_rows, "snapshot_fetch_bytes": 1024 * 1024}
    fill(wide, 1, FEW)
    of_few = peak_mb(wide, "few", tmp_path)
    fill(wide, FEW + 1, MANY)
    of_many = peak_mb(wide, "many", tmp_path)
    assert of_many < of_few + GROWTH_MB
    assert of_many < LIMIT_MB
