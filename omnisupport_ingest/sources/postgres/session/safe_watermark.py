"""The safe low watermark of a read: an LSN such that every commit below it is visible to the read.

The current end of the WAL is not safe. PostgreSQL writes the commit record first, and makes the transaction
visible later, after the flush and the answer of a synchronous standby. A read in between finds the old row,
although the commit lies below the end of the WAL. A transaction releases the lock on its own id only when it
is visible. So: read an LSN, then list the holders of such locks. The LSN is safe for every snapshot that sees
all these holders as finished. This locks no table and writes nothing at the source. It works only on the
primary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused
from omnisupport_ingest.sources.postgres.session.server import STANDBY, standby_fix

_WAL_PAGE = 8192
"""Bytes of a WAL page."""

_PAGE_HEADERS = (24, 40)
"""Bytes of the header of a WAL page: the short header, and the long header of a file's first page."""

_KEPT_MARKS = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """An LSN, the server's ``clock`` read with it, and the transactions that were open just after it.

    ``holders``: their 64-bit ids, as in ``pg_current_snapshot``.
    """

    lsn: Lsn
    clock: datetime
    holders: frozenset[int]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which transactions a snapshot sees as finished: all below ``xmax`` that are not in ``running``."""

    xmax: int
    running: frozenset[int]

    def unfinished(self, ids: Iterable[int]) -> frozenset[int]:
        """Return those of ``ids`` that may commit, or become visible, after this snapshot was taken.

        Sub-transactions look finished here, but their top transaction is always in the same ``Mark``.
        """
        return frozenset(each for each in ids if each >= self.xmax or each in self.running)


class SafeWatermarks:
    """The marks read so far; every read takes the newest mark that is safe for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: deque[Mark] = deque(maxlen=_KEPT_MARKS)
        self._proven: Mark | None = None

    def offer(self, mark: Mark) -> tuple[Mark, ...]:
        """Add a new mark; return the marks that a snapshot taken from now on may use.

        The snapshot must not use a mark that another read offers later: before that mark, a transaction may
        commit, become visible and release its id, and the earlier snapshot does not see it.
        """
        with self._lock:
            self._marks.append(mark)
            return (*self._marks,) if self._proven is None else (self._proven, *self._marks)

    def newest_safe(self, known: Iterable[Mark], visibility: Visibility) -> Mark | None:
        """Return the newest of ``known`` that is safe for a snapshot with this ``visibility``, or None.

        ``known``: what ``offer`` returned before the snapshot was taken. A lower watermark stays safe. So an
        older mark is used while a long transaction makes the new ones unsafe.
        """
        safe = [mark for mark in known if not visibility.unfinished(mark.holders)]
        newest = max(safe, key=lambda mark: mark.lsn, default=None)
        with self._lock:
            if newest is not None and (self._proven is None or newest.lsn > self._proven.lsn):
                self._proven = newest
        return newest


def read_mark(connection: Connection) -> Mark:
    """Read a new mark. ``connection`` must be in autocommit. Raises ``SourceRefused`` on a standby."""
    with source_errors("reading a watermark"), connection.cursor() as cursor:
        # Separate statements, because the mark depends on their order.
        try:
            cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
        except sql_errors.ObjectNotInPrerequisiteState:
            raise SourceRefused(STANDBY, fix=standby_fix(connection)) from None
        lsn = page_end(Lsn.parse(cursor.fetchone()[0]))
        cursor.execute(
            "SELECT transactionid::text::bigint FROM pg_locks"
            " WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        )
        short = [row[0] for row in cursor.fetchall()]
        cursor.execute("SELECT clock_timestamp(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        clock, xmax = cursor.fetchone()
    return Mark(lsn, clock, frozenset(widened(each, xmax) for each in short))


def read_visibility(connection: Connection) -> Visibility:
    """Return what the snapshot of the open transaction sees. Takes the snapshot if there is none."""
    with source_errors("reading what a snapshot sees"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_snapshot_xmax(s)::text::bigint,"
            " ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(s) x) FROM pg_current_snapshot() s"
        )
        xmax, running = cursor.fetchone()
    return Visibility(xmax, frozenset(running))


def read_high(connection: Connection) -> Lsn:
    """Return an LSN above every commit that the snapshot of ``connection``, taken before, can see."""
    with source_errors("reading the end of the WAL"), connection.cursor() as cursor:
        # The insert position, not the flushed one: an asynchronous commit is visible before its flush.
        cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
        (text,) = cursor.fetchone()
    return page_end(Lsn.parse(text))


def widened(xid: int, near: int) -> int:
    """Return the 64-bit transaction id closest to ``near`` whose lower 32 bits are ``xid``."""
    span = 1 << 32
    wide = near - near % span + xid
    if wide - near > span // 2:
        return wide - span
    return wide + span if near - wide > span // 2 else wide


def page_end(insert: Lsn) -> Lsn:
    """Return the insert position as the stream reports it: the start of a WAL page, not its header's end.

    If the WAL ends with a full page, the insert position is after the header of a page that does not exist
    yet. The stream does not report that position until something is written there.
    """
    behind = insert.value % _WAL_PAGE
    return Lsn(insert.value - behind) if behind in _PAGE_HEADERS else insert


REMEMBER_SECONDS = 60.0
"""Seconds between two writes of a record in which only the watermark changed."""


class CatalogWatermarks:
    """Safe watermarks of successive reads of one server's catalogs."""

    def __init__(self) -> None:
        self._marks = SafeWatermarks()

    def next(self, connection: Connection) -> Lsn:
        """Return an LSN such that later statements see everything that committed below it; 0 if unknown.

        ``connection`` must be in autocommit. Raises ``SourceRefused`` on a standby.
        """
        known = self._marks.offer(read_mark(connection))
        # The statements that follow have newer snapshots, which see at least as much.
        mark = self._marks.newest_safe(known, read_visibility(connection))
        return Lsn(0) if mark is None else mark.lsn
