"""Detects that partitions were attached, detached, dropped or truncated, which the stream does not report.

The rows of a new partition are read as one more chunk of the table's snapshot. If rows may have left with a
partition, the whole table is read again, because only a snapshot end can end rows without a delete. Between
the last check and that read, the lake may differ from the source; this period is first recorded as missed
changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partitions import (
    KnownPartitions,
    PartitionRecords,
    Partitions,
    difference,
    read_partitions,
    rows_of,
)
from omnisupport_ingest.sources.postgres.catalog.relations import read_relation
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.safe_watermark import (
    REMEMBER_SECONDS,
    CatalogWatermarks,
    read_high,
)
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import (
    ChunkReader,
    PlannedChunk,
    ReadContext,
    Stopped,
)
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import source_of_rows
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch

_log = logging.getLogger(__name__)


class PartitionWatch:
    """Compares the partitions of one epoch's tables with the partitions at the last check."""

    def __init__(self, epoch: CapturedEpoch, tables: Sequence[TableContract]) -> None:
        self.needed = True
        """Whether any of the tables was partitioned at the last check."""
        self._epoch, self._store = epoch, epoch.store
        self._tables = {each.table_name: each for each in tables}
        self._records = PartitionRecords(epoch.store.folder, epoch.number)
        self._requests = SnapshotRequests(epoch.store.folder)
        self._lost, self._watermarks = epoch.published.lost, CatalogWatermarks()
        self._certain, self._written = dict[str, Lsn](), dict[str, float]()

    def add_tables(self, tables: Sequence[TableContract]) -> None:
        """Watch ``tables`` too from now on."""
        self._tables |= {each.table_name: each for each in tables}
        self.needed = True

    def planned(self, connection: Connection, table: TableContract) -> Partitions | None:
        """Return the partitions that a snapshot being planned will read; None if not partitioned."""
        name = table.table_name
        return read_partitions(connection, [name]).get(name)

    def will_be_read(self, table: TableContract, partitions: Partitions | None) -> None:
        """Record ``partitions``. Call it when the plan of the snapshot that reads them is durable."""
        if partitions is not None:
            # The next check reads a watermark; until then the older record's watermark stays.
            self._records.write(table.name, self._known(table, partitions, Lsn(0)))

    def look(
        self,
        plans: Mapping[str, SnapshotPlan],
        context: Callable[[], ReadContext] | None,
        stop: threading.Event,
    ) -> Lsn | None:
        """Compare; request tables that must be read whole, and read new partitions.

        ``plans``: the plans of this epoch by table; a table without a plan is incomplete anyway. ``context``:
        None leaves new partitions to a later check. Returns the highest LSN that a read saw; None if nothing
        was read, or ``stop`` was set.
        """
        tables = {name: each for name, each in self._tables.items() if each.name in plans}
        if not tables:
            return None
        highs: list[Lsn] = []
        with closing(self._epoch.connect()) as connection:
            certain = self._watermarks.next(connection)
            trees = read_partitions(connection, tables)
            checked = read_high(connection)
            self.needed = bool(trees)
            for name, now in trees.items():
                table = tables[name]
                try:
                    read = self._settle(connection, table, plans[table.name], now, context, stop)
                except Stopped:
                    return None
                if read is None:
                    continue
                highs += read
                # Even if nothing was read, for example because the partition had left again.
                self._lost.was_mended(table.name, max(read, default=checked))
                self._seen(table, self._known(table, now, certain))
        return max(highs, default=None)

    def _certain_of(self, table: TableContract) -> Lsn:
        known = self._records.read(table.name)
        return max(self._certain.get(table.name, Lsn(0)), Lsn(0) if known is None else known.certain)

    def _known(self, table: TableContract, now: Partitions, certain: Lsn) -> KnownPartitions:
        known, before = self._records.read(table.name), self._certain_of(table)
        certain = max(certain, before)
        if known is None:
            return KnownPartitions(now, certain)
        if known.partitions == now and not known.since and not known.left:
            return replace(known, certain=certain)
        last = self._store.last_stream(self._epoch.number)
        read_to = last.stream.end_lsn if last is not None and last.stream is not None else Lsn(0)
        return known.followed_by(now, before, certain, read_to)

    def _seen(self, table: TableContract, now: KnownPartitions) -> None:
        """Record that ``now`` is settled. An unchanged state is written only at intervals."""
        self._certain[table.name] = now.certain
        known, written = self._records.read(table.name), self._written.get(table.name)
        if (
            known is None
            or known.partitions != now.partitions
            or written is None
            or time.monotonic() - written >= REMEMBER_SECONDS
        ):
            if known != now:
                self._records.write(table.name, now)
            self._written[table.name] = time.monotonic()

    def _settle(
        self,
        connection: Connection,
        table: TableContract,
        plan: SnapshotPlan,
        now: Partitions,
        context: Callable[[], ReadContext] | None,
        stop: threading.Event,
    ) -> list[Lsn] | None:
        """Act on the difference between ``now`` and the record.

        Returns the highest LSN that each read saw; None if a later check must finish this.
        """
        known = self._records.read(table.name)
        changes = difference(now if known is None else known.partitions, now)
        if changes.left:
            reason = f"partition {', '.join(changes.left)}"
            _log.warning("%s is read again, as %s", table.full_name, reason)
            self._lost.add(table.name, reason, self._certain_of(table))
            self._requests.write(table.name, reason)
            return []
        highs = []
        for oid in changes.new:
            condition = rows_of(connection, oid)
            if condition is None or not self._has_rows(connection, table, condition):
                continue
            new = now[oid].name
            self._lost.add(
                table.name, f"partition {new} came with rows", self._certain_of(table), whole=False
            )
            if context is None:
                return None
            _log.info("reading partition %s, which is new in %s", new, table.full_name)
            reader = ChunkReader(connection, context(), stop)
            chunk = PlannedChunk(table, plan, plan.chunks + self._added_chunks(plan))
            batch = reader.read_more(chunk, condition)
            self._epoch.landed(batch)
            if batch.chunk is not None:
                highs.append(batch.chunk.high)
        return highs

    def _added_chunks(self, plan: SnapshotPlan) -> int:
        """Return how many chunks have been added to the snapshot since its end."""
        count = 0
        while self._store.exists(plan.batch_id(plan.chunks + count)):
            count += 1
        return count

    def _has_rows(self, connection: Connection, table: TableContract, condition: str) -> bool:
        relation = read_relation(connection, self._epoch.settings.publication, table)
        name = source_of_rows(table.table_name, relation)
        with source_errors(f"looking into a partition of {table.full_name}"), connection.cursor() as cursor:
            cursor.execute(f"SELECT EXISTS (SELECT FROM {name}{condition})")
            (exists,) = cursor.fetchone()
        return bool(exists)
