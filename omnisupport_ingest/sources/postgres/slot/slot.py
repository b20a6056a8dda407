"""Makes and drops the replication slot of a source, and gives the exact snapshot that a new slot exports.

To make a slot, the server waits for every open transaction that may write, however long that takes. The log
names these transactions, and a stop ends the wait.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg2
from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import connect, connect_replication, source_errors
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, SlotInUse
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.server import (
    OpenTransaction,
    SlotFacts,
    listed,
    open_transactions,
    slot_facts,
    slot_in_use,
)

_log = logging.getLogger(__name__)


_CHECK_SECONDS = 0.1
_SILENT_SECONDS = 5.0
"""Seconds until the wait is first logged, and between two queries of the transactions that block it."""

_AGAIN_SECONDS = 60.0
"""Seconds after which unchanged transactions are logged again."""

_CANCEL_SECONDS = 5.0
"""Seconds that the server may take to cancel the command. After that, the connection is closed."""


class SlotNotMade(Exception):
    """Raised when the caller stops before the slot is made."""


def make_slot(dsn: str, connection: Connection, command: str, stop: threading.Event) -> tuple[Any, ...]:
    """Run ``CREATE_REPLICATION_SLOT`` with ``command`` on the replication ``connection``; return its row.

    ``dsn``: of the same server, to query the transactions that the server waits for. Raises ``SlotNotMade``
    if ``stop`` is set first, and psycopg2's errors.
    """
    # In a separate thread, because Python handles no signal while psycopg2 waits.
    with ThreadPoolExecutor(1, thread_name_prefix="making a slot") as pool:
        future = pool.submit(_execute, connection, f"CREATE_REPLICATION_SLOT {command}")
        waiting = _Waiting(dsn, connection.info.backend_pid)
        try:
            while not stop.is_set():
                with suppress(NotYet):
                    return future.result(_CHECK_SECONDS)
                waiting.log_when_due()
        finally:
            if not future.done():
                _give_up(connection, future)
    if future.exception() is None:
        # The server answered before it received the cancellation.
        return future.result()
    raise SlotNotMade


def _execute(connection: Connection, command: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        # No failpoint: for a permanent slot, ``source.slot`` is around the call; a temporary slot ends with
        # its session.
        cursor.execute(command)
        answer: tuple[Any, ...] = cursor.fetchone()
        return answer


class _Waiting:
    """Logs at intervals which transactions the server waits for while it makes a slot."""

    def __init__(self, dsn: str, pid: int) -> None:
        """``pid``: the server process that makes the slot. ``dsn``: of the same server."""
        self._dsn, self._pid = dsn, pid
        self._began = time.monotonic()
        self._next_query = self._began + _SILENT_SECONDS
        self._logged: set[str] = set()
        self._log_again = 0.0

    def log_when_due(self) -> None:
        """If it is time, query the transactions; log them if they changed or were last logged long ago."""
        if time.monotonic() < self._next_query:
            return
        try:
            transactions = self._waited_for()
        except IngestError:
            # If the server is gone, the wait itself raises the error.
            transactions = []
        now = time.monotonic()
        self._next_query = now + _SILENT_SECONDS
        names = {each.name for each in transactions}
        if names and (names != self._logged or now >= self._log_again):
            self._logged, self._log_again = names, now + _AGAIN_SECONDS
            _log.warning(
                "the making of the replication slot waits for transactions that were under way when it "
                "began: %s. It has waited for %.0f s; a transaction of any database of the server counts",
                listed(transactions),
                now - self._began,
            )

    def _waited_for(self) -> list[OpenTransaction]:
        """Return the transactions that began before the wait did, and those that block it now."""
        with (
            source_errors("looking for transactions"),
            closing(connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            waited = time.monotonic() - self._began
            # The server names only one blocker at a time, and never a prepared transaction.
            cursor.execute("SELECT pg_blocking_pids(%s)", (self._pid,))
            (blocking,) = cursor.fetchone()
            return [
                each
                for each in open_transactions(connection)
                if each.pid is None or each.pid in blocking or each.seconds is None or each.seconds >= waited
            ]


def _give_up(connection: Connection, future: Future[tuple[Any, ...]]) -> None:
    with suppress(psycopg2.Error):
        connection.cancel()
    with suppress(Exception):
        future.result(_CANCEL_SECONDS)
    if not future.done():
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


_FLUSH_MILLISECONDS = 1000


class ConsistentSnapshot(NamedTuple):
    """A snapshot that contains exactly the transactions that committed below ``consistent_point``.

    ``name``: for ``SET TRANSACTION SNAPSHOT``; valid while the context that returned it is open.
    """

    consistent_point: Lsn
    name: str


def create_slot(dsn: str, name: str, stop: threading.Event) -> Lsn:
    """Create the permanent slot ``name``; return its consistent point, where its stream starts.

    Waits for the transactions that are running now. Raises ``SlotNotMade`` if ``stop`` is set first,
    ``SlotInUse`` if the name is taken, ``PreflightFailed`` if the server has no free slot, and
    ``SourceUnavailable``.
    """
    connection = connect_replication(dsn)
    try:
        with failpoint("source.slot"):
            point, _ = _create(
                dsn, connection, f"{identifier(name)} LOGICAL pgoutput NOEXPORT_SNAPSHOT", stop
            )
        return point
    except sql_errors.DuplicateObject:
        raise slot_taken(name) from None
    finally:
        connection.close()


def slot_taken(name: str, slot: SlotFacts | None = None) -> SlotInUse:
    """Return the error for a slot that this home has not created. ``slot``: its facts, if known."""
    about = ""
    if slot is not None:
        state = f"read by {slot.reader}" if slot.reader else "nobody reads it now"
        about = f" ({slot.plugin or 'physical'}, database {slot.database or 'none'}, {state})"
    return SlotInUse(
        f"The replication slot {name} exists on the server{about}, but this home has not created it.",
        fix="If another home captures through it, set OMNISUPPORT_SLOT to another name. If not, drop it: "
        f"SELECT pg_drop_replication_slot({literal(name)});",
    )


def drop_slot(connection: Connection, name: str) -> None:
    """Drop the slot ``name`` if it exists. Raises ``SlotInUse`` while a process reads from it."""
    with source_errors("dropping the replication slot"), connection.cursor() as cursor:
        try:
            with failpoint("source.slot_drop"):
                cursor.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    (name,),
                )
        except sql_errors.ObjectInUse:
            reader = getattr(slot_facts(connection, name), "reader", None)
            if reader is not None:
                raise slot_in_use(name, reader) from None
            raise SlotInUse(
                f"The replication slot {name} was being read from a moment ago.", fix="Try again."
            ) from None


@contextmanager
def consistent_snapshot(dsn: str, stop: threading.Event | None = None) -> Iterator[ConsistentSnapshot]:
    """Open an exact snapshot of the database, with the LSN it stands for, by a temporary slot.

    The slot is dropped when the context ends. Waits for the transactions that are running at the start.
    Raises ``SlotNotMade`` if ``stop`` is set first, ``PreflightFailed`` if the server has no free slot, and
    ``SourceUnavailable``.
    """
    connection = connect_replication(dsn)
    name = _temporary_name()
    try:
        command = f"{identifier(name)} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
        point, snapshot = _create(dsn, connection, command, stop or threading.Event())
        yield ConsistentSnapshot(point, snapshot)
    finally:
        connection.close()


def flush_wal(dsn: str) -> None:
    """Make the server flush the WAL written so far, which making a temporary logical slot does.

    Otherwise the server flushes WAL without a commit only after seconds, and the stream sends nothing of it
    before. The slot is given up if it would have to wait for transactions. Does nothing if no slot is free.
    """
    connection = connect(dsn)
    try:
        with suppress(psycopg2.Error), connection.cursor() as cursor:
            cursor.execute(f"SET statement_timeout = {_FLUSH_MILLISECONDS}")
            # No failpoint: a temporary slot, which ends with its session.
            cursor.execute(
                "SELECT FROM pg_create_logical_replication_slot(%s, 'pgoutput', true)", (_temporary_name(),)
            )
    finally:
        connection.close()


def _temporary_name() -> str:
    return f"omnisupport_tmp_{os.getpid()}_{secrets.token_hex(4)}"


def _create(dsn: str, connection: Connection, command: str, stop: threading.Event) -> tuple[Lsn, str]:
    with source_errors("creating a replication slot"):
        try:
            _, point, snapshot, _ = make_slot(dsn, connection, command, stop)
        except psycopg2.errors.ConfigurationLimitExceeded:
            raise PreflightFailed(
                "All replication slots of the server are in use.",
                fix="ALTER SYSTEM SET max_replication_slots = 20;  -- then restart PostgreSQL",
            ) from None
    return Lsn.parse(point), snapshot
