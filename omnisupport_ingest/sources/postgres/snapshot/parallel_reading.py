"""Reading the chunks of planned snapshots, several at a time, each thread on a connection of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.slot.same_server import connect_to_source
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import ChunkReader, Landing, Stopped

_LOOK_SECONDS = 0.1
"""How often the caller's stop is asked while chunks are being read."""


class ParallelReading:
    """Chunks of some tables, read by several threads until none is left; boundaries as tables end."""

    def __init__(
        self,
        dsn: str,
        epoch: EpochRecord,
        landing: Landing,
        planned: Sequence[tuple[TableContract, SnapshotPlan]],
        landed: Callable[[Manifest], None],
        threads: int,
    ) -> None:
        """``planned``: each table with its plan. ``landed`` is called by several threads."""
        self._dsn, self._epoch, self._landing, self._landed = dsn, epoch, landing, landed
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
        """Read them all; returns the highest LSN that a chunk saw, or null if ``stop`` came first.

        Raises what the first thread that failed raised.
        """
        for table, plan in self._ended:
            self._end(table, plan)
        workers = [
            threading.Thread(target=self._work, name=f"snapshot-{number}") for number in range(self._threads)
        ]
        for worker in workers:
            worker.start()
        # The caller's stop may look at files; it is asked here alone.
        for worker in workers:
            while worker.is_alive():
                if stop.is_set():
                    self._over.set()
                worker.join(_LOOK_SECONDS)
        if self._failure is not None:
            raise self._failure
        return None if self._over.is_set() else self._high

    def _work(self) -> None:
        try:
            with closing(connect_to_source(self._dsn, self._epoch)) as connection:
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
        self._landed(batch)
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
            table.schema, table.table, None, None, None if plan.scope is None else plan.scope.text,
            None, None, None,
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
                scope=plan.scope,
            )
            batch = writer.seal(chunk=span)
        with self._lock:
            self._high = max(self._high, high)
        self._landed(batch)
