"""Facts about the source server that capture decides by: who it is, where its WAL ends, its slots."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.connection import connect, connect_replication, source_errors
from omnisupport_ingest.sources.postgres.errors import SlotInUse


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server's identity. Another system identifier or timeline is another history."""

    system_identifier: str
    timeline: int
    database: str
    version: str
    wal_level: str


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A replication slot. ``wal_status`` ``lost``: the server removed WAL that the slot needs.

    ``retained_bytes``: WAL that the server keeps because of the slot.
    """

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_status: str | None
    retained_bytes: int | None


@dataclass(frozen=True, slots=True)
class WalClock:
    """The server's clock, and the end of its flushed WAL read just after it.

    What commits later than ``clock`` has its commit record above ``flushed`` (but for commits under
    way at that moment, which ``max_clock_skew`` allows for).
    """

    clock: datetime
    flushed: Lsn


def server_facts(dsn: str) -> ServerFacts:
    """The facts of the server at ``dsn``; needs the replication right, as IDENTIFY_SYSTEM does."""
    connection = connect_replication(dsn)
    try:
        with source_errors("asking the server who it is"), connection.cursor() as cursor:
            cursor.execute("IDENTIFY_SYSTEM")
            system_identifier, timeline, _, database = cursor.fetchone()
            cursor.execute("SELECT current_setting('server_version'), current_setting('wal_level')")
            version, wal_level = cursor.fetchone()
    finally:
        connection.close()
    return ServerFacts(system_identifier, timeline, database, version, wal_level)


def slot_facts(connection: Connection, name: str) -> SlotFacts | None:
    """The slot called ``name``; none if there is none."""
    with source_errors("reading the replication slot"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT slot_name, plugin, database, active_pid, restart_lsn::text,"
            " confirmed_flush_lsn::text, wal_status,"
            " pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint"
            " FROM pg_replication_slots WHERE slot_name = %s",
            (name,),
        )
        row = cursor.fetchone()
    if row is None:
        return None
    slot, plugin, database, active_pid, restart, confirmed, wal_status, retained = row
    return SlotFacts(slot, plugin, database, active_pid, _lsn(restart), _lsn(confirmed), wal_status, retained)


def wait_until_free(connection: Connection, name: str, seconds: float) -> None:
    """Wait until no process reads from the slot ``name``; ``SlotInUse`` after ``seconds``.

    The server may notice only after a moment that a reader has died.
    """
    give_up = time.monotonic() + seconds
    while (slot := slot_facts(connection, name)) is not None and slot.active_pid is not None:
        if time.monotonic() >= give_up:
            raise SlotInUse(
                f"The replication slot {name} is being read from (server process {slot.active_pid}).",
                fix="Stop the other reader, or set OMNISUPPORT_SLOT to a slot of this home's own. If the "
                f"reader is gone for certain: SELECT pg_terminate_backend({slot.active_pid});",
            )
        time.sleep(0.05)


def wal_clock(connection: Connection) -> WalClock:
    """The server's clock with the end of its WAL, in that order."""
    with source_errors("reading the server's clock"), connection.cursor() as cursor:
        # Two statements: within one, the order of evaluation would be the planner's.
        cursor.execute("SELECT clock_timestamp()")
        (clock,) = cursor.fetchone()
        cursor.execute("SELECT pg_current_wal_flush_lsn()::text")
        (flushed,) = cursor.fetchone()
    return WalClock(clock, Lsn.parse(flushed))


def current_wal_lsn(dsn: str) -> Lsn:
    """The end of the server's flushed WAL: every commit that was acknowledged before lies below it.

    (But for commits under ``synchronous_commit = off``, which are acknowledged before the flush.)
    """
    connection = connect(dsn)
    try:
        return wal_clock(connection).flushed
    finally:
        connection.close()


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)
