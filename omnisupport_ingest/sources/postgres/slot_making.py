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
from omnisupport_ingest.sources.postgres.connection import connect, source_errors

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 5.0
"""How long the wait goes on before it is told, and between two looks at who is waited for."""

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
        next_look, told = time.monotonic() + _SILENT_SECONDS, ""
        try:
            while not stop.is_set():
                with suppress(NotYet):
                    return made.result(_LOOK_SECONDS)
                if time.monotonic() >= next_look:
                    told = _tell(dsn, connection.info.backend_pid, told)
                    next_look = time.monotonic() + _SILENT_SECONDS
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


def _tell(dsn: str, pid: int, told: str) -> str:
    """Log whom the server session ``pid`` waits for, if that was not ``told`` already; returns who it is."""
    try:
        with (
            source_errors("looking for transactions"),
            closing(connect(dsn)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT DISTINCT unnest(pg_blocking_pids(%s)) ORDER BY 1", (pid,))
            found = cursor.fetchall()
    except IngestError:
        # Whether the server is there is told by the wait itself.
        return told
    named = ", ".join("a prepared one" if each == 0 else f"of process {each}" for (each,) in found)
    if named and named != told:
        _log.warning(
            "the making of the replication slot waits for transactions that were under way when it began: %s",
            named,
        )
    return named or told


def _give_up(connection: Connection, made: Future[tuple[Any, ...]]) -> None:
    with suppress(psycopg2.Error):
        connection.cancel()
    with suppress(Exception):
        made.result(_CANCEL_SECONDS)
    if not made.done():
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
