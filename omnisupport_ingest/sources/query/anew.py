"""In which epoch a table is read whole: in a new one if that was requested, or if its old rows would land in
windows that may be sealed.

A sealed window takes nothing in: what lands in it waits in quarantine, and nobody can release it. So where
windows are given up by age, an epoch records from when on rows stand in their own windows (``rows_from``);
older rows land in the window of that moment. A table that a source gets later, that was blocked at its first
reading, or whose cursor is lost is read in such an epoch without a request. A table without rows is read
whole in every sync; it needs such an epoch only for its first end, and as soon as it has rows.

Here nothing is known of the lake, so a window counts as sealed as soon as it may be. The watermark stands
while a full reading is not finished, so no window becomes old under it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.kept_positions import last_kept_window
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.cursor import CursorColumn, CursorKind
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.landed_key import ReadingKeys
from omnisupport_ingest.sources.query.reader import Reader, Span
from omnisupport_ingest.sources.query.state import Progress, QueryState
from omnisupport_ingest.windows import KEY_FORMAT

CLEAR_OF_SEALED = "a table is read whole, and windows of its rows may be sealed"
"""Reason of an epoch that ``clear_of_sealed`` begins."""


def refresh(
    inlet: Inlet,
    state: QueryState,
    tables: Sequence[TableContract],
    reason: str,
    live: Mapping[str, LiveSchema] | None = None,
) -> int:
    """Begin an epoch in which the next sync reads ``tables`` whole; return its number.

    When that reading is finished, rows that only older epochs have are ended. Where windows are given up by
    age, all rows of it that are older land in the window of this moment. A caller thereby accepts the schema
    changes of ``tables`` that are known by now. ``live``: the tables as they are now, by contract name, for
    what becomes of their keys; None: they are as the last reading saw them.
    """
    epoch = _begin(inlet, state, {each.full_name for each in tables}, reason)
    keys = ReadingKeys(inlet.store.folder)
    if live is not None:
        # Otherwise a key that went since the last reading is noticed only by the next sync, which then blocks
        # the table until it is refreshed once more.
        keys.look(tables, live)
    keys.begin(tables, epoch.number)
    if all(state.progress(each.full_name) is None for each in inlet.tables):
        # The cursors of the former database no longer matter, so from now on it may be another database.
        state.forget_all()
    # Last: if the process dies before this, the request is made again, and a blocked table is not read
    # meanwhile.
    SchemaChanges(inlet.store.folder).accept([each.name for each in tables])
    return epoch.number


def clear_of_sealed(
    inlet: Inlet, reader: Reader, state: QueryState, epoch: EpochRecord, tables: Sequence[TableContract]
) -> EpochRecord:
    """Return the epoch in which a sync reads ``tables``: ``epoch``, or one that begins now because one of
    them is read whole and its rows could land in a sealed window of ``epoch``.

    So is a table that was not read for so long that the windows of that time may be sealed. As after
    ``refresh``, rows of the tables read whole are ended that only older epochs have. ``reader``: in the
    transaction of the sync. Every one of ``tables`` names a cursor.
    """
    progress = {each.full_name: state.progress(each.full_name) for each in tables}
    whole = [each for each in tables if _is_read_whole(progress[each.full_name])]
    behind = {each.full_name for each in tables if _fell_behind(inlet, each, progress[each.full_name])}
    if not behind:
        if not whole or not _meets_sealed(inlet, epoch):
            return epoch
        # Else a table without rows would begin an epoch whenever the last one is as old as raw is kept.
        if not any(
            ends_older_rows(progress[each.full_name], epoch) or _has_rows(reader, each) for each in whole
        ):
            return epoch
    return _begin(inlet, state, behind.union(each.full_name for each in whole), CLEAR_OF_SEALED)


def ends_older_rows(progress: Progress | None, epoch: EpochRecord) -> bool:
    """Whether the end of a full reading in ``epoch`` lands. ``progress``: of its table before that end.

    The first end after a table was forgotten does, as all of its rows land in ``epoch``. Later, unchanged
    rows do not land again: another end would end them if ``epoch`` began for another table. The first epoch
    has no older rows.
    """
    return epoch.number > 1 and (progress is None or progress.finished is None)


def _begin(inlet: Inlet, state: QueryState, whole: Collection[str], reason: str) -> EpochRecord:
    # First: a half-read table that went on in the new epoch would end the rows that it landed in the old one.
    for table in inlet.tables:
        progress = state.progress(table.full_name)
        half_read = progress is not None and progress.reading is not None and progress.reading.full
        if table.full_name in whole or half_read:
            state.forget(table.full_name)
    now = inlet.clock()
    # The windows of old rows may be sealed, or be sealed while they are read.
    given_up = _keep(inlet) is not None or last_kept_window(inlet.store.folder) is not None
    return inlet.store.begin_epoch(reason, None, now=now, rows_from=now if given_up else None)


def _is_read_whole(progress: Progress | None) -> bool:
    """Whether the next sync begins or continues a full reading of a table."""
    if progress is None or progress.reading is None:
        return progress is None or progress.cursor is None
    return progress.reading.full


def _has_rows(reader: Reader, table: TableContract) -> bool:
    """Whether ``table`` has a row now. One that cannot be read has none: its reading reports the problem."""
    cursor = CursorColumn.of(table)
    try:
        if reader.newest(table, cursor) is not None:
            return True
        without_cursor = Span(nulls=True, low=None, high=None, after=None, limit=1)
        return cursor.nullable and reader.rows(table, cursor, without_cursor, lambda _rows: None) > 0
    except QueryRefused:
        reader.step_over()
        return False


def _fell_behind(inlet: Inlet, table: TableContract, progress: Progress | None) -> bool:
    """Whether ``table`` was last read, or last began to be, in a window that may be sealed by now.

    It was blocked, while the watermark of the others went on.
    """
    if progress is None:
        return False
    reading, keep, reached = progress.reading, _keep(inlet), _reached(inlet, progress.epoch)
    since = progress.finished if reading is None else reading.started
    if since is None or keep is None or reached is None:
        return False
    cursor = CursorColumn.of(table)
    if cursor.kind is CursorKind.TIME:
        since -= timedelta(microseconds=cursor.lookback)
    return inlet.grid.truncate(since) + inlet.grid.size.length + keep <= reached


def _meets_sealed(inlet: Inlet, epoch: EpochRecord) -> bool:
    """Whether a window may be sealed in which a row of ``epoch`` lands by its time."""
    grid = inlet.grid
    lowest = grid.truncate(epoch.rows_from or grid.first)
    keep, reached = _keep(inlet), _reached(inlet)
    if keep is not None and reached is not None and lowest + grid.size.length + keep <= reached:
        return True
    # Contracts that keep everything today may have given up windows before.
    kept = last_kept_window(inlet.store.folder)
    return kept is not None and lowest.strftime(KEY_FORMAT) <= kept


def _keep(inlet: Inlet) -> timedelta | None:
    """Return how long raw of the source is kept; None: without end. The table that needs it longest
    decides."""
    limits = [table.retention.raw for table in inlet.tables]
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def _reached(inlet: Inlet, since: int = 0) -> datetime | None:
    """Return the highest watermark that the source has had from the epoch ``since`` on; None before the
    first."""
    standings = (each for each in inlet.store.epoch_standings() if each.epoch >= since)
    return max((each.mark for each in standings if each.mark is not None), default=None)
