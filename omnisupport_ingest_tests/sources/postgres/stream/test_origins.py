"""Transactions that came to the source by replication, from an origin: captured as all others are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")


@pytest.fixture
def notes(source: SourceUnderTest) -> Iterator[SourceUnderTest]:
    """A source that has an origin of its name, captured up to now."""
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, v text)", "INSERT INTO notes VALUES (1, 'old')")
    source.sql(f"SELECT pg_replication_origin_create('{source.slot}')")
    source.tables.append(contract("notes", COLUMNS))
    source.catch_up()
    yield source
    source.sql(f"SELECT pg_replication_origin_drop('{source.slot}')")


def from_origin(source: SourceUnderTest, at: datetime | None, *statements: str) -> None:
    """A transaction as an apply worker commits it: with its place and time at the origin."""
    with source.connected() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_replication_origin_session_setup(%s)", (source.slot,))
        cursor.execute("BEGIN")
        for statement in statements:
            cursor.execute(statement)
        if at is not None:
            cursor.execute("SELECT pg_replication_origin_xact_setup('0/AABBCC', %s)", (at,))
        cursor.execute("COMMIT")
        cursor.execute("SELECT pg_replication_origin_session_reset()")


def last_with_rows(source: SourceUnderTest) -> Manifest:
    return [each for each in source.manifests() if each.stream and each.rows][-1]


def test_transaction_of_an_origin_lands_between_the_others_with_positions_of_this_server(
    notes: SourceUnderTest,
) -> None:
    notes.sql("INSERT INTO notes VALUES (2, 'here')")
    from_origin(
        notes, None, "INSERT INTO notes VALUES (3, 'there')", "UPDATE notes SET v = 'there' WHERE id = 1"
    )
    notes.sql("DELETE FROM notes WHERE id = 2")
    notes.catch_up()
    changes = notes.changes()
    assert [(event.op, event.key) for event in changes] == [
        ("c", '["2"]'), ("c", '["3"]'), ("u", '["1"]'), ("d", '["2"]'),
    ]  # fmt: skip
    positions = [(event.commit_lsn, event.ordinal) for event in changes]
    assert positions == sorted(positions)
    assert folded(notes.events(), "notes") == notes.rows("notes", COLUMNS)


def test_commit_time_of_an_origin_is_the_time_of_the_event_and_its_window(notes: SourceUnderTest) -> None:
    """PostgreSQL sends it in place of its own. The order of the log is not that of these times."""
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
    notes.sql("UPDATE notes SET v = 'here' WHERE id = 1")
    from_origin(notes, at, "UPDATE notes SET v = 'there, and later here' WHERE id = 1")
    notes.killed_at("landing.manifest.after")
    watermark = last_with_rows(notes).arrival.watermark
    notes.sql("INSERT INTO notes VALUES (2, 'after')")
    # It is the last one, so it is the proof of continuity.
    notes.catch_up()
    here, there, after = notes.changes()
    assert there.source_ts == at < here.source_ts < after.source_ts
    assert here.commit_lsn < there.commit_lsn < after.commit_lsn
    windows = {file.window for each in notes.manifests() if each.stream for file in each.files}
    assert notes.home.grid.key_of(at, datetime.now(UTC)) in windows
    assert watermark is not None and watermark > at
    assert folded(notes.events(), "notes") == notes.rows("notes", COLUMNS)
