"""Write one batch: events in; data files per window, and a manifest, out.

Memory stays bounded however large a transaction is. Buffers become Parquet row groups, which threads make and
write while the caller goes on reading (``writer_threads``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Self

import pyarrow as pa

from omnisupport_ingest import __version__
from omnisupport_ingest.landing.columns import events_table, row_group
from omnisupport_ingest.landing.errors import ChainContested, LandingFailed
from omnisupport_ingest.landing.folder_lock import FolderLock
from omnisupport_ingest.landing.manifest import (
    CURSOR_ORDER,
    ArrivalFacts,
    ChunkSpan,
    DataFile,
    FileSpan,
    Manifest,
    RelationVersion,
    StreamSpan,
)
from omnisupport_ingest.landing.parts import PartFiles, RowGroup
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.watermark import delivery_facts, stream_facts, unchanged_facts
from omnisupport_ingest.landing.writer_threads import WriterThreads, awaited
from omnisupport_ingest.storage import StorageUnreachable
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowGrid

_EVENT_OVERHEAD = 100
"""Estimated bytes of an event besides its texts."""

BLOCK_ROWS = 10_000
"""Number of rows at which an ``EventBlock`` should end."""
BLOCK_BYTES = 16 * 1024 * 1024
"""Size in bytes at which an ``EventBlock`` should end. Both limits are large enough that the work per block
costs nothing per event, and small enough that the end of a batch does not wait long for a block."""


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """When buffers become row groups, and when files end. Sizes in bytes; texts count as characters."""

    group_rows: int = 20_000
    group_bytes: int = 16 * 1024 * 1024
    file_bytes: int = 128 * 1024 * 1024
    buffered_groups: int = 4
    """How many full buffers' worth of events all windows together may hold before the largest
    buffer is written, full or not."""


@dataclass(frozen=True, slots=True)
class EventBlock:
    """Events of one ``window``, which a thread of the writer makes when their turn comes.

    Attributes:
        rows: number of events, as far as it is known beforehand.
        bytes: size of the events, as far as it is known beforehand.
        highest_ts: their highest commit time.
        table: makes the events: a table of ``EVENT_SCHEMA`` with at least one row. Its errors are raised by
            ``add_block`` or ``seal``.
    """

    window: str
    rows: int
    bytes: int
    highest_ts: datetime
    table: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class Covered:
    """What a batch covers, and what sets its watermark: see ``BatchWriter.seal``."""

    stream: StreamSpan | None = None
    chunk: ChunkSpan | None = None
    file: FileSpan | None = None
    relations: tuple[RelationVersion, ...] = ()
    confirmed_clock: datetime | None = None
    max_clock_skew: timedelta = timedelta(0)


class _GivenUp(Exception):
    """Ends the work that waits for a writer's threads when its batch is abandoned."""


class _Buffer:
    """Events of one window that are not written yet; ``table_rows`` of them are in ``tables``."""

    __slots__ = ("bytes", "events", "table_rows", "tables", "window")

    def __init__(self, window: str) -> None:
        self.window = window
        self.events: list[LandedEvent] = []
        self.tables: list[pa.Table] = []
        self.table_rows = self.bytes = 0

    @property
    def rows(self) -> int:
        return len(self.events) + self.table_rows

    def emptied(self) -> Callable[[], pa.Table]:
        """Empty the buffer; return a function that makes a table of its events."""
        made = partial(_one_table, self.events, self.tables)
        self.events, self.tables, self.table_rows, self.bytes = [], [], 0, 0
        return made


def _one_table(events: list[LandedEvent], tables: list[pa.Table]) -> pa.Table:
    if not tables:
        return events_table(events)
    return pa.concat_tables([*tables, events_table(events)] if events else tables).combine_chunks()


class BatchWriter:
    """Writes the batch ``batch_id``. End it with ``seal`` or ``abandon``; leaving its context abandons it
    unless it was sealed.

    It first removes what a crashed writer of the same batch left.
    """

    def __init__(
        self,
        store: LandingStore,
        grid: WindowGrid,
        epoch: int,
        batch_id: str,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: WriterLimits = WriterLimits(),
    ) -> None:
        """Open the batch. Raises ``ChainContested`` if it has landed or another writer has it open.

        ``clock`` returns the landing clock's time, timezone-aware.
        """
        self.batch_id = batch_id
        self.rows = 0
        """Events taken in so far."""
        self.bytes = 0
        """Size of the events taken in so far, an estimate of their text size in bytes."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called on the caller's thread about every second while ``add``, ``add_block`` or ``seal`` waits for
        the disk. They raise its errors, and then the batch must be abandoned."""
        self._store, self._grid, self._epoch = store, grid, epoch
        self._clock, self._limits = clock, limits
        self._opened_at = clock()
        self._buffers: dict[str, _Buffer] = {}
        self._buffer_of_minute: dict[datetime, _Buffer] = {}
        self._current_ts: datetime | None = None
        self._current = _Buffer("")
        self._highest_ts: datetime | None = None
        self._rows_spilled = 0
        self._bytes_spilled = 0
        self._finished: tuple[DataFile, ...] | None = None
        self._lock: FolderLock | None = self._take_folder()
        self._parts = PartFiles(store.data_folder(batch_id), limits.file_bytes)
        self._threads, self._has_own_threads = WriterThreads(), True
        self._failure: BaseException | None = None

    def share(self, threads: WriterThreads) -> None:
        """Write on ``threads``, which other writers use too and which their creator closes. Call this first,
        before any other method.
        """
        self._threads, self._has_own_threads = threads, False

    def add(self, event: LandedEvent) -> None:
        """Add one event, of any window. Raises ``LandingFailed`` if writing an earlier one failed."""
        if event[4] is not self._current_ts:
            self._turn_to(event[4])
        buffer = self._current
        buffer.events.append(event)
        key, before, after = event[9], event[10], event[11]
        size = _EVENT_OVERHEAD
        if key is not None:
            size += len(key)
        if before is not None:
            size += len(before)
        if after is not None:
            size += len(after)
        buffer.bytes += size
        self.bytes += size
        self.rows += 1
        if (
            len(buffer.events) + buffer.table_rows >= self._limits.group_rows
            or buffer.bytes >= self._limits.group_bytes
        ):
            self._spill(buffer)
        elif len(self._buffers) > 1:
            self._bound_buffers()

    def add_table(self, window: str, events: pa.Table, highest_ts: datetime) -> None:
        """Add a few events of one window: a table of ``EVENT_SCHEMA`` too small for a row group of its own.

        They wait for others of the window. ``highest_ts``: their highest commit time. Errors as in ``add``.
        """
        self._note_time(window, highest_ts)
        buffer = self._buffers.setdefault(window, _Buffer(window))
        buffer.tables.append(events)
        buffer.table_rows += events.num_rows
        buffer.bytes += events.nbytes
        self.rows += events.num_rows
        self.bytes += events.nbytes
        if buffer.rows >= self._limits.group_rows or buffer.bytes >= self._limits.group_bytes:
            self._spill(buffer)
        elif len(self._buffers) > 1:
            self._bound_buffers()

    def add_to(self, window: str, event: LandedEvent) -> None:
        """Add one event to the window in which its position landed first (``first_windows``), not to that of
        its commit time. Errors as in ``add``."""
        self._turn_to(event.source_ts)
        self._current = self._buffers.setdefault(window, _Buffer(window))
        self.add(event)
        self._current_ts = None

    def add_block(self, block: EventBlock) -> None:
        """Add many events at once, about as many as a row group has; errors as in ``add``.

        They are written after everything of their window that was added before.
        """
        earlier = self._buffers.get(block.window)
        if earlier is not None and earlier.rows:
            self._spill(earlier)
        self._note_time(block.window, block.highest_ts)
        self.rows += block.rows
        self.bytes += block.bytes
        self._rows_spilled += block.rows
        self._bytes_spilled += block.bytes
        self._write(block.window, block.table)

    def window_of(self, moment: datetime) -> str:
        """Return the window of a commit time. Times too far ahead are recognized to the minute."""
        return self._buffer_of(moment).window

    def finish(self) -> tuple[DataFile, ...]:
        """Finish the data files; no event may be added after that. Errors as in ``seal``."""
        if self._finished is None:
            self._spill_all()
            self._finished = awaited(self._threads.run(self._finish_files), self.meanwhile)
        return self._finished

    def seal(
        self,
        *,
        stream: StreamSpan | None = None,
        chunk: ChunkSpan | None = None,
        file: FileSpan | None = None,
        relations: tuple[RelationVersion, ...] = (),
        confirmed_clock: datetime | None = None,
        max_clock_skew: timedelta = timedelta(0),
    ) -> Manifest:
        """Finish the files and land the batch: when this returns, it is durable.

        Exactly one of ``stream``, ``chunk`` and ``file`` says what the batch covers, and must fit its name.
        ``confirmed_clock`` and ``max_clock_skew`` set the watermark of a stream batch or a file of events
        (``watermark.stream_facts``); ``confirmed_clock`` sets that of a delivery of rows
        (``watermark.delivery_facts``).

        Raises:
            LandingFailed: files could not be written; then call ``abandon``.
            ChainContested: another writer landed the batch; then call ``abandon``.
        """
        covered = Covered(stream, chunk, file, relations, confirmed_clock, max_clock_skew)
        manifest = awaited(self.begin_seal(covered), self.meanwhile)
        self._close()
        return manifest

    def begin_seal(self, covered: Covered) -> Future[Manifest]:
        """Seal as ``seal`` does, without waiting: the future gets the result or the error of ``seal``.

        Do not use the writer until then.
        """
        self._spill_all()
        return self._threads.run(lambda: self._land(covered))

    def abandon(self) -> None:
        """Abandon the batch and delete what was written of it. Does nothing after ``seal`` or ``abandon``."""
        if self._lock is not None:
            # The batch may be about to land behind its row groups, and must not land without one of them.
            self._failure = self._failure or _GivenUp()
            self._threads.settle()
            if not self._has_landed():
                self._parts.remove()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _take_folder(self) -> FolderLock:
        folder = self._store.data_folder(self.batch_id)
        lock = FolderLock.take(folder)
        if lock is None or self._store.exists(self.batch_id):
            how = "is being written by another process" if lock is None else "has already landed"
            if lock is not None:
                lock.release()
            raise ChainContested(
                f"Batch {self.batch_id} of {self._store.source} {how}.",
                fix="Stop this writer: another one captures this source. Run one capture per slot.",
            )
        lock.remove_contents()
        return lock

    def _turn_to(self, moment: datetime) -> None:
        """Make the buffer of ``moment``'s window the current one."""
        self._current_ts, self._current = moment, self._buffer_of(moment)
        self._note_time(self._current.window, moment)

    def _buffer_of(self, moment: datetime) -> _Buffer:
        """Return the buffer of ``moment``'s window, found by the minute, because windows begin at whole
        minutes."""
        minute = moment.replace(second=0, microsecond=0)
        buffer = self._buffer_of_minute.get(minute)
        if buffer is None:
            window = self._grid.key_of(minute, self._opened_at)
            buffer = self._buffers.setdefault(window, _Buffer(window))
            self._buffer_of_minute[minute] = buffer
        return buffer

    def _note_time(self, window: str, moment: datetime) -> None:
        if window != OUT_OF_RANGE and (self._highest_ts is None or moment > self._highest_ts):
            self._highest_ts = moment

    def _bound_buffers(self) -> None:
        limits = self._limits
        rows, size = self.rows - self._rows_spilled, self.bytes - self._bytes_spilled
        if rows >= limits.group_rows * limits.buffered_groups or (
            size >= limits.group_bytes * limits.buffered_groups
        ):
            self._spill(max(self._buffers.values(), key=lambda buffer: buffer.bytes))

    def _spill(self, buffer: _Buffer) -> None:
        self._rows_spilled += buffer.rows
        self._bytes_spilled += buffer.bytes
        self._write(buffer.window, buffer.emptied())

    def _write(self, window: str, table: Callable[[], pa.Table]) -> None:
        # Every event passes here, so personal values are encrypted here, if the contract says so.
        as_landed = self._store.as_landed

        def made() -> pa.Table:
            self._require_all_written()
            return table()

        def converted(events: Future[pa.Table]) -> RowGroup:
            return row_group(window, as_landed(events.result()), self.batch_id)

        self._threads.write(made, converted, self._write_group, self.meanwhile)

    def _write_group(self, group: Future[RowGroup]) -> None:
        try:
            self._require_all_written()
            with self._disk_errors():
                self._parts.write(group.result())
        except BaseException as failure:
            self._failure = failure
            raise

    def _require_all_written(self) -> None:
        """Raise the error that kept an earlier row group from being written."""
        if self._failure is not None:
            raise self._failure

    def _spill_all(self) -> None:
        for window in sorted(self._buffers):
            if self._buffers[window].rows:
                self._spill(self._buffers[window])

    def _finish_files(self) -> tuple[DataFile, ...]:
        """Finish the files, on the thread that writes."""
        self._require_all_written()
        if self._finished is not None:
            return self._finished
        with self._disk_errors():
            return self._parts.finish() if self.rows else ()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise LandingFailed(
                f"Batch {self.batch_id} cannot be written to {self._store.folder}: {error}.",
                fix="Make room on the disk, check that the folder is writable, and start again: "
                "nothing was confirmed to the source, so nothing is lost.",
            ) from error

    def _has_landed(self) -> bool:
        """Whether a manifest names our files: an error may come after it was created."""
        try:
            if not self._store.exists(self.batch_id):
                return False
            named = {self._store.folder / file.path for file in self._store.read(self.batch_id).files}
        except StorageUnreachable:
            # The store cannot be read. If no manifest names the files, the garbage collection removes them.
            return True
        return not named.isdisjoint(self._parts.paths)

    def _land(self, covered: Covered) -> Manifest:
        """Land the batch, on the thread that writes."""
        files = self._finish_files()
        manifest = Manifest(
            batch_id=self.batch_id,
            source=self._store.source,
            epoch=self._epoch,
            arrival=replace(self._arrival(covered), newest_epoch_before=self._store.newest_epoch_begun()),
            stream=covered.stream,
            chunk=covered.chunk,
            file=covered.file,
            files=files,
            relations=covered.relations,
            written_by=f"omnisupport_ingest {__version__}",
        )
        with self._disk_errors():
            self._store.publish(manifest)
        self._release()
        return manifest

    def _arrival(self, covered: Covered) -> ArrivalFacts:
        stream, file, landed_at = covered.stream, covered.file, self._clock()
        times: tuple[datetime | None, ...] = (self._highest_ts,)
        if stream is not None:
            previous = self._store.last_stream_until(self._epoch)
            times += (stream.first_commit_ts, stream.last_commit_ts)
        elif file is not None and file.order is not None:
            previous = self._store.last_file(self._epoch)
            if file.order == CURSOR_ORDER or file.offsets is not None:
                # Tables or partitions are read one after the other; only the caller knows how far all are.
                times = ()
        elif file is not None:
            return delivery_facts(
                self._store.watermark_until(self._epoch), covered.confirmed_clock, landed_at
            )
        else:
            return unchanged_facts(self._store.last_stream_until(self._epoch), landed_at)
        return stream_facts(
            previous,
            self._epoch,
            tuple(moment for moment in times if moment is not None),
            confirmed_clock=covered.confirmed_clock,
            landed_at=landed_at,
            max_clock_skew=covered.max_clock_skew,
        )

    def _close(self) -> None:
        if self._has_own_threads:
            self._threads.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
