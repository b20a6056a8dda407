"""The snapshot of tables: the rows that a table held at one exact point of the log.

A temporary slot exports a snapshot that sees what committed below its consistent point and nothing
else. So every row read is an ``r`` event at that point, overridden by whatever commits above it,
and the table's boundary, below its rows, ends every older life that the read did not find.

A table is one chunk. A table whose boundary has not landed in this epoch is read again as a whole,
at a later point; cutting tables into chunks that resume on their own is for a later version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest, RelationVersion
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.connect_errors import first_line
from omnisupport_ingest.sources.postgres.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.copy_rows import copy_lines
from omnisupport_ingest.sources.postgres.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.quoting import literal
from omnisupport_ingest.sources.postgres.relations import read_relation, was_rewritten
from omnisupport_ingest.sources.postgres.server import wal_clock
from omnisupport_ingest.sources.postgres.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot_rows import SnapshotChunk, SnapshotRows
from omnisupport_ingest.windows import WindowGrid

FIRST_ORDINAL = -(1 << 48)
"""Ordinals of snapshot events count up from here, so they stay negative: below every change."""


class _Stopped(Exception):
    """The caller asked to stop in the middle of a table."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Where and when a snapshot stands."""

    snapshot_id: str
    lsn: Lsn
    clock: datetime


def tables_to_snapshot(
    store: LandingStore, epoch: int, tables: Sequence[TableContract]
) -> list[TableContract]:
    """The tables whose snapshot has not been finished in ``epoch``."""
    finished = {
        manifest.chunk.table
        for manifest in _chunk_batches(store, epoch)
        if manifest.chunk is not None and manifest.chunk.boundary
    }
    return [table for table in tables if table.name not in finished]


def take_snapshot(
    dsn: str,
    store: LandingStore,
    grid: WindowGrid,
    epoch: int,
    tables: Sequence[TableContract],
    stop: threading.Event,
    landed: Callable[[Manifest], None],
) -> None:
    """Land every row of ``tables`` and their boundaries; ends early when ``stop`` is set.

    The publication must cover the tables already: what commits above the snapshot's point comes by
    the stream. ``landed`` is called with each batch.
    """
    with consistent_snapshot(dsn) as (lsn, name):
        connection = connect(dsn)
        try:
            with source_errors("opening the exported snapshot"), connection.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                cursor.execute(f"SET TRANSACTION SNAPSHOT {literal(name)}")
            point = _Point(f"{lsn.value:016x}", lsn, wal_clock(connection).clock)
            reader = _TableReader(connection, store, grid, epoch, point, stop)
            for table in tables:
                for batch in reader.read(table):
                    landed(batch)
        except _Stopped:
            return
        finally:
            connection.close()


class _TableReader:
    """Reads whole tables within one open snapshot."""

    def __init__(
        self,
        connection: Connection,
        store: LandingStore,
        grid: WindowGrid,
        epoch: int,
        point: _Point,
        stop: threading.Event,
    ) -> None:
        self._connection, self._store, self._grid = connection, store, grid
        self._epoch, self._point, self._stop = epoch, point, stop
        self._next_ordinal = next_ordinal(store, epoch)

    def read(self, table: TableContract) -> tuple[Manifest, Manifest]:
        """Land the rows of ``table`` and then its boundary."""
        # The boundary takes its ordinal before the rows do: it must end older lives, not theirs.
        boundary_ordinal = self._take_ordinal()
        chunk = self._land_rows(table)
        event = LandedEvent(
            self._epoch, self._point.lsn.value, boundary_ordinal, "b", self._point.clock, None, None,
            table.schema, table.table, None, None, None, None, None, None,
        )  # fmt: skip
        with self._writer(table, boundary=True) as writer:
            writer.add(event)
            return chunk, writer.seal(chunk=self._span(table, boundary=True))

    def _land_rows(self, table: TableContract) -> Manifest:
        relation = read_relation(self._connection, table.schema, table.table)
        names = relation.columns
        chunk_id = f"{self._point.snapshot_id}-{table.name}-{0:06d}"
        chunk = SnapshotChunk(table, names, chunk_id, self._epoch, self._point.lsn, self._point.clock)
        with self._writer(table, boundary=False) as writer:
            rows = SnapshotRows(chunk, writer, self._next_ordinal)

            def add(lines: bytes) -> None:
                if self._stop.is_set():
                    raise _Stopped
                rows.add(lines)

            if self._stop.is_set():
                raise _Stopped
            try:
                copy_lines(
                    self._connection,
                    table.schema,
                    table.table,
                    names,
                    partitioned=relation.partitioned,
                    lines=add,
                )
            except psycopg2.ProgrammingError as error:
                # The catalog of the snapshot names columns that a later ALTER TABLE has taken away.
                raise SourceUnavailable(
                    f"Table {table.full_name} cannot be read as the snapshot knows it: {first_line(error)}.",
                    fix="If it was altered just now, start capture again (the platform does so by itself): "
                    "it reads the table anew. If not, act on the message.",
                ) from error
            self._refuse_rewritten(table)
            self._next_ordinal = rows.next_ordinal
            version = RelationVersion(
                table.schema, table.table, names, relation.types, table.key, relation.replica_identity
            )
            return writer.seal(chunk=self._span(table, boundary=False), relations=(version,))

    def _refuse_rewritten(self, table: TableContract) -> None:
        if was_rewritten(self._connection, table.schema, table.table):
            raise SourceUnavailable(
                f"Table {table.full_name} was rewritten, truncated or made anew while the snapshot was being "
                "taken, so rows may be missing from what was read. It did not land.",
                fix="Start capture again (the platform does so by itself): it reads the table anew.",
            )

    def _take_ordinal(self) -> int:
        ordinal = self._next_ordinal
        self._next_ordinal += 1
        return ordinal

    def _writer(self, table: TableContract, *, boundary: bool) -> BatchWriter:
        batch_id = chunk_batch_id(self._epoch, self._point.snapshot_id, table.name, 0, 1, boundary=boundary)
        return BatchWriter(self._store, self._grid, self._epoch, batch_id)

    def _span(self, table: TableContract, *, boundary: bool) -> ChunkSpan:
        point = self._point
        return ChunkSpan(
            point.snapshot_id, table.name, 0, 1, point.lsn, point.lsn, point.clock, boundary=boundary
        )


def next_ordinal(store: LandingStore, epoch: int) -> int:
    """One above the highest ordinal of a landed snapshot event of ``epoch``.

    So the count only grows, and a row that is read again is a later event, never a collision.
    """
    used = (file.last.ordinal for manifest in _chunk_batches(store, epoch) for file in manifest.files)
    return max(used, default=FIRST_ORDINAL - 1) + 1


def _chunk_batches(store: LandingStore, epoch: int) -> list[Manifest]:
    prefix = f"e{epoch:06d}-r-"
    return [store.read(batch_id) for batch_id in store.batch_ids() if batch_id.startswith(prefix)]
