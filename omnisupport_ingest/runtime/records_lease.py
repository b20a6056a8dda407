"""A lock in the PostgreSQL of Dagster's records, so that only one daemon works with them.

Machines with homes of their own may share a lake in one bucket and Dagster's records in one PostgreSQL. Two
daemons at once would request every run twice and end each other's runs. So a daemon first takes a lock in
that database, with a session of its own; another daemon waits until that session ends, for whatever reason.

Only the server decides who has the lock; no machine's clock does. A daemon whose session is lost ends within
seconds. If a daemon hangs and sends no heartbeat, a waiting daemon ends its session.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from omnisupport_ingest.runtime.dagster_home import without_driver

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_LOCK = (0x6F6D6E69, 1)
"""The two numbers of the advisory lock. An advisory lock is per database."""

_LOOK_SECONDS = 5.0
"""Seconds between two checks: the holder checks its session, a waiting daemon checks the lock."""

_ANSWER_SECONDS = 5

HUNG_SECONDS = 300
"""Dagster's daemon records a heartbeat every 30 seconds. Without one for so long, it loses the lock."""

_NAME = "omnisupport_ingest: daemon on "

_KEPT_ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""libpq's settings, in seconds, which the server uses too: each side notices within half a minute that the
other machine is gone."""

_HOLDER = """
SELECT a.pid, a.application_name, a.backend_start
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s AND l.objid = %s AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

_END_HUNG = f"""
SELECT pg_terminate_backend(holder.pid) FROM ({_HOLDER}) AS holder
WHERE make_interval(secs => %s) < now() - greatest(
    holder.backend_start, (SELECT max(timestamp) AT TIME ZONE 'UTC' FROM daemon_heartbeats))
"""


class RecordsLease:
    """The lock, held by this process; made by ``wait_for``."""

    def __init__(self, session: Connection) -> None:
        self._session = session

    @classmethod
    def wait_for(cls, url: str, report: Callable[[str], None]) -> Self:
        """Take the lock of the records at ``url``; wait while another daemon has it.

        ``report`` is called with the daemon that it waits for, and when the wait is over. Each try uses a new
        session, so the holder's session began when it got the lock. Raises ``psycopg2.Error`` if the server
        does not answer.
        """
        waits_for = None
        while True:
            session = _session(url)
            with session.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", _LOCK)
                if cursor.fetchone() == (True,):
                    if waits_for is not None:
                        report("It is gone: this daemon goes on.")
                    return cls(session)
                held_by = _held_by(cursor)
                if held_by is not None and held_by != waits_for:
                    waits_for = held_by
                    report(f"The daemon on {held_by} has these records of Dagster: this one stands by.")
                _end_hung(cursor)
            session.close()
            time.sleep(_LOOK_SECONDS)

    def keep(self, lost: Callable[[], None]) -> None:
        """Call ``lost``, on a thread, as soon as the session has ended: another daemon may then take over."""
        threading.Thread(target=self._watch, args=(lost,), daemon=True).start()

    def _watch(self, lost: Callable[[], None]) -> None:
        import psycopg2

        try:
            while True:
                with self._session.cursor() as cursor:
                    cursor.execute("SELECT 1")
                time.sleep(_LOOK_SECONDS)
        except psycopg2.Error:
            lost()


def daemon_of(url: str) -> str | None:
    """Return the machine whose daemon works with the records at ``url`` now; None if there is none."""
    session = _session(url)
    try:
        with session.cursor() as cursor:
            return _held_by(cursor)
    finally:
        session.close()


def _session(url: str) -> Connection:
    import psycopg2

    of_server = {f"tcp_{name}": value for name, value in _KEPT_ALIVE.items()}
    of_server["statement_timeout"] = _ANSWER_SECONDS * 1000
    session = psycopg2.connect(
        without_driver(url),
        application_name=f"{_NAME}{socket.gethostname()}",
        connect_timeout=_ANSWER_SECONDS,
        options=" ".join(f"-c {name}={value}" for name, value in of_server.items()),
        tcp_user_timeout=30_000,
        **_KEPT_ALIVE,
    )
    session.autocommit = True
    return session


def _held_by(cursor: Any) -> str | None:
    # No failpoint: a SELECT, put together above.
    cursor.execute(_HOLDER, _LOCK)
    row = cursor.fetchone()
    return None if row is None else str(row[1]).removeprefix(_NAME)


def _end_hung(cursor: Any) -> None:
    """End the session of a holder that has had the lock for long and has sent no heartbeat for as long."""
    cursor.execute("SELECT to_regclass('daemon_heartbeats')")
    if cursor.fetchone() != (None,):
        # No failpoint: the session of a process that hangs; who is killed here leaves it to the next look.
        cursor.execute(_END_HUNG, (*_LOCK, HUNG_SECONDS))
