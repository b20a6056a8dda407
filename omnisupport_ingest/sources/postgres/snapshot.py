"""Snapshots of tables: every row as an ``r`` event, read in chunks, in parallel and without locks.

Each chunk is read by a transaction of its own, which is short, and stands at its own safe low watermark
(``safe_watermark``): whatever commits above it comes by the stream and overrides the row. So chunks need
not be of one moment, the source goes on being written, and no old row version is held back there. The
table's boundary, at the lowest of these watermarks and below all of its rows, ends every older life that
no chunk found. What is still to be read is told by the plan and by what has landed: after a crash, a pause
or a restart a snapshot goes on with the chunks that are missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.moved_rows import moved_rows
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.snapshot_plans import (
    SCHEMA_ONLY,
    SnapshotPlan,
    SnapshotPlans,
    newest_of_each,
)
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.chunk_reader import ChunkReader, Landing, Stopped
from omnisupport_ingest.sources.postgres.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.key_ranges import PLACE, columns_to_cut_by, cut
from omnisupport_ingest.sources.postgres.ordinals import Ordinals
from omnisupport_ingest.sources.postgres.pace import Pace
from omnisupport_ingest.sources.postgres.relations import CatalogRelation, read_relation
from omnisupport_ingest.sources.postgres.safe_watermark import SafeWatermarks, read_mark
from omnisupport_ingest.sources.postgres.server import wal_clock
from omnisupport_ingest.sources.postgres.slot import flush_wal
from omnisupport_ingest.sources.postgres.snapshot_requests import SnapshotRequests
from omnisupport_ingest.windows import WindowGrid

FIRST_READ = "first read in this epoch"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A table to read: by ``plan`` if it has one that is not finished, else by a new one, for ``reason``."""

    table: TableContract
    plan: SnapshotPlan | None
    reason: str


class Snapshots:
    """The snapshots of one source in one epoch.

    The publication must cover the tables: what commits above a chunk's watermark comes by the stream.
    """

    def __init__(
        self,
        dsn: str,
        store: LandingStore,
        grid: WindowGrid,
        epoch: EpochRecord,
        tables: Sequence[TableContract],
        settings: Settings,
        landed: Callable[[Manifest], None],
    ) -> None:
        """``landed`` is called with each batch, once durable, on the thread that read it."""
        self._dsn, self._store, self._epoch, self._tables = dsn, store, epoch.number, tuple(tables)
        self._start = epoch.facts.consistent_point if epoch.facts else Lsn(0)
        self._settings, self._landed, self._grid = settings, landed, grid
        self._settled: set[str] = set()
        self._plans, self._requests = SnapshotPlans(store.folder), SnapshotRequests(store.folder)

    def due(self) -> list[_Wanted]:
        """The tables to read now: begun and not finished, asked for, or not read in this epoch."""
        plans = newest_of_each(self._plans.all(self._epoch))
        asked = self._requests.read()
        read = {
            chunk.table
            for chunk in (self._store.read(name).chunk for name in self._boundaries())
            if chunk is not None
        }
        found = []
        for table in self._tables:
            plan = plans.get(table.name)
            if plan is not None and self._store.exists(plan.boundary_id):
                plan = None
            if table.name in asked:
                found.append(_Wanted(table, None, asked[table.name]))
            elif plan is not None:
                found.append(_Wanted(table, plan, plan.reason))
            elif self._settings.snapshot_mode.reads_rows and table.name not in read:
                found.append(_Wanted(table, None, FIRST_READ))
        return found

    def take(self, stop: threading.Event) -> Lsn | None:
        """Read what is due; returns the LSN that the stream must pass for it to be whole.

        Null if nothing was due, or ``stop`` came first. Raises what reading or landing a chunk raises:
        the chunks that have landed stay.
        """
        wanted = self.due()
        if not wanted:
            return None
        landing = self._landing()
        with closing(connect(self._dsn)) as connection:
            planned = [(each.table, self._planned(connection, each, landing.ordinals)) for each in wanted]
        reading = _Reading(self._dsn, landing, planned, self._landed, self._settings.snapshot_threads)
        high = reading.run(stop)
        if high is not None:
            self._have_flushed(high)
        return high

    def read_moved(self, stop: threading.Event) -> Lsn | None:
        """Read again the rows whose keys changed while their table was read, where the stream lacks columns.

        For tables whose snapshot the stream has passed; to be called until it finds nothing, as a row may
        move on. Returns and raises as ``take`` does.
        """
        highest: Lsn | None = None
        for table in self._tables:
            plan = newest_of_each(self._plans.all(self._epoch)).get(table.name)
            if plan is None or plan.snapshot_id in self._settled or not self._store.exists(plan.boundary_id):
                continue
            batches = [each for each in self._store.landed().batches if each.epoch == self._epoch]
            chunks = [
                each.chunk
                for each in batches
                if each.chunk is not None
                and each.chunk.snapshot_id == plan.snapshot_id
                and not each.chunk.boundary
            ]
            high = max(chunk.high for chunk in chunks)
            if max((each.stream.end_lsn for each in batches if each.stream), default=Lsn(0)) < high:
                continue
            again = [chunk for chunk in chunks if chunk.chunk >= plan.chunks]
            # Rows read again stand where the search before them ended.
            since = max(chunk.low for chunk in again) if again else min(chunk.low for chunk in chunks)
            moved = moved_rows(self._store, batches, table.schema, table.table, since, high)
            if not moved:
                self._settled.add(plan.snapshot_id)
                continue
            number = plan.chunks + len(again)
            with closing(connect(self._dsn)) as connection:
                reader = ChunkReader(connection, self._landing(), stop)
                try:
                    batch = reader.read_keys(table, plan, number, moved, high)
                except Stopped:
                    return None
            self._landed(batch)
            assert batch.chunk is not None
            highest = max(highest or Lsn(0), batch.chunk.high)
        if highest is not None:
            self._have_flushed(highest)
        return highest

    def _have_flushed(self, high: Lsn) -> None:
        with closing(connect(self._dsn)) as connection:
            if wal_clock(connection).flushed < high:
                flush_wal(self._dsn)

    def _landing(self) -> Landing:
        return Landing(
            self._store,
            self._grid,
            SafeWatermarks(),
            Ordinals(self._store, self._epoch),
            Pace(self._settings.snapshot_rows_per_second),
            self._settings.snapshot_fetch_bytes,
            self._start,
        )

    def land_schemas(self, connection: Connection) -> None:
        """Land the form of each table that this epoch has none of yet, in a batch without rows."""
        for table in self._tables:
            batch_id = chunk_batch_id(self._epoch, SCHEMA_ONLY, table.name, 0, 1)
            if self._store.exists(batch_id):
                continue
            mark = read_mark(connection)
            relation = read_relation(connection, table.schema, table.table)
            with BatchWriter(self._store, self._grid, self._epoch, batch_id) as writer:
                span = ChunkSpan(SCHEMA_ONLY, table.name, 0, 1, mark.lsn, mark.lsn, mark.clock)
                self._landed(writer.seal(chunk=span, relations=(relation.version(table),)))

    def _boundaries(self) -> list[str]:
        prefix = f"e{self._epoch:06d}-r-"
        return [
            name for name in self._store.batch_ids() if name.startswith(prefix) and name.endswith("-boundary")
        ]

    def _planned(self, connection: Connection, wanted: _Wanted, ordinals: Ordinals) -> SnapshotPlan:
        table, plan = wanted.table, wanted.plan
        with source_errors(f"planning the snapshot of {table.full_name}"), connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            relation = read_relation(connection, table.schema, table.table)
            if plan is not None and _still_fits(plan, relation):
                return plan
            by = columns_to_cut_by(
                connection, table.schema, table.table, table.key, partitioned=relation.partitioned
            )
            types = _types(by, relation)
            rows = self._settings.snapshot_chunk_rows
            bounds = cut(connection, table.schema, table.table, relation, by, types, rows)
        finally:
            with source_errors("ending a transaction"), connection.cursor() as cursor:
                cursor.execute("ROLLBACK")
        # Taken before any row's: the boundary must end older lives, not those of its rows.
        ordinal = ordinals.take()
        made = SnapshotPlan(
            snapshot_id=f"{ordinal & 0xFFFFFFFFFFFF:012x}",
            epoch=self._epoch,
            table=table.name,
            reason=wanted.reason,
            planned_at=datetime.now(UTC),
            boundary_ordinal=ordinal,
            rows=rows,
            by=by,
            types=types,
            bounds=bounds,
        )
        self._plans.write(made)
        self._requests.clear(table.name)
        return made


class _Reading:
    """Chunks of some tables, read by several threads until none is left."""

    def __init__(
        self,
        dsn: str,
        landing: Landing,
        planned: Sequence[tuple[TableContract, SnapshotPlan]],
        landed: Callable[[Manifest], None],
        threads: int,
    ) -> None:
        self._dsn, self._landing, self._landed = dsn, landing, landed
        exists = landing.store.exists
        self._left = deque(
            (table, plan, chunk)
            for table, plan in planned
            for chunk in range(plan.chunks)
            if not exists(plan.batch_id(chunk))
        )
        self._missing = {
            plan.snapshot_id: sum(not exists(plan.batch_id(chunk)) for chunk in range(plan.chunks))
            for _, plan in planned
        }
        # Those whose last chunk landed just before the end of an earlier process.
        self._ended = [(table, plan) for table, plan in planned if not self._missing[plan.snapshot_id]]
        self._threads = max(1, min(threads, len(self._left)))
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._high = Lsn(0)

    def run(self, stop: threading.Event) -> Lsn | None:
        for table, plan in self._ended:
            self._end(table, plan)
        workers = [
            threading.Thread(target=self._work, name=f"snapshot-{number}") for number in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        # The caller's stop may look at files; it is asked here alone.
        while any(worker.is_alive() for worker in workers):
            if stop.is_set():
                self._over.set()
            workers[0].join(0.1) if workers[0].is_alive() else threading.Event().wait(0.02)
        if self._failure is not None:
            raise self._failure
        return None if self._over.is_set() else self._high

    def _work(self) -> None:
        try:
            with closing(connect(self._dsn)) as connection:
                reader = ChunkReader(connection, self._landing, self._over)
                while (task := self._next()) is not None:
                    table, plan, chunk = task
                    self._done(table, plan, reader.read(table, plan, chunk))
        except Stopped:
            pass
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self._over.set()

    def _next(self) -> tuple[TableContract, SnapshotPlan, int] | None:
        with self._lock:
            return self._left.popleft() if self._left and not self._over.is_set() else None

    def _done(self, table: TableContract, plan: SnapshotPlan, batch: Manifest) -> None:
        self._tell(batch)
        with self._lock:
            self._missing[plan.snapshot_id] -= 1
            last = not self._missing[plan.snapshot_id]
        if last:
            self._end(table, plan)

    def _end(self, table: TableContract, plan: SnapshotPlan) -> None:
        """Land the boundary: every chunk has landed."""
        landing = self._landing
        found = [landing.store.read(plan.batch_id(chunk)).chunk for chunk in range(plan.chunks)]
        chunks = [chunk for chunk in found if chunk is not None]
        lowest = min(chunks, key=lambda chunk: chunk.low)
        high = max(chunk.high for chunk in chunks)
        event = LandedEvent(
            plan.epoch, lowest.low.value, plan.boundary_ordinal, "b", lowest.clock, None, None,
            table.schema, table.table, None, None, None, None, None, None,
        )  # fmt: skip
        with BatchWriter(landing.store, landing.grid, plan.epoch, plan.boundary_id) as writer:
            writer.add(event)
            span = ChunkSpan(
                plan.snapshot_id,
                table.name,
                plan.chunks,
                1,
                lowest.low,
                high,
                lowest.clock,
                boundary=True,
            )
            batch = writer.seal(chunk=span)
        with self._lock:
            self._high = max(self._high, high)
        self._tell(batch)

    def _tell(self, batch: Manifest) -> None:
        with self._lock:
            self._landed(batch)


def _types(by: Sequence[str], relation: CatalogRelation) -> tuple[str, ...]:
    of = dict(zip(relation.columns, relation.types, strict=True)) | {PLACE: "tid"}
    return tuple(of[name] for name in by)


def _still_fits(plan: SnapshotPlan, relation: CatalogRelation) -> bool:
    """Whether the table can still be cut as planned: its key may have been renamed or retyped."""
    known = {*relation.columns, PLACE}
    return set(plan.by) <= known and _types(plan.by, relation) == plan.types
