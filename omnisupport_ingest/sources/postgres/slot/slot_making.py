"""Having a slot made. The server waits for every transaction under way that may write, however long they
take: who it waits for is told, and a stop gives the slot up.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, suppress
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.open_transactions import (
    OpenTransaction,
    listed,
    open_transactions,
)

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 5.0
"""How long the wait goes on before it is told, and between two looks at who is waited for."""

_AGAIN_SECONDS = 60.0
"""After how long the same transactions are told again."""

_CANCEL_SECONDS = 5.0
"""How long the server may take to give the slot up. Then the connection is given up."""


class SlotNotMade(Exception):
    """The caller asked to stop before the slot was made."""


def make_slot(dsn: str, connection: Connection, command: str, stop: threading.Event) -> tuple[Any, ...]:
    """What ``CREATE_REPLICATION_SLOT`` with ``command`` answers on ``connection``, one for replication.

    ``dsn`` is of the same server, to ask who is waited for. Raises ``SlotNotMade``, or what psycopg2 raises.
    """
    # On a thread of its own: while psycopg2 waits, no signal is handled.
    with ThreadPoolExecutor(1, thread_name_prefix="making a slot") as pool:
        made = pool.submit(_execute, connection, f"CREATE_REPLICATION_SLOT {command}")
        waiting = _Waiting(dsn, connection.info.backend_pid)
        try:
            while not stop.is_set():
                with suppress(NotYet):
                    return made.result(_LOOK_SECONDS)
                waiting.tell_when_due()
        finally:
            if not made.done():
                _give_up(connection, made)
    if made.exception() is None:
        # It came before the server heard of the stop.
        return made.result()
    raise SlotNotMade


def _execute(connection: Connection, command: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(command)
        answer: tuple[Any, ...] = cursor.fetchone()
        return answer


class _Waiting:
    """Tells, again and again, whom a session of the server waits for."""

    def __init__(self, dsn: str, pid: int) -> None:
        """``pid``: the server's process of the session; ``dsn``: of the same server."""
        self._dsn, self._pid = dsn, pid
        self._began = time.monotonic()
        self._next_look = self._began + _SILENT_SECONDS
        self._told: set[str] = set()
        self._tell_again = 0.0

    def tell_when_due(self) -> None:
        """Look, if it is time, and log who is waited for, if that is new or was told long ago."""
        if time.monotonic() < self._next_look:
            return
        try:
            found = self._waited_for()
        except IngestError:
            # Whether the server is there is told by the wait itself.
            found = []
        now = time.monotonic()
        self._next_look = now + _SILENT_SECONDS
        names = {each.name for each in found}
        if names and (names != self._told or now >= self._tell_again):
            self._told, self._tell_again = names, now + _AGAIN_SECONDS
            _log.warning(
                "the making of the replication slot waits for transactions that were under way when it "
                "began: %s. It has waited for %.0f s; a transaction of any database of the server counts",
                listed(found),
                now - self._began,
            )

    def _waited_for(self) -> list[OpenTransaction]:
        """Those that began before the wait did, and whoever is waited for at this moment."""
        with (
            source_errors("looking for transactions"),
            closing(connect(self._dsn)) as connection,
            connection.cursor() as cursor,
        ):
            waited = time.monotonic() - self._began
            # It names one of them at a time, and a prepared one by no name.
            cursor.execute("SELECT pg_blocking_pids(%s)", (self._pid,))
            (blocking,) = cursor.fetchone()
            return [
                each
                for each in open_transactions(connection)
                if each.pid is None or each.pid in blocking or each.seconds is None or each.seconds >= waited
            ]


def _give_up(connection: Connection, made: Future[tuple[Any, ...]]) -> None:
    with suppress(psycopg2.Error):
        connection.cancel()
    with suppress(Exception):
        made.result(_CANCEL_SECONDS)
    if not made.done():
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
