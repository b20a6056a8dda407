"""Reads the chunks of planned snapshots, several at a time, each thread on its own connection.

Rows whose key changed while their table was being read are read again afterwards. Suppose a key changes from
a range that is not read yet to a range that is read already: then the row is in neither chunk. The stream has
the row, but without the columns that the change did not send (unchanged TOAST values), so nothing has read
these. The same holds for a row that meets the publication's row filter only after its key changed: it is sent
as an insert without those columns.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.names import chunk_prefix, is_snapshot_end
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.snapshot_plans import Search, SnapshotPlan, SnapshotPlans
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.protocol.text_columns import keep_freed_memory
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import (
    ChunkReader,
    PlannedChunk,
    ReadContext,
    Stopped,
    StreamMoment,
)
from omnisupport_ingest.sources.postgres.snapshot.landed_key import settle_keys
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch

_CHECK_SECONDS = 0.1
"""Seconds between two checks of the caller's stop while chunks are read."""

_KEY_CHANGE_COLUMNS = ["op", "commit_lsn", "source_schema", "source_table", "key", "unchanged"]


class ParallelReading:
    """Reads chunks with several threads until none is left, and lands the snapshot end of each table."""

    def __init__(
        self,
        epoch: CapturedEpoch,
        context: ReadContext,
        planned: Sequence[tuple[TableContract, SnapshotPlan]],
    ) -> None:
        """``planned``: each table with its plan."""
        self._epoch, self._context = epoch, context
        exists = context.store.exists
        self._left = deque(
            PlannedChunk(table, plan, number)
            for table, plan in planned
            for number in range(plan.chunks)
            if not exists(plan.batch_id(number))
        )
        self._missing = {
            plan.snapshot_id: sum(not exists(plan.batch_id(chunk)) for chunk in range(plan.chunks))
            for _, plan in planned
        }
        # Tables whose chunks have all landed, but whose snapshot end an earlier process did not land any
        # more.
        self._ended = [(table, plan) for table, plan in planned if not self._missing[plan.snapshot_id]]
        self._threads = max(1, min(epoch.settings.snapshot_threads, len(self._left)))
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._high = Lsn(0)

    def run(self, stop: threading.Event) -> Lsn | None:
        """Read all chunks; return the highest LSN that a chunk saw, or None if ``stop`` was set first.

        Raises the error of the first thread that failed.
        """
        keep_freed_memory()
        for table, plan in self._ended:
            self._end(table, plan)
        workers = [
            threading.Thread(target=self._work, name=f"snapshot-{number}") for number in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        # Only this thread checks the caller's stop, because the check may read files.
        for worker in workers:
            while worker.is_alive():
                if stop.is_set():
                    self._over.set()
                worker.join(_CHECK_SECONDS)
        if self._failure is not None:
            raise self._failure
        return None if self._over.is_set() else self._high

    def _work(self) -> None:
        try:
            with closing(self._epoch.connect()) as connection:
                reader = ChunkReader(connection, self._context, self._over)
                while (chunk := self._next()) is not None:
                    self._done(chunk, reader.read(chunk))
        except Stopped:
            pass
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self._over.set()

    def _next(self) -> PlannedChunk | None:
        with self._lock:
            return self._left.popleft() if self._left and not self._over.is_set() else None

    def _done(self, chunk: PlannedChunk, batch: Manifest) -> None:
        self._epoch.landed(batch)
        with self._lock:
            self._missing[chunk.plan.snapshot_id] -= 1
            last = not self._missing[chunk.plan.snapshot_id]
        if last:
            self._end(chunk.table, chunk.plan)

    def _end(self, table: TableContract, plan: SnapshotPlan) -> None:
        """Land the snapshot end of a table. All its chunks must have landed."""
        context = self._context
        landed = [context.store.read(plan.batch_id(chunk)).chunk for chunk in range(plan.chunks)]
        chunks = [chunk for chunk in landed if chunk is not None]
        lowest = min(chunks, key=lambda chunk: chunk.low)
        high = max(chunk.high for chunk in chunks)
        event = LandedEvent(
            plan.epoch, lowest.low.value, plan.boundary_ordinal, "b", lowest.clock, None, None,
            table.schema, table.table, None, None, None if plan.scope is None else plan.scope.text,
            None, None, None,
        )  # fmt: skip
        with BatchWriter(context.store, context.grid, plan.epoch, plan.boundary_id) as writer:
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
                scope=plan.scope,
            )
            batch = writer.seal(chunk=span)
        settle_keys(context.store, [table])
        with self._lock:
            self._high = max(self._high, high)
        self._epoch.landed(batch)


class KeyChangeReading:
    """Searches the stream of one epoch for key changes during snapshots; reads the changed rows again."""

    def __init__(self, epoch: CapturedEpoch) -> None:
        self.settled = False
        """Whether the stream was searched for every snapshot so far."""
        self._of, self._store, self._epoch = epoch, epoch.store, epoch.number
        self._plans = SnapshotPlans(epoch.store.folder)
        self._searched: set[str] = set()

    def run(
        self,
        tables: Sequence[TableContract],
        plans: Sequence[SnapshotPlan],
        context: Callable[[], ReadContext],
        stop: threading.Event,
    ) -> Lsn | None:
        """Read rows again whose key changed during a snapshot (one of ``plans``) that the stream has passed.

        Returns the highest LSN that was seen; None if nothing was read, or ``stop`` was set. Call it until it
        finds nothing, because a key may change again meanwhile.
        """
        table_of = {table.name: table for table in tables}
        unsearched = [
            (table_of[plan.table], plan)
            for plan in plans
            if plan.table in table_of and plan.snapshot_id not in self._searched
        ]
        self.settled = not unsearched
        last = self._store.last_stream(self._epoch) if unsearched else None
        if last is None or last.stream is None:
            return None
        end = last.stream.end_lsn
        passed = [(table, plan) for table, plan in unsearched if self._has_passed(plan, end)]
        if not passed:
            return None
        chunks = self._chunks({plan.snapshot_id for _, plan in passed})
        try:
            highs = [
                self._read(table, plan, chunks.get(plan.snapshot_id, []), context, stop)
                for table, plan in passed
            ]
        except Stopped:
            return None
        self.settled = all(plan.snapshot_id in self._searched for _, plan in unsearched)
        return max((high for high in highs if high is not None), default=None)

    def search_again(self, snapshot_id: str) -> None:
        """Search again for a snapshot that was searched already, because one more chunk of it was read."""
        self._searched.discard(snapshot_id)
        self.settled = False

    def _has_passed(self, plan: SnapshotPlan, end: Lsn) -> bool:
        """Whether the snapshot has landed, and ``end``, the end of the landed stream, is at or above the LSN
        at which it was read."""
        if not self._store.exists(plan.boundary_id):
            return False
        boundary = self._store.read(plan.boundary_id).chunk
        return boundary is not None and end >= boundary.high

    def _chunks(self, snapshots: Collection[str]) -> dict[str, list[ChunkSpan]]:
        """Return the landed chunks of ``snapshots`` (their ids), without the snapshot ends."""
        chunks: dict[str, list[ChunkSpan]] = {}
        for name in self._store.batch_ids(chunk_prefix(self._epoch)):
            chunk = None if is_snapshot_end(name) else self._store.read(name).chunk
            if chunk is not None and chunk.snapshot_id in snapshots and not chunk.boundary:
                chunks.setdefault(chunk.snapshot_id, []).append(chunk)
        return chunks

    def _read(
        self,
        table: TableContract,
        plan: SnapshotPlan,
        chunks: Sequence[ChunkSpan],
        context: Callable[[], ReadContext],
        stop: threading.Event,
    ) -> Lsn | None:
        search = Search.due(chunks)
        assert search is not None, "a snapshot that has landed has chunks"
        high = search.high
        if self._plans.searched(plan) == search:
            # An earlier process searched it. Landing may have lost that part of the stream since.
            self._searched.add(plan.snapshot_id)
            return None
        epochs = {each.epoch: each for each in self._store.landed().epochs}
        if self._epoch not in epochs or (epochs[self._epoch].end or Lsn(0)) < high:
            return None
        again = [chunk for chunk in chunks if chunk.chunk >= plan.chunks]
        since = self._since(plan, chunks, again)
        batches = self._store.stream_between(self._epoch, since, high)
        keys = _changed_keys(self._store, batches, table.table_name, since, high)
        if not keys:
            self._plans.note_searched(plan, search)
            self._searched.add(plan.snapshot_id)
            return None
        with closing(self._of.connect()) as connection:
            reader = ChunkReader(connection, context(), stop)
            # Every chunk took its clock before its ``high``.
            at = StreamMoment(high, max(chunk.clock for chunk in chunks))
            batch = reader.read_keys(PlannedChunk(table, plan, plan.chunks + len(again)), keys, at)
        self._of.landed(batch)
        return None if batch.chunk is None else batch.chunk.high

    @staticmethod
    def _since(plan: SnapshotPlan, chunks: Sequence[ChunkSpan], again: Sequence[ChunkSpan]) -> Lsn:
        """Return the LSN from which on to search: chunks may have missed key changes above it."""
        if again:
            # Rows that were read again have the position at which the search before them ended.
            return max(chunk.low for chunk in again)
        # The row with the old key may be older than a gap; then the fold takes nothing over from it.
        return Lsn(0) if plan.compared else min(chunk.low for chunk in chunks)


def _changed_keys(
    store: LandingStore, batches: Iterable[Manifest], table: TableName, since: Lsn, below: Lsn
) -> frozenset[str]:
    """Return the new keys (JSON arrays, as in events) of key changes in ``table`` that left columns unsent.

    ``batches``: of the epoch's stream. Only commits from ``since`` (inclusive) to ``below`` (exclusive)
    count. A key with NULL is left out: it belongs to no row.
    """
    keys: set[str] = set()
    for batch in batches:
        span = batch.stream
        if span is None or span.last_commit_lsn is None or span.start_lsn is None:
            continue
        if span.last_commit_lsn < since or span.start_lsn >= below:
            continue
        for file in batch.files:
            if ".".join(table) not in file.rows_per_table:
                continue
            rows = pq.read_table(store.path_of(file), columns=_KEY_CHANGE_COLUMNS, partitioning=None)
            changed = rows.filter(
                (pc.field("source_schema") == table[0])
                & (pc.field("source_table") == table[1])
                & (pc.field("op") == "c")
                & (pc.list_value_length(pc.field("unchanged")) > 0)
                & (pc.field("commit_lsn") >= since.value)
                & (pc.field("commit_lsn") < below.value)
            )
            keys.update(key for key in changed.column("key").to_pylist() if None not in json.loads(key))
    return frozenset(keys)
