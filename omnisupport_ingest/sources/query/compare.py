"""Compares the keys of a source with those of the lake, to find what a reading by cursor cannot see.

A deleted row leaves no cursor. So both sides are compared by checksums of key ranges. A range that differs is
split until it is small; only then are its keys read. A key that only the lake has is a delete. Its position
is just above the last version of the row in the lake, so later versions are above the delete. A row that only
the source has was missed (its transaction took longer than the lookback); it is read, and lands at the
position of its cursor.

The lake must have all that has landed. The comparison reads one transaction of the source. Between two ranges
it can be stopped, for a pause; what it found until then has landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Protocol

from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.sources.query.advice import read_anew
from omnisupport_ingest.sources.query.batches import Batches, Inlet
from omnisupport_ingest.sources.query.cursor import NULL_ORDINALS, CursorColumn, corrected
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.events import Known, RowEvents
from omnisupport_ingest.sources.query.null_rows import NullRows
from omnisupport_ingest.sources.query.reader import KeyBounds, Moment, Reader, Rows
from omnisupport_ingest.sources.query.schemas import CursorSchemas
from omnisupport_ingest.sources.query.state import NullRow, QueryState

LEAF_ROWS = 20_000
"""A range with at most so many keys is not split further."""

PARTS = 16
"""Number of ranges into which a differing range is split. Together their checksums read the range once; four
such steps suffice for a thousand million rows."""

MOST_MISSED = 100_000
"""Most missed rows that one comparison reads; beyond that, a full refresh costs less."""


class LakeKeys(Protocol):
    """The keys of the living rows of one dimension, whose columns are ``key``."""

    @property
    def key(self) -> tuple[str, ...]: ...

    def checksum(self, bounds: KeyBounds, /) -> RowChecksum:
        """Return the checksum of the keys in ``bounds``."""

    def cuts(self, bounds: KeyBounds, parts: int, /) -> list[tuple[str, ...]]:
        """Return ascending keys that split ``bounds`` into about ``parts`` ranges of equal size; none if
        there are few keys."""

    def ordinals(self, bounds: KeyBounds, /) -> Mapping[str, int]:
        """Return the keys in ``bounds`` (JSON), each with the ordinal of the last event of its row."""


@dataclass
class TableComparison:
    """The result for one table: how many checksums were computed, keys read, deletes found, and missed rows
    read.

    ``more_missed``: more rows were missed than were read. ``finished``: it was compared to its end.
    """

    table: str
    checksums: int = 0
    keys_read: int = 0
    deleted: int = 0
    missed: int = 0
    more_missed: bool = False
    finished: bool = False


@dataclass
class Comparison:
    """The result of a comparison. ``clock``: the source's clock. ``faults``: why tables were refused; the
    others were compared."""

    source: str
    clock: datetime
    tables: list[TableComparison] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    faults: list[QueryRefused] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every table, except refused ones, was compared to its end."""
        return all(each.finished for each in self.tables)


def compare(
    inlet: Inlet,
    reader: Reader,
    state: QueryState,
    lake: Mapping[str, LakeKeys],
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Land the differences between the keys of the source and of ``lake`` (by ``schema.table``).

    The caller holds the lease of the source. ``stopped`` is called before each range of keys; if it returns
    True, the comparison ends. A table that is refused does not prevent the comparison of others; the caller
    raises the errors in ``faults``. Raises ``QueryRefused`` for a server that is behind what was read;
    ``AnotherDatabase`` for another database, because all rows that it lacks would count as deleted.
    """
    epoch = inlet.store.current_epoch()
    if epoch is None:
        raise QueryRefused(
            f"Nothing of {inlet.store.source} has landed, so there is nothing to compare.",
            fix=f"Read it first: omnisupport-ingest sync {inlet.store.source}",
        )
    moment = reader.begin()
    try:
        state.claim(moment.database)
        _require_reached(moment, state, inlet.store.source)
        schemas = CursorSchemas(inlet.store, inlet.tables, inlet.learned)
        schemas.look(reader, moment, epoch.number)
        schemas.keys.note(each for each in inlet.tables if state.progress(each.full_name) is not None)
        unsettled = schemas.keys.unsettled()
        found = Comparison(inlet.store.source, moment.clock)
        batches = Batches(inlet, epoch, found.batches)
        for table in inlet.tables:
            if schemas.blocks(table) or table.full_name in unsettled:
                # Missed rows are not read until a person has looked at the table. The lake shows one by its
                # former key until it has been read by the new one.
                continue
            of_lake = lake[table.full_name]
            if of_lake.key != table.key:
                # It was opened before another process put the new key in force.
                continue
            try:
                cursor = CursorColumn.of(table)
                # At the positions that a sync would give them.
                schema = state.schema_number(table.full_name, reader.columns(table))
                events = RowEvents(table, cursor, inlet.grid, epoch.number, inlet.as_landed, schema)
                nulls = NullRows(events, inlet.store, state)
                one = _OneTable(reader, of_lake, events, batches, moment.clock, nulls)
                found.tables.append(one.compare(stopped))
            except QueryRefused as refused:
                found.faults.append(refused)
                reader.step_over()
        return found
    finally:
        reader.end()


def _require_reached(moment: Moment, state: QueryState, source: str) -> None:
    reached = state.reached()
    if reached is not None and moment.low is not None and moment.low < reached:
        raise QueryRefused(
            "The server shows an earlier state than the one that was read: a standby that lags behind, or a "
            "restored backup. Rows that it does not have would count as deleted.",
            fix="Name one server in the connection, and compare when it has caught up. If it was restored, "
            f"read all of it anew: {read_anew(source, 'restored from a backup')}",
        )


@dataclass
class _OneTable:
    reader: Reader
    lake: LakeKeys
    events: RowEvents
    batches: Batches
    noticed: datetime
    nulls: NullRows

    def compare(self, stopped: Callable[[], bool]) -> TableComparison:
        """Compare the table, until ``stopped`` returns True."""
        table = self.events.table
        result = TableComparison(table.full_name)
        for bounds in self._differing(result, stopped):
            self._settle(bounds, result)
        return result

    def _differing(self, result: TableComparison, stopped: Callable[[], bool]) -> Iterator[KeyBounds]:
        """Yield small ranges that differ, by splitting larger ones."""
        waiting = [KeyBounds(None, None)]
        while waiting:
            if stopped():
                return
            bounds = waiting.pop()
            # The source computes its checksum while the lake's is computed here.
            with ThreadPoolExecutor(1, thread_name_prefix="source keys") as beside:
                answer = beside.submit(self.reader.key_checksum, self.events.table, bounds)
                ours = self.lake.checksum(bounds)
                theirs = answer.result()
            result.checksums += 1
            if theirs == ours:
                continue
            cuts = [] if ours.rows <= LEAF_ROWS else self.lake.cuts(bounds, PARTS)
            if not cuts:
                yield bounds
                continue
            edges = [bounds.start, *cuts, bounds.end]
            waiting += [KeyBounds(start, end) for start, end in pairwise(edges)]
        result.finished = True

    def _settle(self, bounds: KeyBounds, result: TableComparison) -> None:
        """Land the deletes in a range, and its rows that the lake lacks."""
        table = self.events.table
        known = self.lake.ordinals(bounds)
        there: set[str] = set()
        missed: list[str] = []
        for keys in self.reader.keys(table, bounds):
            result.keys_read += len(keys)
            there.update(key for key in keys if key in known)
            missed += [key for key in keys if key not in known]
            if result.missed + len(missed) > MOST_MISSED:
                del missed[max(0, MOST_MISSED - result.missed) :]
                result.more_missed = True
        gone = sorted(set(known) - there)
        if gone:
            at = max(self.noticed, self.events.grid.first)
            ordinals = {key: corrected(known[key], table) for key in gone}
            deletes = [self.events.delete(key, ordinal, at) for key, ordinal in ordinals.items()]
            # The window of a delete is that of the time when it was found; it does not follow from its
            # position.
            parts = self.batches.parts()
            parts.add(events_table(deletes))
            without_cursor = [
                NullRow(key, ordinal, None) for key, ordinal in ordinals.items() if ordinal in NULL_ORDINALS
            ]
            with self.nulls.remembering(without_cursor):
                self.batches.land(table, parts, free_windows=True)
        result.deleted += len(gone)
        self._read(missed)
        result.missed += len(missed)

    def _read(self, keys: Sequence[str]) -> None:
        table, cursor = self.events.table, self.events.cursor
        parts = self.batches.parts()
        null_rows: list[NullRow] = []

        def take(rows: Rows) -> None:
            changed = self.nulls.changed(self.events.of(rows, {}, Known(), 1 << 62))
            parts.add(changed.events)
            null_rows.extend(changed.rows)

        for start in range(0, len(keys), LEAF_ROWS):
            self.reader.rows_of(table, cursor, keys[start : start + LEAF_ROWS], take)
            with self.nulls.remembering(null_rows):
                if parts.tables:
                    self.batches.land(table, parts, free_windows=cursor.event_time is not None)
            parts = self.batches.parts()
            null_rows.clear()
