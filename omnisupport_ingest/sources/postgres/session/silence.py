"""Detects a silent source: nothing arrives any more, and nothing closes the connection.

A proxy, a firewall or a frozen machine may stop forwarding and still answer the kernel's keepalives. A reader
then waits without end. Silence alone proves nothing, because a statement may wait hours for a lock. So after
a while, another connection asks the server what the silent session is doing. If the session is working, the
wait goes on. If the session waits for us or is gone, or the other connection gets no answer either, the
silent connection is closed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg2
from psycopg2.errors import InternalError_
from psycopg2.extensions import POLL_OK, POLL_READ, TRANSACTION_STATUS_IDLE, cursor
from psycopg2.extensions import connection as Connection
from psycopg2.extras import ReplicationCursor

from omnisupport_ingest.sources.postgres.session.connect_errors import first_line

DEFAULT_SECONDS = 60.0
"""Default for how long, in seconds, a source may be silent before the server is asked about the session."""

_ASK_SECONDS = 10.0
"""Seconds, at most, to open the other connection and get its answer."""

_AGAIN_SECONDS = 1.0
"""Seconds after which a session that waits for us is checked again: its answer may have been on the way."""

_CHECK_SECONDS, _IDLE_SECONDS = 0.5, 60.0
"""Seconds between two checks of all waits; seconds without a wait until the checking thread ends."""

_WAITS_FOR_US = ("clientread", "clientwrite", "walsendermain", "walsenderwritedata")
_STREAM_WAITS = (*_WAITS_FOR_US, "walsenderwaitforwal")
"""Wait events of a session that only waits to send to us, or to hear from us. A walsender that makes a slot
waits for WAL too, so that event counts only for a walsender that streams: it has sent everything."""

# Layout of struct tcp_info on Linux: eight bytes, then words of 32 bits. The twelfth word: milliseconds since
# data arrived.
_LAST_DATA_AT, _TCP_INFO_BYTES = 8 + 11 * 4, 104


@dataclass(frozen=True, slots=True)
class Silence:
    """How many ``seconds`` of silence are tolerated; ``parameters`` of a connection that asks the server."""

    seconds: float
    parameters: Mapping[str, str]

    def explained(self, pid: int, *, streaming: bool = False) -> str | None:
        """Return None if session ``pid`` is working; else a clause that says why nothing will come from it.

        ``streaming``: the session is a walsender that streams. Takes up to about 20 seconds.
        """
        waiting = self._waiting(pid, streaming)
        if waiting is not None and waiting.may_pass:
            time.sleep(_AGAIN_SECONDS)
            waiting = self._waiting(pid, streaming)
        return None if waiting is None else waiting.clause

    def end(self, pid: int) -> None:
        """Make the server end our abandoned session ``pid``, which would keep its slot and locks for a while.

        Does nothing if the server does not answer.
        """
        with suppress(psycopg2.Error, OSError):
            self._first_row(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s"
                " AND usename = current_user AND application_name = current_setting('application_name')",
                pid,
            )

    def _first_row(self, question: str, pid: int) -> tuple[Any, ...] | None:
        return _first_row(self.parameters, question, pid, min(_ASK_SECONDS, self.seconds))

    def _waiting(self, pid: int, streaming: bool) -> _WaitCause | None:
        try:
            row = self._first_row("SELECT state, wait_event FROM pg_stat_activity WHERE pid = %s", pid)
        except (psycopg2.Error, OSError) as error:
            # A server that refuses one more session has answered, so it is alive.
            if "FATAL" in str(error):
                return None
            return _WaitCause(f"another connection gets no answer either ({first_line(error)})", False)
        if row is None:
            return _WaitCause(f"the server has no session {pid} any more", False)
        state, event = row
        if state == "active" and (event or "").lower() not in (_STREAM_WAITS if streaming else _WAITS_FOR_US):
            return None
        return _WaitCause(f"the server has sent all that its session {pid} had to send", True)


@dataclass(frozen=True, slots=True)
class _WaitCause:
    clause: str
    may_pass: bool


def _first_row(
    parameters: Mapping[str, str], question: str, pid: int, seconds: float
) -> tuple[Any, ...] | None:
    """Return the first row that the query ``question`` about session ``pid`` gives; None for no row.

    Raises psycopg2's errors, also if it takes longer than ``seconds``.
    """
    give_up = time.monotonic() + seconds
    connection = psycopg2.connect(**parameters, async_=True)
    try:
        _wait(connection, give_up)
        with connection.cursor() as asking:
            # No failpoint: a query, or the end of one of our own sessions.
            asking.execute(question, (pid,))
            _wait(connection, give_up)
            row: tuple[Any, ...] | None = asking.fetchone()
        return row
    finally:
        connection.close()


def _wait(connection: Connection, give_up: float) -> None:
    while (wants := connection.poll()) != POLL_OK:
        ready = select.poll()
        ready.register(connection.fileno(), select.POLLIN if wants == POLL_READ else select.POLLOUT)
        if not ready.poll(max(0.0, give_up - time.monotonic()) * 1000):
            raise psycopg2.OperationalError("none in time")


class Awaited:
    """A context around one wait for the server. If the connection is silent for too long, it is shut down.

    The wait then fails with an ``OperationalError`` that says so.
    """

    def __init__(self, connection: Connection, silence: Silence) -> None:
        self._silence, self._pid = silence, connection.info.backend_pid
        self._descriptor = connection.fileno()
        self._lock, self._over, self._asking = threading.Lock(), False, False
        self._since: float | None = time.monotonic()
        self._given_up: str | None = None

    def __enter__(self) -> Self:
        _WATCH.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _WATCH.remove(self)
        with self._lock:
            self._over = True
        if isinstance(error, psycopg2.Error):
            self.raise_if_given_up()

    def raise_if_given_up(self) -> None:
        """Raise ``OperationalError`` if the connection was shut down because of silence."""
        if self._given_up is not None:
            raise psycopg2.OperationalError(self._given_up)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Return a context in which silence is expected: we are working, and the server waits for us."""
        self._since = None
        try:
            yield
        finally:
            self._since = time.monotonic()

    def check(self) -> None:
        """Ask the server about the session if it was silent for too long. Does not wait for the answer."""
        if not self._asking and self._silent_seconds() >= self._silence.seconds:
            self._asking = True
            threading.Thread(target=self._ask, name="asking after a session", daemon=True).start()

    def _ask(self) -> None:
        why = self._silence.explained(self._pid)
        # Data may have arrived while the server was asked.
        silent = self._silent_seconds()
        if why is not None and silent >= self._silence.seconds:
            self._give_up(f"nothing has come from it for {silent:.0f} seconds, and {why}")
            self._silence.end(self._pid)
        elif self._since is not None:
            self._since = time.monotonic()
        self._asking = False

    def _silent_seconds(self) -> float:
        since = self._since
        if since is None:
            return 0.0
        waited = time.monotonic() - since
        if waited < self._silence.seconds:
            return waited
        with self._lock:
            # Once the wait is over, the descriptor may belong to another file.
            came = 0.0 if self._over else _since_data_came(self._descriptor)
        return waited if came is None else min(waited, came)

    def _give_up(self, why: str) -> None:
        with self._lock:
            # Only the waiting thread closes the connection, and only after this.
            if not self._over:
                self._given_up = why
                with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as same:
                    same.shutdown(socket.SHUT_RDWR)


class _Watch:
    """The waits of this process, checked by one thread: a thread each would cost more than most waits."""

    def __init__(self) -> None:
        self._waits: set[Awaited] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, wait: Awaited) -> None:
        with self._lock:
            self._waits.add(wait)
            # A thread that is not alive belongs to the process that this one was forked from.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="silence", daemon=True)
                self._thread.start()

    def remove(self, wait: Awaited) -> None:
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_CHECK_SECONDS)
            with self._lock:
                waits = list(self._waits)
                if waits:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > _IDLE_SECONDS:
                    self._thread = None
                    return
            for wait in waits:
                wait.check()


_WATCH = _Watch()


def _since_data_came(descriptor: int) -> float | None:
    """Return the seconds since a TCP connection last received data; None if that is unknown."""
    if sys.platform != "linux":
        return None
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family in (socket.AF_INET, socket.AF_INET6):
            info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (milliseconds,) = struct.unpack_from("=I", info, _LAST_DATA_AT)
            return float(milliseconds) / 1000
    return None


_DROPPED_MEANWHILE = ("could not open relation with OID", "cache lookup failed for")
"""Messages of a catalog query that met a dropped relation. The server never translates them."""

_MOST_TRIES = 10
"""How many times, at most, a query that meets dropped relations is sent."""


class AwaitedCursor(cursor):  # type: ignore[misc]  # psycopg2 ships no types
    """A cursor of a connection with a ``silence``. Its calls that wait for the server are watched.

    A catalog query fails if any relation is dropped while it runs (``pg_publication_tables`` opens each one).
    Outside transactions, such a query is sent again.
    """

    def execute(self, query: Any, parameters: Any = None) -> None:
        for _ in range(_MOST_TRIES - 1):
            try:
                self._execute(query, parameters)
            except InternalError_ as error:
                alone = self.connection.info.transaction_status == TRANSACTION_STATUS_IDLE
                if not alone or not str(error).startswith(_DROPPED_MEANWHILE):
                    raise
            else:
                return
        self._execute(query, parameters)

    def _execute(self, query: Any, parameters: Any) -> None:
        with Awaited(self.connection, self.connection.silence):
            # No failpoint: its callers put one around the call.
            super().execute(query, parameters)

    def fetchmany(self, size: int = 1) -> list[tuple[Any, ...]]:
        if self.name is None:
            return list(super().fetchmany(size))
        # Only a server-side cursor has to wait here.
        with Awaited(self.connection, self.connection.silence):
            return list(super().fetchmany(size))


class AwaitedReplicationCursor(ReplicationCursor):  # type: ignore[misc]
    """A cursor for replication commands, watched like ``AwaitedCursor``."""

    def execute(self, query: Any, parameters: Any = None) -> None:
        with Awaited(self.connection, self.connection.silence):
            # No failpoint: its callers put one around the call.
            super().execute(query, parameters)
