"""A source that is read twice, by both ways to read large transactions, and writers of those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

COLUMNS = ("id", "body", "tag")
LONG = "repeat(md5(random()::text), 100)"


class TwoReaders:
    """One database that is read twice: with transactions sent in progress, and all of them afterwards."""

    def __init__(self, source: SourceUnderTest, folder: Path) -> None:
        self.early = source
        source.overrides["stream_above_bytes"] = 64 * 1024
        self.late = SourceUnderTest(
            source.dsn, f"{source.slot}_late", folder / "late", source.tables, {"stream_transactions": False}
        )

    def catch_up(self) -> None:
        self.early.catch_up()
        self.late.catch_up()

    def assert_same(self) -> None:
        """Both have landed the same events up to the same transaction."""
        early, late = self.early.changes(), self.late.changes()
        assert early == late
        positions = [(event.commit_lsn, event.ordinal) for event in early]
        assert len(set(positions)) == len(positions)
        last = []
        for reader in (self.early, self.late):
            epoch = reader.store.current_epoch()
            assert epoch is not None
            last.append(end_of_chain(reader.store, epoch).last)
        assert last[0] == last[1] and last[0] is not None

    def sent_early(self) -> int:
        """How many transactions the server has sent, at least in part, before they committed."""
        ((early, late),) = self.early.query(
            "SELECT max(stream_txns) FILTER (WHERE slot_name = current_database()),"
            " max(stream_txns) FILTER (WHERE slot_name = current_database() || '_late')"
            " FROM pg_stat_replication_slots"
        )
        assert not late
        return int(early or 0)


def two_readers_of_notes(source: SourceUnderTest, folder: Path) -> TwoReaders:
    """Two readers of a table ``notes`` with a TOASTed column, both up to now."""
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, body text, tag text)",
        "ALTER TABLE notes ALTER COLUMN body SET STORAGE EXTERNAL",
    )
    source.tables.append(contract("notes", COLUMNS))
    readers = TwoReaders(source, folder)
    readers.catch_up()
    return readers


@contextmanager
def session(source: SourceUnderTest) -> Iterator[Connection]:
    """A session of a writer; what it has not committed is rolled back at the end."""
    with source.connected() as connection:
        yield connection


def run(connection: Connection, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def many(first: int, rows: int = 400, table: str = "notes") -> str:
    """Inserts enough that the server does not keep it in memory."""
    rows_of = f"generate_series({first}, {first + rows - 1})"
    return f"INSERT INTO {table} (id, body, tag) SELECT g, {LONG}, 'new' FROM {rows_of} g"
