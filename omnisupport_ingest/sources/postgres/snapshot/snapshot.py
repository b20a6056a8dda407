"""Snapshots of tables: every row as an ``r`` event, read in chunks, in parallel and without blocking writers.

Each chunk is read by its own short transaction. The position of its rows is the chunk's safe low watermark
(``safe_watermark``): whatever commits above it arrives by the stream and overrides the row. So chunks may be
read at different times, the source may be written meanwhile, and its vacuum is not held back. The snapshot
end of a table has the lowest of these watermarks, below all rows of the snapshot; it ends every older life
that no chunk found.

Plan and landing together say which chunks are missing. After a crash, a pause or a restart, a snapshot
continues with those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.manifest import ChunkSpan
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.landing.snapshot_plans import (
    SCHEMA_ONLY,
    SnapshotPlan,
    SnapshotPlans,
    newest_of_each,
    plans_in_force,
)
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.relations import (
    CatalogRelation,
    hold_readable,
    read_relation,
    read_storage,
    readable,
)
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.safe_watermark import SafeWatermarks, read_mark
from omnisupport_ingest.sources.postgres.session.server import wal_clock
from omnisupport_ingest.sources.postgres.slot.slot import flush_wal
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import (
    ChunkReader,
    Ordinals,
    RateLimit,
    ReadContext,
    Stopped,
)
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import ComparedReading, LakeRows, Recovered
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import (
    CTID,
    CutBy,
    columns_to_cut_by,
    conditions,
    cut,
    kinds_of,
)
from omnisupport_ingest.sources.postgres.snapshot.parallel_reading import KeyChangeReading, ParallelReading
from omnisupport_ingest.sources.postgres.snapshot.partition_watch import PartitionWatch
from omnisupport_ingest.sources.postgres.snapshot.requests import DueSnapshots, SnapshotRequests, Wanted
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch

_log = logging.getLogger(__name__)


class Snapshots:
    """The snapshots of one source in one epoch.

    The publication must cover the tables, because whatever commits above a chunk's watermark arrives by the
    stream.
    """

    def __init__(self, epoch: CapturedEpoch, tables: Sequence[TableContract]) -> None:
        """``epoch.landed`` is called on the thread that read the batch."""
        self._of, self._tables = epoch, tuple(tables)
        self._epoch, self._store, self._settings = epoch.number, epoch.store, epoch.settings
        self._key_changes = KeyChangeReading(epoch)
        self._partitions = PartitionWatch(epoch, self._tables)
        folder = epoch.store.folder
        self._plans, self._requests = SnapshotPlans(folder), SnapshotRequests(folder)
        first_reads = epoch.settings.snapshot_mode.reads_rows
        self._due = DueSnapshots(epoch.store, epoch.number, self._tables, first_reads=first_reads)

    @property
    def requested(self) -> bool:
        """Whether a person has requested a snapshot that is not planned yet. Reads only a folder."""
        requested = {request.table for request in self._requests.read()}
        return bool(requested & {table.name for table in self._tables})

    def add_tables(self, tables: Sequence[TableContract]) -> None:
        """Read ``tables`` too from now on. The stream must land their changes with their contracts' keys."""
        self._tables += tuple(tables)
        self._partitions.add_tables(tables)
        self._due.add_tables(tables)

    def take(self, stop: threading.Event) -> Lsn | None:
        """Read the snapshots that are due; return the LSN that the stream must pass for them to be complete.

        None if nothing was due, or ``stop`` was set first. Raises the errors of reading and landing a chunk;
        chunks that have landed stay.
        """
        wanted = self._due.now()
        if not wanted:
            return None
        self._key_changes.settled = False
        context = self._context()
        planned = []
        with closing(self._of.connect()) as connection:
            # Before the requests are removed, because an accepted table counts as published again.
            whole = {each.table.name for each in wanted if each.plan is None and each.scope is None}
            self._of.published.accept(connection, whole)
            self._of.schemas.accept(whole)
            for each in wanted:
                plan = self._planned(connection, each, context.ordinals, stop)
                if plan is None:
                    return None
                planned.append((each.table, plan))
        high = ParallelReading(self._of, context, planned).run(stop)
        if high is not None:
            self._flush(high)
        return high

    def recover(
        self, table: TableContract, lake: LakeRows, reason: str, stop: threading.Event
    ) -> Recovered | None:
        """Read only the chunks of ``table`` in which ``lake``, which has all earlier epochs, differs.

        None if ``stop`` was set first; the next ``take`` then reads the whole table, as after an error.
        Raises as ``take`` does, and ``TableMissedChanges`` if a table has been published differently since
        the epoch began.
        """
        context = self._context()
        requests = tuple(each for each in self._requests.read() if each.table == table.name)
        wanted = Wanted(table, None, reason, answers=requests)
        with closing(self._of.connect()) as connection:
            # If the row filter changed, rows that it now leaves out would never be ended.
            self._of.published.require_same(connection)
            # What has changed by now is answered by the comparison, which reads every row.
            self._of.schemas.look(connection)
            plan = self._planned(connection, wanted, context.ordinals, stop, compared=True)
            if plan is None:
                return None
            reader = ChunkReader(connection, context, stop)
            try:
                recovered = ComparedReading(reader, context, self._of.landed).run(table, plan, lake)
            except Stopped:
                return None
        end = self._store.read(plan.boundary_id).chunk
        assert end is not None
        # Of a change since the epoch began nobody has decided, where the contract wants a decision.
        if not self._of.schemas.blocked([table]):
            self._of.schemas.accept({table.name})
        self._flush(end.high)
        return recovered

    @property
    def settled(self) -> bool:
        """Whether ``read_moved`` has nothing to do until ``take`` reads something."""
        return self._key_changes.settled

    def read_moved(self, stop: threading.Event) -> Lsn | None:
        """Read rows again whose key changed while their table was read, if the stream lacks columns of them.

        Only for tables whose snapshot the stream has passed. Call it until it returns None. Returns and
        raises as ``take`` does.
        """
        plans = plans_in_force(self._plans.all(self._epoch))
        high = self._key_changes.run(self._tables, plans, self._context, stop)
        if high is not None:
            self._flush(high)
        return high

    @property
    def watches_partitions(self) -> bool:
        """Whether any table may have partitions to compare."""
        return self._partitions.needed

    def look_at_partitions(self, stop: threading.Event) -> Lsn | None:
        """Read new partitions as chunks of their own; request the whole table if rows left with a partition.

        Returns and raises as ``take`` does.
        """
        plans = newest_of_each(self._plans.all(self._epoch))
        # A chunk that is added before the search for key changes ends would make that search begin too late.
        high = self._partitions.look(plans, self._context if self._key_changes.settled else None, stop)
        if high is not None:
            for plan in plans.values():
                self._key_changes.search_again(plan.snapshot_id)
            self._flush(high)
        return high

    def _flush(self, high: Lsn) -> None:
        """Make the server flush its WAL up to ``high``; otherwise the stream does not pass it."""
        with closing(self._of.connect()) as connection:
            if wal_clock(connection).flushed < high:
                flush_wal(self._of.dsn)

    def _context(self) -> ReadContext:
        return ReadContext(
            self._settings.publication,
            self._store,
            self._of.grid,
            SafeWatermarks(),
            Ordinals(self._store, self._epoch),
            RateLimit(self._settings.snapshot_rows_per_second),
            self._settings.snapshot_fetch_bytes,
            self._settings.max_row_bytes,
            self._of.start,
        )

    def land_schemas(self, connection: Connection) -> None:
        """Land the schema of each table that has none in this epoch yet, in a batch without rows."""
        for table in self._tables:
            batch_id = chunk_batch_id(self._epoch, SCHEMA_ONLY, table.name, 0, 1)
            if self._store.exists(batch_id):
                continue
            mark = read_mark(connection)
            relation = read_relation(connection, self._settings.publication, table)
            with BatchWriter(self._store, self._of.grid, self._epoch, batch_id) as writer:
                span = ChunkSpan(SCHEMA_ONLY, table.name, 0, 1, mark.lsn, mark.lsn, mark.clock)
                self._of.landed(writer.seal(chunk=span, relations=(relation.version(table),)))

    def _planned(
        self,
        connection: Connection,
        wanted: Wanted,
        ordinals: Ordinals,
        stop: threading.Event,
        *,
        compared: bool = False,
    ) -> SnapshotPlan | None:
        """Return the plan to read by, which is durable; None if ``stop`` was set before it was made."""
        table, plan, scope = wanted.table, wanted.plan, wanted.scope
        try:
            if not _begin(connection, table, stop):
                return None
            relation = read_relation(connection, self._settings.publication, table)
            storage = read_storage(connection, table.table_name)
            if plan is not None and _still_fits(plan, relation, table, storage):
                return plan
            if scope is not None and not _fits(scope, relation, table):
                _log.warning(
                    "%s is read as a whole: its key is not what it was when a range of it was requested",
                    table.full_name,
                )
                scope = None
            by = columns_to_cut_by(connection, table.table_name, table.key, partitioned=relation.partitioned)
            into = CutBy(by, _types(by, relation), self._settings.snapshot_chunk_rows)
            partitions = self._partitions.planned(connection, table)
            only = () if scope is None else conditions(table, relation, scope)
            bounds = []
            with readable(table):
                for bound in cut(connection, table, relation, into, only):
                    if stop.is_set():
                        return None
                    bounds.append(bound)
        finally:
            with source_errors("ending a transaction"), connection.cursor() as cursor:
                cursor.execute("ROLLBACK")
        # Taken before the ordinals of the rows: the snapshot end must not end the lives of its own rows.
        ordinal = ordinals.take()
        new_plan = SnapshotPlan(
            snapshot_id=f"{ordinal & 0xFFFFFFFFFFFF:012x}",
            epoch=self._epoch,
            table=table.name,
            reason=wanted.reason,
            planned_at=datetime.now(UTC),
            boundary_ordinal=ordinal,
            rows=into.rows,
            by=into.by,
            types=into.types,
            bounds=tuple(bounds),
            compared=compared,
            scope=scope,
            storage=storage if by == (CTID,) else None,
        )
        self._plans.write(new_plan)
        if scope is None:
            self._partitions.will_be_read(table, partitions)
        for request in wanted.answers:
            self._requests.clear(request)
        return new_plan


def _begin(connection: Connection, table: TableContract, stop: threading.Event) -> bool:
    """Begin a transaction in which ``table`` can be read. Return False if ``stop`` was set first."""
    while not stop.is_set():
        with source_errors(f"planning the snapshot of {table.full_name}"), connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if hold_readable(connection, table):
                return True
            cursor.execute("ROLLBACK")
    return False


def _types(by: Sequence[str], relation: CatalogRelation) -> tuple[str, ...]:
    type_of = dict(zip(relation.columns, relation.types, strict=True)) | {CTID: "tid"}
    return tuple(type_of[name] for name in by)


def _fits(scope: KeyRange, relation: CatalogRelation, table: TableContract) -> bool:
    """Whether the key still begins with columns of the kinds that ``scope`` has bounds for."""
    columns = table.key[: len(scope.kinds)]
    return set(columns) <= set(relation.columns) and kinds_of(relation, columns) == scope.kinds


def _still_fits(plan: SnapshotPlan, relation: CatalogRelation, table: TableContract, storage: str) -> bool:
    """Whether the table can still be cut as planned: by the same key with the same types; or by ctid, if the
    table has not been rewritten since."""
    if plan.by == (CTID,) and plan.storage != storage:
        return False
    if plan.scope is not None and not _fits(plan.scope, relation, table):
        return False
    if plan.by not in ((), (CTID,)) and set(plan.by) != set(table.key):
        return False
    return set(plan.by) <= {*relation.columns, CTID} and _types(plan.by, relation) == plan.types
