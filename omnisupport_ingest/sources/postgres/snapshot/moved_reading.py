"""Reading again the rows whose keys changed while their table was being read (``landing.moved_rows``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.moved_rows import moved_rows
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.slot.same_server import connect_to_source
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import ChunkReader, Landing, Stopped


class MovedReading:
    """The search in the stream of one epoch, beside the snapshots whose chunks it adds to."""

    def __init__(
        self, dsn: str, store: LandingStore, epoch: EpochRecord, landed: Callable[[Manifest], None]
    ) -> None:
        self.settled = False
        """Whether the stream was searched for every snapshot that was told of."""
        self._dsn, self._store, self._of, self._landed = dsn, store, epoch, landed
        self._epoch = epoch.number
        self._searched: set[str] = set()

    def run(
        self,
        tables: Sequence[TableContract],
        plans: Sequence[SnapshotPlan],
        landing: Callable[[], Landing],
        stop: threading.Event,
    ) -> Lsn | None:
        """Read what has moved in tables with a snapshot (of ``plans``) that the stream has passed.

        Returns the highest LSN that was seen; null if nothing was read or ``stop`` came. To be called
        until it finds nothing, as a row may move on meanwhile.
        """
        of = {table.name: table for table in tables}
        left = [
            (of[plan.table], plan)
            for plan in plans
            if plan.table in of and plan.snapshot_id not in self._searched
        ]
        self.settled = not left
        passed = [(table, plan) for table, plan in left if self._has_passed(plan)]
        if not passed:
            return None
        chunks = [self._store.read(name) for name in self._store.batch_ids(chunk_prefix(self._epoch))]
        try:
            found = [self._read(table, plan, chunks, landing, stop) for table, plan in passed]
        except Stopped:
            return None
        self.settled = all(plan.snapshot_id in self._searched for _, plan in left)
        return max((high for high in found if high is not None), default=None)

    def search_again(self, snapshot_id: str) -> None:
        """One more chunk was read of a snapshot that was searched for already."""
        self._searched.discard(snapshot_id)
        self.settled = False

    def _has_passed(self, plan: SnapshotPlan) -> bool:
        """Whether the snapshot has landed, and the stream up to where it was read."""
        if not self._store.exists(plan.boundary_id):
            return False
        boundary, last = self._store.read(plan.boundary_id).chunk, self._store.last_stream(self._epoch)
        return (
            boundary is not None
            and last is not None
            and last.stream is not None
            and last.stream.end_lsn >= boundary.high
        )

    def _read(
        self,
        table: TableContract,
        plan: SnapshotPlan,
        landed: Sequence[Manifest],
        landing: Callable[[], Landing],
        stop: threading.Event,
    ) -> Lsn | None:
        chunks = [
            each.chunk
            for each in landed
            if each.chunk is not None
            and each.chunk.snapshot_id == plan.snapshot_id
            and not each.chunk.boundary
        ]
        high = max(chunk.high for chunk in chunks)
        epochs = {each.epoch: each for each in self._store.landed().epochs}
        if self._epoch not in epochs or (epochs[self._epoch].end or Lsn(0)) < high:
            return None
        again = [chunk for chunk in chunks if chunk.chunk >= plan.chunks]
        since = self._since(plan, chunks, again)
        batches = self._store.stream_between(self._epoch, since, high)
        moved = moved_rows(self._store, batches, table.schema, table.table, since, high)
        if not moved:
            self._searched.add(plan.snapshot_id)
            return None
        with closing(connect_to_source(self._dsn, self._of)) as connection:
            reader = ChunkReader(connection, landing(), stop)
            batch = reader.read_keys(table, plan, plan.chunks + len(again), moved, high)
        self._landed(batch)
        return None if batch.chunk is None else batch.chunk.high

    @staticmethod
    def _since(plan: SnapshotPlan, chunks: Sequence[ChunkSpan], again: Sequence[ChunkSpan]) -> Lsn:
        """From where on a key change may have been seen by the stream alone."""
        if again:
            # Rows read again stand where the search before them ended.
            return max(chunk.low for chunk in again)
        # The old key's row may be one that the lake has from before a hole: nothing of it is inherited.
        return Lsn(0) if plan.compared else min(chunk.low for chunk in chunks)
