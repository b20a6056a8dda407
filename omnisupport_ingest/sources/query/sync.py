"""One sync of a source by cursors: reads every table from its cursor on, in one transaction of the source.

A table is read in pages of its index on (cursor, key), so a page may begin between two rows with the same
cursor value. A page lands as a batch before the cursor moves; meanwhile the next rows are read. A sync begins
below the cursor by the contract's lookback, because a transaction may set the cursor value of a row and
commit much later. Row versions that have landed are recognised and do not land twice. The first reading of a
table, and a requested refresh, read it whole.

A killed sync continues from its last page, in a new transaction. Its final cursor is never above the clock,
or above the highest value, of its first transaction. So all rows that commit later are above that cursor
minus the lookback.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.sources.query.advice import propose, read_anew
from omnisupport_ingest.sources.query.anew import clear_of_sealed, ends_older_rows
from omnisupport_ingest.sources.query.batches import Batches, EventParts, Inlet
from omnisupport_ingest.sources.query.cursor import (
    NO_CURSOR,
    CursorColumn,
    CursorKind,
    KeysetPosition,
    micros,
)
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.events import Known, RowEvents
from omnisupport_ingest.sources.query.null_rows import NullRows
from omnisupport_ingest.sources.query.reader import Moment, Reader, Rows, Span
from omnisupport_ingest.sources.query.schemas import CursorSchemas
from omnisupport_ingest.sources.query.state import NullRow, Progress, QueryState, UnfinishedReading

FIRST_EPOCH = "first reading by cursor"


@dataclass
class TableSync:
    """The result of a sync for one table.

    ``full``: it was read whole. ``read``, ``landed``: numbers of rows. ``again``: rows of the lookback that
    had landed unchanged. ``behind``: rows with a lower cursor than their key had before. ``finished``: it was
    read to its end. ``blocked``: its schema has changed, and it is not read until a person has looked.
    ``refused``: it cannot be read (``SyncReport.faults``). ``went_back``: its highest cursor is below that of
    the last sync. ``cursor``: the new cursor.
    """

    table: str
    full: bool = False
    read: int = 0
    landed: int = 0
    again: int = 0
    behind: int = 0
    finished: bool = False
    blocked: bool = False
    refused: bool = False
    went_back: bool = False
    cursor: str | None = None


@dataclass
class SyncReport:
    """The result of a sync. ``clock``: the source's clock at the beginning. ``faults``: why tables were
    refused; the others were read."""

    source: str
    clock: datetime
    tables: list[TableSync] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    faults: list[QueryRefused] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every table except the blocked ones was read to its end."""
        return all(each.finished or each.blocked for each in self.tables)


def sync(
    inlet: Inlet, reader: Reader, state: QueryState, *, stopped: Callable[[], bool] = lambda: False
) -> SyncReport:
    """Land the new rows of every table of ``inlet``. The caller holds the lease of the source.

    ``stopped`` is called after each batch and page; if it returns True, the sync ends, and the next one
    continues from there. A table that is refused does not prevent the reading of others; the caller raises
    the errors in ``faults``. Raises ``AnotherDatabase`` and the errors of the reader; landed batches stay.
    """
    moment = reader.begin()
    try:
        state.claim(moment.database)
        state.reach(moment.high)
        epoch = inlet.store.current_epoch() or inlet.store.begin_epoch(FIRST_EPOCH, None, now=inlet.clock())
        schemas = CursorSchemas(inlet.store, inlet.tables, inlet.learned)
        # A table that a version read which recorded no keys may land nothing for long.
        schemas.keys.note(each for each in inlet.tables if state.progress(each.full_name) is not None)
        schemas.look(reader, moment, epoch.number)
        read = [each for each in inlet.tables if each.cursor is not None and not schemas.blocks(each)]
        epoch = clear_of_sealed(inlet, reader, state, epoch, read)
        with ThreadPoolExecutor(1, thread_name_prefix="landing") as landing:
            run = _Sync(_Target(inlet, epoch, landing, schemas), reader, moment, state, stopped)
            for table in inlet.tables:
                try:
                    run.read(table)
                except QueryRefused as refused:
                    run.report.faults.append(refused)
                    run.report.tables[-1].refused = True
                    reader.step_over()
        run.finish()
        return run.report
    finally:
        reader.end()


def rewind(table: TableContract, state: QueryState, cursor: str | None) -> bool:
    """Make the next reading of ``table`` begin at ``cursor`` (None: at the beginning) if that is lower.

    Returns whether it is. A cursor that is no value of the column is ignored.
    """
    progress = state.progress(table.full_name)
    if progress is None or progress.cursor is None:
        return False
    if table.cursor is None:
        # The reading itself reports the problem.
        return False
    column = CursorColumn.of(table)
    if cursor is not None:
        try:
            given = column.numbers(pa.array([cursor], pa.string()))[0].as_py()
        except QueryRefused:
            given = None
        if given is None or given >= _number(column, progress.cursor):
            return False
    state.rewind(table.full_name, cursor)
    return True


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the rows of a sync land: in ``epoch``, by the single thread of ``pool``. ``schemas``: the schemas
    of its tables, which were already looked at."""

    inlet: Inlet
    epoch: EpochRecord
    pool: ThreadPoolExecutor
    schemas: CursorSchemas


class _Sync:
    """One sync, in one transaction of the source."""

    def __init__(
        self,
        target: _Target,
        reader: Reader,
        moment: Moment,
        state: QueryState,
        stopped: Callable[[], bool],
    ) -> None:
        """``moment``: when the open transaction of ``reader`` began."""
        self.report = SyncReport(target.inlet.store.source, moment.clock)
        self._inlet, self._epoch, self._pool = target.inlet, target.epoch, target.pool
        self._schemas = target.schemas
        self._reader, self._moment, self._state, self._stopped = reader, moment, state, stopped
        self._batches = Batches(self._inlet, self._epoch, self.report.batches)
        self._ended: list[tuple[TableContract, CursorColumn, Progress]] = []
        self._left_a_page = False

    def read(self, table: TableContract) -> None:
        """Land the new rows of ``table``, page by page."""
        known = self._state.progress(table.full_name)
        result = TableSync(table.full_name, cursor=None if known is None else known.cursor)
        self.report.tables.append(result)
        if self._left_a_page:
            # A stopped read leaves the transaction unusable.
            return
        cursor = CursorColumn.of(table)
        if self._schemas.blocks(table):
            result.blocked = True
            return
        progress = self._progress(table, cursor, result)
        reading = progress.reading
        assert reading is not None
        result.full, result.cursor = reading.full, progress.cursor
        page = _Page(self, table, cursor, progress, result)
        while not self._stopped():
            if not reading.nulls and reading.high is None:
                self._ended.append((table, cursor, page.progress))
                result.finished = True
                return
            low = None if reading.nulls else reading.low
            span = Span(reading.nulls, low, reading.high, reading.after, self._inlet.page_rows)
            try:
                count = self._reader.rows(table, cursor, span, page.take)
            except _StoppedWithin:
                self._left_a_page = True
                return
            page.land_all()
            reading = page.reading
            if count < span.limit:
                # The rows without a cursor come first, then those with one.
                done = not reading.nulls
                reading = replace(reading, nulls=False, after=None, high=None if done else reading.high)
                page.turn_to(reading)

    def is_stopped(self) -> bool:
        """Whether the sync must end here; the next sync continues from here."""
        return self._stopped()

    def finish(self) -> None:
        """Land the ends of full readings and the new watermark, then move the cursors of finished tables."""
        self._land_end()
        whole = (table for table, _, each in self._ended if each.reading is not None and each.reading.full)
        self._schemas.keys.settle(whole)
        for table, cursor, progress in self._ended:
            reading = progress.reading
            assert reading is not None
            until = reading.until
            epoch = self._epoch_of(progress)
            done = Progress(epoch, progress.type, until, None, reading.started, cursor.name)
            below = None if until is None else _number(cursor, until) - cursor.lookback
            self._state.save(table.full_name, done, below=below)
            next(each for each in self.report.tables if each.table == table.full_name).cursor = until

    def parts(self) -> EventParts:
        """Return the empty parts of the next batch."""
        return self._batches.parts()

    def land(self, table: TableContract, cursor: CursorColumn, parts: EventParts) -> Future[None]:
        """Land events of ``table`` as one batch, after the batches before it, unless the same batch has
        landed."""
        self._schemas.keys.note([table])
        # If the window follows from the cursor, it follows from the position, so no version can be in two
        # windows.
        return self._pool.submit(self._batches.land, table, parts, free_windows=cursor.event_time is not None)

    def _progress(self, table: TableContract, cursor: CursorColumn, result: TableSync) -> Progress:
        """Return the progress of ``table`` with its unfinished reading, or with one that begins now."""
        found = self._state.progress(table.full_name)
        kind = self._reader.cursor_type(table, cursor)
        progress = found or Progress(self._epoch.number, kind)
        if progress.column not in (None, cursor.name):
            raise QueryRefused(
                f"The cursor of {table.full_name} was {progress.column} and is now {cursor.name}. How far "
                "one was read says nothing of the other, and rows that landed stand by the first.",
                fix=f"Read the table anew: {read_anew(table.source, 'another cursor', table)}. Or give the "
                "contract its former cursor back.",
            )
        progress = replace(progress, column=cursor.name)
        if progress.type != kind:
            raise type_changed(table, cursor, progress.type, kind)
        if progress.reading is not None:
            return progress
        newest = self._reader.newest(table, cursor)
        until = self._until(cursor, newest)
        low = None
        if progress.cursor is not None:
            low = cursor.text(_number(cursor, progress.cursor) - cursor.lookback)
            result.went_back = newest is None or _number(cursor, newest) < _number(cursor, progress.cursor)
        full = progress.cursor is None
        if full:
            self._schemas.read_whole(table)
        reading = UnfinishedReading(self._moment.clock, low, newest, until, full, cursor.nullable, None)
        return replace(progress, reading=reading)

    def _until(self, cursor: CursorColumn, newest: str | None) -> str | None:
        """Return the cursor at the end of a reading that begins now."""
        if newest is None or cursor.kind is not CursorKind.TIME:
            return newest
        clock = micros(self._moment.clock)
        # A cursor ahead of the clock would skip all rows that commit until that time.
        return newest if _number(cursor, newest) <= clock else cursor.text(clock)

    def _land_end(self) -> None:
        """Land the ends of full readings, and up to when the source is complete."""
        inlet, events = self._inlet, []
        for table, cursor, progress in self._ended:
            full = progress.reading is not None and progress.reading.full
            if full and ends_older_rows(progress, self._epoch):
                rows = RowEvents(table, cursor, inlet.grid, self._epoch.number)
                events.append(rows.end(max(self._epoch.began_at, inlet.grid.first)))
        complete = self._complete() if self.report.finished else None
        if not events and not self._passes_a_window(complete):
            return
        self._batches.land_end(events, complete)

    def _complete(self) -> datetime | None:
        """Return the time up to which every table has landed, except for commits later than the lookback."""
        found = []
        for _, cursor, progress in self._ended:
            assert progress.reading is not None
            late = cursor.lookback if cursor.kind is CursorKind.TIME else 0
            found.append(progress.reading.started - timedelta(microseconds=late))
        return min(found, default=None)

    def _passes_a_window(self, complete: datetime | None) -> bool:
        """Whether ``complete`` is in a later window than the watermark; only then does a batch record it."""
        if complete is None:
            return False
        last = self._inlet.store.last_file(self._epoch.number)
        before = None if last is None else last.arrival.watermark
        landed = bool(self.report.batches)
        grid = self._inlet.grid
        return landed or before is None or grid.truncate(complete) > grid.truncate(before)

    def _epoch_of(self, progress: Progress) -> int:
        return self._epoch.number if progress.reading and progress.reading.full else progress.epoch


def type_changed(table: TableContract, cursor: CursorColumn, was: str, now: str) -> QueryRefused:
    """Return the refusal of a reading by ``cursor`` whose column was of another type when ``table`` was last
    read whole."""
    return QueryRefused(
        f"The cursor column {cursor.name} of {table.full_name} was {was} and is now {now}: its values have "
        "another order or another text than those that landed.",
        fix=f"Read the table anew: {read_anew(table.source, 'type of the cursor changed', table)}. Before "
        f"that, see whether the contract has to follow; often its type takes these values too: "
        f"{propose(table)}",
    )


class _StoppedWithin(Exception):
    """Raised to end a page in the middle; its rows so far have landed."""


class _Page:
    """Takes the rows of one table, and lands them before the position of the reading moves."""

    def __init__(
        self, one: _Sync, table: TableContract, cursor: CursorColumn, progress: Progress, told: TableSync
    ) -> None:
        assert progress.reading is not None
        self.progress, self.reading = progress, progress.reading
        self._one, self._table, self._cursor, self._told = one, table, cursor, told
        schema = one._state.schema_number(table.full_name, one._reader.columns(table))
        self._makes = RowEvents(
            table, cursor, one._inlet.grid, one._epoch.number, one._inlet.as_landed, schema
        )
        self._nulls = NullRows(self._makes, one._inlet.store, one._state)
        self._null_rows: list[NullRow] = []
        self._parts = one.parts()
        self._known = Known()
        self._last: KeysetPosition | None = None
        self._landing: _Landing | None = None
        until = self.reading.until
        self._remember = NO_CURSOR if until is None else _number(cursor, until) - cursor.lookback
        self._highest_seen = one._state.highest_seen(table.full_name)

    def take(self, rows: Rows) -> None:
        """Add a block of rows; it lands with the next ``land_all``, or earlier if many have been added."""
        before = self._one._state.versions(self._table.full_name, self._possibly_seen(rows))
        changed = self._nulls.changed(self._makes.of(rows, before, self._known, self._remember))
        events = changed.events
        self._known.again += changed.again
        self._null_rows += changed.rows
        self._told.read += len(rows)
        self._told.landed += events.num_rows
        if events.num_rows:
            self._parts.add(events)
        self._last = rows.last
        if self._parts.bytes >= _BATCH_BYTES:
            self._land()
            if self._one.is_stopped():
                self.land_all()
                raise _StoppedWithin

    def _possibly_seen(self, rows: Rows) -> list[str]:
        """Return the keys of rows of which a version may have landed: their cursor is not above every one
        seen."""
        if self._highest_seen is None:
            return []
        near = pc.less_equal(rows.cursors, self._highest_seen)
        found: list[str] = rows.keys.filter(pc.fill_null(near, False)).to_pylist()
        return found

    def land_all(self) -> None:
        """Land the rows added so far, and save the position of the reading."""
        self._land()
        self._landed()

    def turn_to(self, reading: UnfinishedReading) -> None:
        """Save ``reading`` as the state of the reading."""
        self._save(reading, Known())

    def _land(self) -> None:
        """Begin to land the rows added so far, once those before have landed."""
        self._landed()
        if self._last is None:
            return
        if self._null_rows:
            self._one._state.expect_null_rows(self._table.full_name)
        done = self._one.land(self._table, self._cursor, self._parts) if self._parts.tables else None
        self._landing = _Landing(done, self._last, self._known, self._null_rows)
        self._parts, self._known, self._last, self._null_rows = self._one.parts(), Known(), None, []

    def _landed(self) -> None:
        """Wait for the rows that are landing, then save the position of the reading."""
        if self._landing is None:
            return
        landing, self._landing = self._landing, None
        if landing.done is not None:
            landing.done.result()
        self._told.again += landing.known.again
        self._told.behind += landing.known.behind
        if landing.null_rows:
            self._one._state.remember_null_rows(self._table.full_name, landing.null_rows)
        self._save(replace(self.reading, after=landing.last), landing.known)

    def _save(self, reading: UnfinishedReading, known: Known) -> None:
        self.reading, self.progress = reading, replace(self.progress, reading=reading)
        # A version that landed as plain text lands in another form now, and its old hash would reveal
        # values.
        encrypted = self._table.encrypted_subject is not None
        self._one._state.save(self._table.full_name, self.progress, known.new, replaced=encrypted)


@dataclass(frozen=True, slots=True)
class _Landing:
    """Rows up to ``last`` that are landing. ``done``: None if all of them had landed before. ``null_rows``:
    those without a cursor."""

    done: Future[None] | None
    last: KeysetPosition
    known: Known
    null_rows: list[NullRow]


_BATCH_BYTES = 32 * 1024 * 1024
"""From so many bytes of events on, a batch lands before its page ends."""


def _number(cursor: CursorColumn, text: str) -> int:
    number = cursor.numbers(pa.array([text], pa.string()))[0].as_py()
    assert isinstance(number, int)
    return number
