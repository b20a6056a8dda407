"""Reading one chunk of a table's snapshot, exact while the table is being written, into one batch.

The ordinals of snapshot events are negative, and each is given once per epoch. A pace limits the rows per
second of a snapshot over all its connections.
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
from omnisupport_ingest.contracts.row_checksum import RowChecksum
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
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copied_rows, copy_lines, rows_of
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge, TableUnreadable
from omnisupport_ingest.sources.postgres.session.quoting import identifier
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
from omnisupport_ingest.sources.postgres.snapshot.safe_watermark import (
    Mark,
    SafeWatermarks,
    read_high,
    read_mark,
    read_visibility,
)
from omnisupport_ingest.windows import WindowGrid

_log = logging.getLogger(__name__)


FIRST_ORDINAL = -(1 << 48)
"""Ordinals of snapshot events count up from here, so they stay negative: below every change."""


class Ordinals:
    """The ordinals of one epoch. They only grow, so a row that is read again is a later event and never a
    collision. Thread-safe.
    """

    def __init__(self, store: LandingStore, epoch: int) -> None:
        """Continue above what has landed or was given to a plan in ``epoch``."""
        standings = (each for each in store.epoch_standings() if each.epoch == epoch)
        used = [each.chunk_ordinal for each in standings if each.chunk_ordinal is not None]
        used += [plan.boundary_ordinal for plan in SnapshotPlans(store.folder).all(epoch)]
        self._lock = threading.Lock()
        self._next = max(used, default=FIRST_ORDINAL - 1) + 1

    def take(self, count: int = 1) -> int:
        """Return the first of ``count`` consecutive ordinals."""
        with self._lock:
            first = self._next
            self._next += count
        return first


class Pace:
    """Limits the rows per second of a snapshot; ``rows_per_second`` None sets no limit. Thread-safe."""

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
"""Bytes that an event costs beside its line; an estimate."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """What the ``r`` events of one read of ``table`` share: its ``columns``, their position and time."""

    table: TableContract
    columns: tuple[str, ...]
    chunk_id: str
    epoch: int
    lsn: Lsn
    clock: datetime

    def events(self, lines: bytes, first_ordinal: int) -> pa.Table:
        """Return the events of COPY's ``lines`` (one or more) as a table of ``EVENT_SCHEMA``."""
        key = [self.columns.index(name) for name in self.table.key]
        copied = copied_rows(lines, self.columns, key)
        count = len(copied.keys)
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
    """Writes the lines of ``chunk`` to ``writer``. ``ordinals`` returns the first of so many ordinals."""

    def __init__(self, chunk: SnapshotChunk, writer: BatchWriter, ordinals: Callable[[int], int]) -> None:
        self._chunk, self._writer, self._ordinals = chunk, writer, ordinals

    def add(self, lines: bytes) -> int:
        """Write one or more rows; return how many."""
        count, clock = rows_of(lines), self._chunk.clock
        table = partial(self._chunk.events, lines, self._ordinals(count))
        size = len(lines) + _OVERHEAD * count
        self._writer.add_block(EventBlock(self._writer.window_of(clock), count, size, clock, table))
        return count


T = TypeVar("T")


_RETRY_SECONDS = 0.2
_SILENT_SECONDS = 5.0
"""Seconds that the wait for transactions under way lasts before it is logged."""

_SEQUENTIAL_CHUNKS = 2
"""No chunk of a table that is cut into more chunks may be read by a sequential scan."""


class Stopped(Exception):
    """Raised when the caller stops in the middle of a chunk. Nothing of the chunk has landed."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where chunks land, and what all readers share.

    ``publication``: the rows and columns that it sends are read. ``start``: where the stream of the epoch
    begins. The stream has to land something above it before it can show that it has passed a chunk.
    """

    publication: str
    store: LandingStore
    grid: WindowGrid
    marks: SafeWatermarks
    ordinals: Ordinals
    pace: Pace
    block_bytes: int
    max_row_bytes: int
    start: Lsn


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Chunk ``number`` of ``table``, as ``plan`` cuts it. Numbers from ``plan.chunks`` on are chunks added
    later.
    """

    table: TableContract
    plan: SnapshotPlan
    number: int

    @property
    def bounds(self) -> tuple[Bound | None, Bound | None]:
        """The bounds: keys above the first, up to and with the second; None is open. An added chunk has
        none.
        """
        return self.plan.range_of(self.number) if self.number < self.plan.chunks else (None, None)

    @property
    def batch_id(self) -> str:
        return self.plan.batch_id(self.number)

    def span(self, low: Lsn, high: Lsn, clock: datetime, *, scope: KeyRange | None = None) -> ChunkSpan:
        """Return what the manifest records of the chunk."""
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
class LookedAt:
    """A read of a chunk that lands nothing: ``low`` and ``clock`` of its safe low watermark, ``high``, and
    the schema of the table.
    """

    low: Lsn
    high: Lsn
    clock: datetime
    relation: RelationVersion


class ChunkReader:
    """Reads chunks on one connection, one after the other."""

    def __init__(self, connection: Connection, landing: Landing, stop: threading.Event) -> None:
        """``connection`` is in autocommit, and used by this reader alone."""
        self._connection, self._landing, self._stop = connection, landing, stop

    def read(self, chunk: PlannedChunk) -> Manifest:
        """Land the rows of ``chunk``.

        Raises ``Stopped``; ``SourceUnavailable`` if the server goes away; ``TableUnreadable``,
        ``RowTooLarge``, ``PreflightFailed`` for faults of its table alone.
        """
        table, plan = chunk.table, chunk.plan
        others: tuple[str, ...] = ()
        if plan.scope is not None:
            others = conditions(table, self._relation(table), plan.scope)
        return self._land(chunk, where(plan.by, plan.types, *chunk.bounds, others))

    def read_text(self, chunk: PlannedChunk, path: Path) -> LookedAt:
        """Write the rows of ``chunk`` to a file by ``write_text_rows``. Raises as ``read`` does."""

        def read(rows: str) -> None:
            write_text_rows(self._connection, chunk.table, rows, path, fetched=self._keep_pace)

        looked_at, _ = self._look(chunk, read)
        return looked_at

    def read_checksum(self, chunk: PlannedChunk) -> tuple[LookedAt, RowChecksum]:
        """Let the server work out the checksum of the rows of ``chunk``. Raises as ``read`` does."""

        def read(rows: str) -> RowChecksum:
            checksum = server_checksum(self._connection, chunk.table, rows)
            self._keep_pace(checksum.rows)
            return checksum

        return self._look(chunk, read)

    def _look(self, chunk: PlannedChunk, read: Callable[[str], T]) -> tuple[LookedAt, T]:
        """Call ``read`` with the rows of ``chunk``, as they stand behind FROM."""
        table, plan = chunk.table, chunk.plan
        mark = self._begin(table, plan, None)
        try:
            self._require_storage(table, plan)
            high = self._high()
            relation = self._relation(table)
            name = source_of_rows(table.table_name, relation)
            with readable(table), source_errors(f"reading {table.full_name}"):
                content = read(f"{name}{where(plan.by, plan.types, *chunk.bounds)}")
            return LookedAt(mark.lsn, high, mark.clock, relation.version(table)), content
        finally:
            self._end()

    def read_keys(self, chunk: PlannedChunk, keys: Collection[str], at: Lsn) -> Manifest:
        """Land the rows of ``keys`` (JSON arrays) again, at the position ``at``, once that is safe."""
        return self._land(chunk, where_key(chunk.table, self._types(chunk.table), keys), at=at)

    def read_more(self, chunk: PlannedChunk, condition: str) -> Manifest:
        """Land the rows that meet ``condition`` as ``chunk``, added to a finished snapshot."""
        return self._land(chunk, condition)

    def _relation(self, table: TableContract) -> CatalogRelation:
        return read_relation(self._connection, self._landing.publication, table)

    def _types(self, table: TableContract) -> tuple[str, ...]:
        relation = self._relation(table)
        type_of = dict(zip(relation.columns, relation.types, strict=True))
        return tuple(type_of[name] for name in table.key)

    def _land(self, chunk: PlannedChunk, condition: str, *, at: Lsn | None = None) -> Manifest:
        table, plan = chunk.table, chunk.plan
        mark = self._begin(table, plan, at)
        low = mark.lsn if at is None else at
        landing = self._landing
        try:
            if chunk.bounds != (None, None):
                self._require_storage(table, plan)
            high = self._high()
            relation = self._relation(table)
            about = SnapshotChunk(
                table,
                relation.columns,
                f"{plan.snapshot_id}-{table.name}-{chunk.number:06d}",
                plan.epoch,
                low,
                mark.clock,
            )
            with BatchWriter(landing.store, landing.grid, plan.epoch, chunk.batch_id) as writer:
                self._copy(table, relation, condition, SnapshotRows(about, writer, landing.ordinals.take))
                span = chunk.span(low, high, mark.clock, scope=plan.scope)
                return writer.seal(chunk=span, relations=(relation.version(table),))
        finally:
            self._end()

    def _copy(
        self, table: TableContract, relation: CatalogRelation, condition: str, rows: SnapshotRows
    ) -> None:
        landing = self._landing

        def add(lines: bytes) -> None:
            if self._stop.is_set():
                raise Stopped
            self._keep_pace(rows.add(lines))

        listed = ", ".join(identifier(column) for column in relation.columns)
        name = source_of_rows(table.table_name, relation)
        with readable(table):
            try:
                copy_lines(
                    self._connection,
                    f"SELECT {listed} FROM {name}{condition}",
                    doing=f"reading {table.full_name}",
                    block_bytes=landing.block_bytes,
                    max_row_bytes=landing.max_row_bytes,
                    lines=add,
                )
            except RowTooLarge as error:
                raise RowTooLarge(error.size, error.limit, table.full_name) from None
        if self._stop.is_set():
            raise Stopped

    def _keep_pace(self, rows: int) -> None:
        self._landing.pace.take(rows, self._stop)
        if self._stop.is_set():
            raise Stopped

    def _high(self) -> Lsn:
        return max(read_high(self._connection), Lsn(self._landing.start.value + 1))

    def _begin(self, table: TableContract, plan: SnapshotPlan, at: Lsn | None) -> Mark:
        """Open the transaction that reads ``table``; return a mark, at or above ``at``, that is safe for
        it.
        """
        began, logged = time.monotonic(), False
        while not self._stop.is_set():
            own = read_mark(self._connection)
            known = self._landing.marks.offer(own)
            if not self._open(table, plan):
                self._end()
                if not logged:
                    logged = True
                    _log.warning("the snapshot waits for a lock on %s that somebody holds", table.full_name)
                continue
            sees = read_visibility(self._connection)
            mark = self._landing.marks.newest_safe(known, sees)
            if mark is not None and (at is None or mark.lsn >= at):
                return mark
            self._end()
            if not logged and time.monotonic() - began > _SILENT_SECONDS:
                logged = True
                _log.warning(
                    "the snapshot waits for transactions that were under way when it began: %s",
                    self._named(sees.unfinished(own.holders)),
                )
            self._stop.wait(_RETRY_SECONDS)
        raise Stopped

    def _open(self, table: TableContract, plan: SnapshotPlan) -> bool:
        """Begin a read; False if somebody holds a lock on the table: end it and try again."""
        with source_errors(f"opening {table.full_name}"), self._connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            by_index = plan.scope is not None and plan.by not in ((), (CTID,))
            if plan.chunks > _SEQUENTIAL_CHUNKS or by_index:
                cursor.execute("SET LOCAL enable_seqscan = off")
            # Held before the snapshot is taken: TRUNCATE and the ALTER TABLE that rewrites heed no
            # older snapshot (PostgreSQL manual, "Caveats" of concurrency control), so a read through
            # one would find nothing.
            return hold_readable(self._connection, table)

    def _require_storage(self, table: TableContract, plan: SnapshotPlan) -> None:
        """Refuse a chunk by ctid if the table was rewritten, which moves rows past it. The lock is held."""
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
        short = {each % (1 << 32) for each in ids}
        waited_for = [each for each in open_transactions(self._connection) if each.ids & short]
        return listed(waited_for) or "none any more"
