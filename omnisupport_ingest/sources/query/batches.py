"""Lands the events of a source that is read by queries: one batch per page, named by a hash of its content.

So rows that are read again, for example after a crash, are recognised as landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.manifest import (
    CURSOR_ORDER,
    DataFile,
    FileSpan,
    Manifest,
    RelationVersion,
)
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.contracted_relation import contracted_relation
from omnisupport_ingest.sources.query.events import ContentHash, RowWindows, blocks
from omnisupport_ingest.windows import KEY_FORMAT, WindowGrid

PAGE_ROWS = 500_000
"""Default number of rows per page."""


@dataclass(frozen=True)
class Inlet:
    """Where the rows of one source land.

    ``clock``: the time of landing, timezone-aware. ``landed`` is called with each batch. ``described_by``:
    the file of the source's definition, for the manifests. ``as_landed``: as of ``RowEvents``; the store
    converts nothing. ``learned``: columns that additive contracts have learned; None: nothing is learned
    here.
    """

    store: LandingStore
    grid: WindowGrid
    tables: tuple[TableContract, ...]
    described_by: str
    page_rows: int = PAGE_ROWS
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    landed: Callable[[Manifest], None] = lambda _batch: None
    as_landed: Callable[[pa.Table], pa.Table] = lambda events: events
    learned: LearnedColumns | None = None


@dataclass
class EventParts:
    """The events of one batch, added in parts, tables of ``EVENT_SCHEMA``. ``bytes``: their size.

    Each part is hashed when it is added, so one batch is hashed while the one before is written.
    """

    content: ContentHash
    tables: list[pa.Table] = field(default_factory=list)
    bytes: int = 0

    def add(self, events: pa.Table) -> None:
        """Add one or more events."""
        self.content.add(events)
        self.tables.append(events)
        self.bytes += events.nbytes


@dataclass
class Batches:
    """Lands batches of ``inlet`` in one epoch. ``names``: ids of the batches landed here."""

    inlet: Inlet
    epoch: EpochRecord
    names: list[str] = field(default_factory=list)

    def parts(self) -> EventParts:
        """Return an empty set of parts for the next batch."""
        return EventParts(ContentHash(self.epoch.number, self.inlet.store.source))

    def land(self, table: TableContract, parts: EventParts, *, free_windows: bool) -> None:
        """Land ``parts``, events of ``table``, as one batch, unless the same batch has landed.

        ``free_windows``: the window of an event does not follow from its position. Then an event gets the
        window in which its position first landed. The same holds for a row that was far ahead of the clock
        when it landed, and so is in the first window.
        """
        inlet = self.inlet
        content = parts.content.hexdigest()
        batch_id = file_batch_id(content)
        if inlet.store.exists(batch_id):
            return
        span = FileSpan(content, table.full_name, inlet.described_by, CURSOR_ORDER)
        relations = (contracted_relation(table),)
        with self._writer(batch_id) as writer:
            for block in blocks(pa.concat_tables(parts.tables), self._row_windows()):
                writer.add_block(block)
            if not free_windows and not self._meets_the_first_window(writer.finish()):
                self._seal(writer, span, relations)
                return
            with FirstWindows.of(inlet.store, self.epoch.number, writer.finish()) as first_windows:
                if not first_windows:
                    self._seal(writer, span, relations)
                    return
                writer.abandon()
                with self._writer(batch_id) as second:
                    for event in (event for part in parts.tables for event in _events(part)):
                        window = first_windows.window_of(event)
                        window = window or self._row_windows().of(event.source_ts)
                        second.add_to(window, event)
                    self._seal(second, span, relations)

    def _meets_the_first_window(self, files: Sequence[DataFile]) -> bool:
        """Whether an event of ``files`` may have landed in the first window, although its own window is
        later.

        Windows rise with positions, except for rows that were too far ahead of the clock.
        """
        first_window = self.inlet.grid.first.strftime(KEY_FORMAT)
        later = [each for each in files if each.window != first_window]
        if not later:
            return False
        lowest, highest = min(each.first for each in later), max(each.last for each in later)
        landed = self.inlet.store.reaching(self.epoch.number, lowest, highest)
        return any(each.window == first_window for each in landed)

    def land_end(self, events: Sequence[LandedEvent], complete: datetime | None) -> None:
        """Land the end of a sync: ends of full readings, and up to when the source is complete (None:
        unknown)."""
        source = self.inlet.store.source
        content = ContentHash(
            self.epoch.number, f"{source} {list(map(tuple, events))} {complete}"
        ).hexdigest()
        batch_id = file_batch_id(content)
        if self.inlet.store.exists(batch_id):
            return
        with self._writer(batch_id) as writer:
            for event in events:
                writer.add(event)
            span = FileSpan(content, "end of a sync", self.inlet.described_by, CURSOR_ORDER)
            self._seal(writer, span, (), complete)

    def _writer(self, batch_id: str) -> BatchWriter:
        inlet, epoch = self.inlet, self.epoch.number
        return BatchWriter(inlet.store, inlet.grid, epoch, batch_id, clock=inlet.clock)

    def _row_windows(self) -> RowWindows:
        return RowWindows(self.inlet.grid, self.inlet.clock(), self.epoch.rows_from)

    def _seal(
        self,
        writer: BatchWriter,
        span: FileSpan,
        relations: tuple[RelationVersion, ...],
        complete: datetime | None = None,
    ) -> None:
        batch = writer.seal(file=span, relations=relations, confirmed_clock=complete)
        self.names.append(batch.batch_id)
        self.inlet.landed(batch)


def _events(part: pa.Table) -> list[LandedEvent]:
    return [LandedEvent(*row.values()) for row in part.to_pylist()]
