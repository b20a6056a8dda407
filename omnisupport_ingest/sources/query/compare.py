"""Comparing the keys of a source with those of the lake: what a reading by cursor cannot see.

A row that was deleted leaves no cursor. So the keys of both sides are compared by checksums of ranges of
the key, and a range that differs is cut until it is small; only then are keys read. A key that
only the lake has is a delete, noticed now: it stands just above the last version that the lake has of the
row, so that whatever comes of the row later is above it. A row that only the source has was missed (its
transaction took longer than the lookback); it is read and lands where its cursor says.

The lake has to hold all that has landed, and the comparison reads one transaction of the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.sources.query.batches import Batches, Inlet
from omnisupport_ingest.sources.query.cursor import CursorColumn, corrected
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.events import Known, RowEvents
from omnisupport_ingest.sources.query.reader import KeyBounds, Reader, Rows

LEAF_ROWS = 20_000
"""A range of at most so many keys is not cut any more."""

PARTS = 16
"""Into so many a range that differs is cut: its checksums together read it once, and four such steps are
enough for a thousand million rows."""

MOST_MISSED = 100_000
"""Rows that one comparison reads because the lake has not got them; beyond, a full refresh costs less."""


class LakeKeys(Protocol):
    """The keys of one dimension, alive."""

    def checksum(self, bounds: KeyBounds, /) -> RowChecksum:
        """That of the keys in ``bounds``."""

    def cuts(self, bounds: KeyBounds, parts: int, /) -> list[tuple[str, ...]]:
        """Keys that part those in ``bounds`` into about as many even ranges, rising; none if they are few."""

    def ordinals(self, bounds: KeyBounds, /) -> Mapping[str, int]:
        """The keys in ``bounds`` (JSON), each with the ordinal of the last event of its row."""


@dataclass
class TableComparison:
    """What came of one table: checksums asked for, keys read, deletes noticed, missed rows read.

    ``more_missed``: there are more than were read.
    """

    table: str
    checksums: int = 0
    keys_read: int = 0
    deleted: int = 0
    missed: int = 0
    more_missed: bool = False


@dataclass
class Comparison:
    """What a comparison of a source did. ``clock``: of the source."""

    source: str
    clock: datetime
    tables: list[TableComparison] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)


def compare(inlet: Inlet, reader: Reader, lake: Mapping[str, LakeKeys]) -> Comparison:
    """Land what the keys of the source and of ``lake`` (by ``schema.table``) differ in.

    Whoever calls holds the landing folder. ``QueryRefused`` for a table whose keys cannot be compared.
    """
    epoch = inlet.store.current_epoch()
    if epoch is None:
        raise QueryRefused(
            f"Nothing of {inlet.store.source} has landed, so there is nothing to compare.",
            fix="Read it first: omnisupport-ingest sync NAME",
        )
    moment = reader.begin()
    try:
        found = Comparison(inlet.store.source, moment.clock)
        batches = Batches(inlet, epoch.number, found.batches)
        for table in inlet.tables:
            events = RowEvents(table, CursorColumn.of(table), inlet.grid, epoch.number, inlet.as_landed)
            one = _OneTable(reader, lake[table.full_name], events, batches, moment.clock)
            found.tables.append(one.compare())
        return found
    finally:
        reader.end()


@dataclass
class _OneTable:
    reader: Reader
    lake: LakeKeys
    events: RowEvents
    batches: Batches
    noticed: datetime

    def compare(self) -> TableComparison:
        table = self.events.table
        told = TableComparison(table.full_name)
        for bounds in self._differing(told):
            self._settle(bounds, told)
        return told

    def _differing(self, told: TableComparison) -> Iterator[KeyBounds]:
        """Small ranges that differ, by cutting those that do."""
        waiting = [KeyBounds(None, None)]
        while waiting:
            bounds = waiting.pop()
            # The server works on its side while the lake's keys are read and added up here.
            with ThreadPoolExecutor(1, thread_name_prefix="source keys") as beside:
                asked = beside.submit(self.reader.key_checksum, self.events.table, bounds)
                ours = self.lake.checksum(bounds)
                theirs = asked.result()
            told.checksums += 1
            if theirs == ours:
                continue
            cuts = [] if ours.rows <= LEAF_ROWS else self.lake.cuts(bounds, PARTS)
            if not cuts:
                yield bounds
                continue
            edges = [bounds.start, *cuts, bounds.end]
            waiting += [KeyBounds(start, end) for start, end in pairwise(edges)]

    def _settle(self, bounds: KeyBounds, told: TableComparison) -> None:
        """Land the deletes of a range, and the rows of it that the lake has not got."""
        table = self.events.table
        known = self.lake.ordinals(bounds)
        there: set[str] = set()
        missed: list[str] = []
        for keys in self.reader.keys(table, bounds):
            told.keys_read += len(keys)
            there.update(key for key in keys if key in known)
            missed += [key for key in keys if key not in known]
            if told.missed + len(missed) > MOST_MISSED:
                del missed[max(0, MOST_MISSED - told.missed) :]
                told.more_missed = True
        gone = sorted(set(known) - there)
        if gone:
            deletes = [
                self.events.delete(key, corrected(known[key]), max(self.noticed, self.events.grid.first))
                for key in gone
            ]
            # Its window is that of the time it was noticed, whatever its position.
            self.batches.land(table, [events_table(deletes)], free_windows=True)
        told.deleted += len(gone)
        self._read(missed)
        told.missed += len(missed)

    def _read(self, keys: Sequence[str]) -> None:
        table, cursor = self.events.table, self.events.cursor
        parts: list[pa.Table] = []

        def take(rows: Rows) -> None:
            parts.append(self.events.of(rows, {}, Known(), 1 << 62))

        for start in range(0, len(keys), LEAF_ROWS):
            self.reader.rows_of(table, cursor, keys[start : start + LEAF_ROWS], take)
            if parts:
                self.batches.land(table, parts, free_windows=cursor.event_time is not None)
            parts.clear()
