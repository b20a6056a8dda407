"""Reads one chunk of a table's snapshot into one batch, exactly, while the table is being written.

The ordinals of snapshot events are negative, and each is used only once per epoch. ``RateLimit`` limits the
rows per second of a snapshot over all its connections.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import RowChecksum, as_compared
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest, RelationVersion
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan, SnapshotPlans
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.relations import (
    CatalogRelation,
    hold_readable,
    read_relation,
    read_storage,
    readable,
)
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copied_rows, copy_lines
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation, RowTooLarge, TableUnreadable
from omnisupport_ingest.sources.postgres.session.quoting import identifier
from omnisupport_ingest.sources.postgres.session.safe_watermark import (
    Mark,
    SafeWatermarks,
    read_high,
    read_mark,
    read_visibility,
)
from omnisupport_ingest.sources.postgres.session.server import listed, open_transactions
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import server_checksum, write_text_rows
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import (
    CTID,
    Bound,
    conditions,
    source_of_rows,
    where,
    where_key,
)
from omnisupport_ingest.windows import WindowGrid

_log = logging.getLogger(__name__)


FIRST_ORDINAL = -(1 << 48)
"""The first ordinal of snapshot events. They count up from here and stay negative, so below every change."""


class Ordinals:
    """Gives out the ordinals of one epoch. They only increase, so a row that is read again is a later event,
    never a collision. Thread-safe."""

    def __init__(self, store: LandingStore, epoch: int) -> None:
        """Begin above all ordinals of landed events and plans of ``epoch``."""
        standings = (each for each in store.epoch_standings() if each.epoch == epoch)
        used = [each.chunk_ordinal for each in standings if each.chunk_ordinal is not None]
        used += [plan.boundary_ordinal for plan in SnapshotPlans(store.folder).all(epoch)]
        self._lock = threading.Lock()
        self._next = max(used, default=FIRST_ORDINAL - 1) + 1

    def take(self, count: int = 1) -> int:
        """Reserve ``count`` consecutive ordinals; return the first of them."""
        with self._lock:
            first = self._next
            self._next += count
        return first


class RateLimit:
    """Limits the rows per second of a snapshot. ``rows_per_second``: None for no limit. Thread-safe."""

    def __init__(self, rows_per_second: int | None) -> None:
        self._rate = rows_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, rows: int, stop: threading.Event) -> None:
        """Wait until ``rows`` more rows are within the limit, or ``stop`` is set."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + rows / self._rate
            free_at = self._free_at
        while not stop.is_set() and (seconds_left := free_at - time.monotonic()) > 0:
            time.sleep(min(seconds_left, 0.1))


_OVERHEAD = 100
"""Estimated bytes of an event in addition to its line."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """The columns, position and time that all events (``r``) of one read of ``table`` share."""

    table: TableContract
    columns: tuple[str, ...]
    chunk_id: str
    epoch: int
    lsn: Lsn
    clock: datetime

    def events(self, lines: Lines, first_ordinal: int) -> pa.Table:
        """Return the events of ``lines`` (one or more) as a table of ``EVENT_SCHEMA``."""
        key = [self.columns.index(name) for name in self.table.key]
        copied = copied_rows(lines, self.columns, key)
        count = len(copied.keys)
        if count != lines.rows:
            raise ProtocolViolation(
                f"{lines.rows} messages of a COPY of {self.table.full_name} held {count} rows.",
                fix="PostgreSQL sends one row in each. See what stands between this machine and the server "
                "(a proxy, a pooler).",
            )
        of_each = {
            "ordinal": pa.array(np.arange(first_ordinal, first_ordinal + count)),
            "key": copied.keys,
            "after": copied.images,
        }
        of_all = {
            "epoch": self.epoch,
            "commit_lsn": self.lsn.value,
            "op": "r",
            "source_ts": self.clock,
            "source_schema": self.table.schema,
            "source_table": self.table.table,
            "chunk_id": self.chunk_id,
        }
        arrays = [
            of_each[each.name]
            if each.name in of_each
            else pa.repeat(pa.scalar(of_all.get(each.name), each.type), count)
            for each in EVENT_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)


class SnapshotRows:
    """Writes lines of ``chunk`` to ``writer``. ``ordinals``: reserves a number of them, returns the first."""

    def __init__(self, chunk: SnapshotChunk, writer: BatchWriter, ordinals: Callable[[int], int]) -> None:
        self._chunk, self._writer, self._ordinals = chunk, writer, ordinals

    def add(self, lines: Lines) -> int:
        """Write ``lines`` (one or more); return the number of rows."""
        count, clock = lines.rows, self._chunk.clock
        table = partial(self._chunk.events, lines, self._ordinals(count))
        size = lines.size + _OVERHEAD * count
        self._writer.add_block(EventBlock(self._writer.window_of(clock), count, size, clock, table))
        return count


T = TypeVar("T")


_RETRY_SECONDS = 0.2
_SILENT_SECONDS = 5.0
"""Seconds after which waiting for open transactions is logged."""

_SEQUENTIAL_CHUNKS = 2
"""If a table is cut into more chunks than this, its chunks are not read by sequential scans."""


class Stopped(Exception):
    """Raised when the caller stops in the middle of a chunk. Nothing of the chunk has landed."""


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Everything that all readers of an epoch's chunks share.

    ``publication``: decides which rows and columns are read. ``block_bytes``: bytes of rows that are handled
    at a time. ``max_row_bytes``: a longer row raises ``RowTooLarge``. ``start``: where the stream of the
    epoch begins. Every chunk is given an end above it: the stream shows that it has passed a chunk only by
    landing something above ``start``.
    """

    publication: str
    store: LandingStore
    grid: WindowGrid
    marks: SafeWatermarks
    ordinals: Ordinals
    rate_limit: RateLimit
    block_bytes: int
    max_row_bytes: int
    start: Lsn


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Chunk ``number`` of ``table``, as ``plan`` cuts it; one from ``plan.chunks`` on was added later."""

    table: TableContract
    plan: SnapshotPlan
    number: int

    @property
    def bounds(self) -> tuple[Bound | None, Bound | None]:
        """The bounds of the chunk's keys: above the first, up to and including the second; None: unbounded.

        Both are None for a chunk that was added later.
        """
        return self.plan.range_of(self.number) if self.number < self.plan.chunks else (None, None)

    @property
    def batch_id(self) -> str:
        return self.plan.batch_id(self.number)

    def span(self, low: Lsn, high: Lsn, clock: datetime, *, scope: KeyRange | None = None) -> ChunkSpan:
        """Return what the manifest records about the chunk."""
        start, end = (None if bound is None else json.dumps(bound) for bound in self.bounds)
        return ChunkSpan(
            self.plan.snapshot_id,
            self.table.name,
            self.number,
            1,
            low,
            high,
            clock,
            start,
            end,
            scope=scope,
        )


@dataclass(frozen=True, slots=True)
class UnlandedRead:
    """A read of a chunk that lands nothing.

    ``low`` and ``clock``: its safe low watermark. ``high``: an LSN above everything that it saw.
    ``relation``: the schema of the table.
    """

    low: Lsn
    high: Lsn
    clock: datetime
    relation: RelationVersion


@dataclass(frozen=True, slots=True)
class StreamMoment:
    """An LSN of the past at which rows are read again, and a time at which the server had not passed it yet.

    The clock of the read itself is later than that of transactions that committed above ``lsn`` meanwhile.
    """

    lsn: Lsn
    clock: datetime


class ChunkReader:
    """Reads chunks on one connection, one after the other."""

    def __init__(self, connection: Connection, context: ReadContext, stop: threading.Event) -> None:
        """``connection`` must be in autocommit and used by this reader alone."""
        self._connection, self._context, self._stop = connection, context, stop

    def read(self, chunk: PlannedChunk) -> Manifest:
        """Land the rows of ``chunk``; return the batch.

        Raises ``Stopped``; ``SourceUnavailable`` if the server goes away; ``TableUnreadable``,
        ``RowTooLarge`` or ``PreflightFailed`` for faults of its table alone.
        """
        table, plan = chunk.table, chunk.plan
        others: tuple[str, ...] = ()
        if plan.scope is not None:
            others = conditions(table, self._relation(table), plan.scope)
        return self._land(chunk, where(plan.by, plan.types, *chunk.bounds, others))

    def read_text(self, chunk: PlannedChunk, path: Path) -> UnlandedRead:
        """Write the rows of ``chunk``, ``as_compared``, with ``write_text_rows``. Raises as ``read`` does."""
        contract = as_compared(chunk.table)

        def read(rows: str) -> None:
            write_text_rows(self._connection, contract, rows, path, fetched=self._limit_rate)

        unlanded, _ = self._read_unlanded(chunk, read)
        return unlanded

    def read_checksum(self, chunk: PlannedChunk) -> tuple[UnlandedRead, RowChecksum]:
        """Return the server's checksum of the rows of ``chunk``. Raises as ``read`` does."""

        def read(rows: str) -> RowChecksum:
            checksum = server_checksum(self._connection, chunk.table, rows)
            self._limit_rate(checksum.rows)
            return checksum

        return self._read_unlanded(chunk, read)

    def _read_unlanded(self, chunk: PlannedChunk, read: Callable[[str], T]) -> tuple[UnlandedRead, T]:
        """Call ``read`` with the SQL that follows FROM for ``chunk``; return the read and its result."""
        table, plan = chunk.table, chunk.plan
        mark = self._begin(table, plan, None)
        try:
            self._require_storage(table, plan)
            high = self._high()
            relation = self._relation(table)
            name = source_of_rows(table.table_name, relation)
            with readable(table), source_errors(f"reading {table.full_name}"):
                content = read(f"{name}{where(plan.by, plan.types, *chunk.bounds)}")
            return UnlandedRead(mark.lsn, high, mark.clock, relation.version(table)), content
        finally:
            self._end()

    def read_keys(self, chunk: PlannedChunk, keys: Collection[str], at: StreamMoment) -> Manifest:
        """Land the rows with ``keys`` (JSON arrays) again, at ``at``, when that LSN is safe."""
        return self._land(chunk, where_key(chunk.table, self._types(chunk.table), keys), at=at)

    def read_more(self, chunk: PlannedChunk, condition: str) -> Manifest:
        """Land the rows that meet ``condition`` (WHERE clause) as ``chunk`` of a finished snapshot."""
        return self._land(chunk, condition)

    def _relation(self, table: TableContract) -> CatalogRelation:
        return read_relation(self._connection, self._context.publication, table)

    def _types(self, table: TableContract) -> tuple[str, ...]:
        relation = self._relation(table)
        type_of = dict(zip(relation.columns, relation.types, strict=True))
        return tuple(type_of[name] for name in table.key)

    def _land(self, chunk: PlannedChunk, condition: str, *, at: StreamMoment | None = None) -> Manifest:
        table, plan = chunk.table, chunk.plan
        mark = self._begin(table, plan, None if at is None else at.lsn)
        low, clock = (mark.lsn, mark.clock) if at is None else (at.lsn, at.clock)
        context = self._context
        try:
            if chunk.bounds != (None, None):
                self._require_storage(table, plan)
            span = chunk.span(low, self._high(), clock, scope=plan.scope)
            relation = self._relation(table)
            about = SnapshotChunk(
                table,
                relation.columns,
                span.id,
                plan.epoch,
                low,
                clock,
            )
            with BatchWriter(context.store, context.grid, plan.epoch, chunk.batch_id) as writer:
                self._copy(table, relation, condition, SnapshotRows(about, writer, context.ordinals.take))
                return writer.seal(chunk=span, relations=(relation.version(table),))
        finally:
            self._end()

    def _copy(
        self, table: TableContract, relation: CatalogRelation, condition: str, rows: SnapshotRows
    ) -> None:
        context = self._context

        def add(lines: Lines) -> None:
            if self._stop.is_set():
                raise Stopped
            self._limit_rate(rows.add(lines))

        listed = ", ".join(identifier(column) for column in relation.columns)
        name = source_of_rows(table.table_name, relation)
        with readable(table):
            try:
                copy_lines(
                    self._connection,
                    f"SELECT {listed} FROM {name}{condition}",
                    doing=f"reading {table.full_name}",
                    block_bytes=context.block_bytes,
                    max_row_bytes=context.max_row_bytes,
                    lines=add,
                )
            except RowTooLarge as error:
                raise RowTooLarge(error.size, error.limit, table.full_name) from None
        if self._stop.is_set():
            raise Stopped

    def _limit_rate(self, rows: int) -> None:
        self._context.rate_limit.take(rows, self._stop)
        if self._stop.is_set():
            raise Stopped

    def _high(self) -> Lsn:
        return max(read_high(self._connection), Lsn(self._context.start.value + 1))

    def _begin(self, table: TableContract, plan: SnapshotPlan, at: Lsn | None) -> Mark:
        """Open the transaction that reads ``table``; return a mark at or above ``at`` that is safe for it."""
        began, logged = time.monotonic(), False
        while not self._stop.is_set():
            own = read_mark(self._connection)
            known = self._context.marks.offer(own)
            if not self._open(table, plan):
                self._end()
                if not logged:
                    logged = True
                    _log.warning(
                        "the snapshot waits for a lock on %s that another session holds", table.full_name
                    )
                continue
            sees = read_visibility(self._connection)
            mark = self._context.marks.newest_safe(known, sees)
            if mark is not None and (at is None or mark.lsn >= at):
                return mark
            self._end()
            if not logged and time.monotonic() - began > _SILENT_SECONDS:
                logged = True
                _log.warning(
                    "the snapshot waits for transactions that were open when it began: %s",
                    self._named(sees.unfinished(own.holders)),
                )
            self._stop.wait(_RETRY_SECONDS)
        raise Stopped

    def _open(self, table: TableContract, plan: SnapshotPlan) -> bool:
        """Begin a read. Return False if another session holds a lock on the table; then end it and retry."""
        with source_errors(f"opening {table.full_name}"), self._connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            by_index = plan.scope is not None and plan.by not in ((), (CTID,))
            if plan.chunks > _SEQUENTIAL_CHUNKS or by_index:
                cursor.execute("SET LOCAL enable_seqscan = off")
            # Lock the table before the snapshot is taken. After a TRUNCATE or a rewriting ALTER TABLE, a read
            # by an older snapshot finds no rows (PostgreSQL manual, "Caveats" of concurrency control).
            return hold_readable(self._connection, table)

    def _require_storage(self, table: TableContract, plan: SnapshotPlan) -> None:
        """Raise ``TableUnreadable`` for a chunk by ctid if the table was rewritten, which changes the ctids.

        The caller must hold the lock on the table.
        """
        if plan.by != (CTID,):
            return
        if read_storage(self._connection, table.table_name) != plan.storage:
            raise TableUnreadable(
                f"Table {table.full_name} was rewritten (VACUUM FULL, CLUSTER, ALTER TABLE …) while it was "
                "read by ctid, as its key has no index.",
                fix="Start capture again (the platform does so by itself): the table is read anew. A unique "
                "index on the key columns of its contract makes it be read by the key.",
                table=table.full_name,
            )

    def _end(self) -> None:
        if not self._connection.closed:
            with source_errors("ending a read"), self._connection.cursor() as cursor:
                cursor.execute("ROLLBACK")

    def _named(self, ids: frozenset[int]) -> str:
        """Describe the open transactions with ``ids`` (64-bit) for a message."""
        short = {each % (1 << 32) for each in ids}
        waited_for = [each for each in open_transactions(self._connection) if each.ids & short]
        return listed(waited_for) or "none any more"
