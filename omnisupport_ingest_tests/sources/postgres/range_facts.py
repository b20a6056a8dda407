"""Asking for ranges of a table's keys, and what has landed of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import key_range
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

Keys = Sequence[str] | None


def scope_of(source: SourceUnderTest, table: TableContract, start: Keys, end: Keys) -> KeyRange:
    with closing(connect(source.dsn)) as connection:
        return key_range(connection, source.slot, table, start, end)


def ask(source: SourceUnderTest, start: Keys, end: Keys, number: int = 0) -> KeyRange:
    """Ask for keys of a table."""
    table = source.tables[number]
    scope = scope_of(source, table, start, end)
    assert SnapshotRequests(source.store.folder).write(table.name, "a test", scope)
    return scope


def lose(source: SourceUnderTest, *statements: str) -> None:
    """Have ``statements`` happen where nobody captures them, and that accepted."""
    source.sql(f"SELECT pg_drop_replication_slot('{source.slot}')", *statements)
    source.capture().begin_new_epoch("a test", loss_accepted_by="the tests")


def ranged(source: SourceUnderTest) -> list[Manifest]:
    """The batches of snapshots of ranges."""
    return [batch for batch in source.manifests() if batch.chunk is not None and batch.chunk.scope]
