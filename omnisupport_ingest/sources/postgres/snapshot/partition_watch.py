"""Keeping the lake right about rows that came or left with their partition, which no change in the stream
tells.

Rows of a new partition are read as one more chunk of the table's snapshot. Where rows may have left, the
whole table is read again: only a snapshot end ends rows that nobody has deleted. Between the last look and
that read the lake may differ from the source; that stretch is recorded first.
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
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import (
    ChunkReader,
    Landing,
    PlannedChunk,
    Stopped,
)
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import source_of_rows
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshot.safe_watermark import (
    REMEMBER_SECONDS,
    CatalogLooks,
    read_high,
)
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch

_log = logging.getLogger(__name__)


class PartitionWatch:
    """Compares the partitions of the tables of one epoch with those at the last look."""

    def __init__(self, epoch: CapturedEpoch, tables: Sequence[TableContract]) -> None:
        self.needed = True
        """Whether any of the tables was partitioned at the last look."""
        self._epoch, self._store = epoch, epoch.store
        self._tables = {each.table_name: each for each in tables}
        self._records = PartitionRecords(epoch.store.folder, epoch.number)
        self._requests = SnapshotRequests(epoch.store.folder)
        self._lost, self._looks = epoch.published.lost, CatalogLooks()
        self._certain, self._written = dict[str, Lsn](), dict[str, float]()

    def add_tables(self, tables: Sequence[TableContract]) -> None:
        """Watch ``tables`` too from now on."""
        self._tables |= {each.table_name: each for each in tables}
        self.needed = True

    def planned(self, connection: Connection, table: TableContract) -> Partitions | None:
        """Return the partitions that a snapshot under planning will read; None if there are none."""
        name = table.table_name
        return read_partitions(connection, [name]).get(name)

    def will_be_read(self, table: TableContract, partitions: Partitions | None) -> None:
        """Record ``partitions``: the plan of the snapshot that reads them is durable."""
        if partitions is not None:
            # A later look is certain of at least as much as an earlier one.
            self._records.write(table.name, self._known(table, partitions, Lsn(0)))

    def look(
        self,
        plans: Mapping[str, SnapshotPlan],
        landing: Callable[[], Landing] | None,
        stop: threading.Event,
    ) -> Lsn | None:
        """Compare, request what has to be read whole, and read new partitions.

        ``plans``: those of this epoch by table; a table without one is incomplete anyway. Without
        ``landing``, new partitions are left to a later look. Returns the highest LSN that a read saw; None if
        nothing was read or ``stop`` came.
        """
        tables = {name: each for name, each in self._tables.items() if each.name in plans}
        if not tables:
            return None
        highs: list[Lsn] = []
        with closing(self._epoch.connect()) as connection:
            certain = self._looks.begin(connection)
            trees = read_partitions(connection, tables)
            looked = read_high(connection)
            self.needed = bool(trees)
            for name, now in trees.items():
                table = tables[name]
                try:
                    read = self._settle(connection, table, plans[table.name], now, landing, stop)
                except Stopped:
                    return None
                if read is None:
                    continue
                highs += read
                # Also for a partition that left again before its rows were read.
                self._lost.was_mended(table.name, max(read, default=looked))
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
        """Record that nothing is left to do for ``now``; an unchanged state is written only at intervals."""
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
        landing: Callable[[], Landing] | None,
        stop: threading.Event,
    ) -> list[Lsn] | None:
        """Act on the difference between ``now`` and the record; None if something is left to do.

        Returns the highest LSNs that the reads saw.
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
            if condition is None or not self._any(connection, table, condition):
                continue
            new = now[oid].name
            self._lost.add(
                table.name, f"partition {new} came with rows", self._certain_of(table), whole=False
            )
            if landing is None:
                return None
            _log.info("reading partition %s, which is new in %s", new, table.full_name)
            reader = ChunkReader(connection, landing(), stop)
            chunk = PlannedChunk(table, plan, plan.chunks + self._read_more(plan))
            batch = reader.read_more(chunk, condition)
            self._epoch.landed(batch)
            if batch.chunk is not None:
                highs.append(batch.chunk.high)
        return highs

    def _read_more(self, plan: SnapshotPlan) -> int:
        """Return how many chunks have been added to the snapshot since its end."""
        count = 0
        while self._store.exists(plan.batch_id(plan.chunks + count)):
            count += 1
        return count

    def _any(self, connection: Connection, table: TableContract, condition: str) -> bool:
        relation = read_relation(connection, self._epoch.settings.publication, table)
        name = source_of_rows(table.table_name, relation)
        with source_errors(f"looking into a partition of {table.full_name}"), connection.cursor() as cursor:
            cursor.execute(f"SELECT EXISTS (SELECT FROM {name}{condition})")
            (exists,) = cursor.fetchone()
        return bool(exists)
