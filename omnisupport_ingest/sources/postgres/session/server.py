"""Facts about the source server: its identity, the end of its WAL, its slots, its open transactions.

Open transactions may be in any database of the server. Prepared transactions have no session. ``pg_locks``
shows all of them to every role, because each transaction holds a lock on its own id. The start time of a
transaction is hidden from a role that may not see the sessions of others (PostgreSQL manual,
"pg_stat_activity").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import (
    at_place_of,
    connect,
    connect_replication,
    dsn_parts,
    source_errors,
)
from omnisupport_ingest.sources.postgres.session.errors import SlotInUse, SourceRefused

STANDBY = "The server is a standby (it is in recovery); capture reads from the primary."


def standby_fix(connection: Connection) -> str:
    """Return the fix for a ``connection`` that turns out to lead to a standby."""
    return (
        f"Set host and port in {connection.label.setting} to the primary. With several hosts in it, add "
        "target_session_attrs=read-write."
    )


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The identity of a server. A different system identifier or timeline means a different history."""

    system_identifier: str
    timeline: int
    database: str
    version: str


@dataclass(frozen=True, slots=True)
class SlotReader:
    """The session that reads from a slot. ``address``: None for a Unix socket, or if it is hidden from us."""

    pid: int
    application: str | None
    user: str | None
    address: str | None

    def __str__(self) -> str:
        about = [f"application {self.application or '(not named)'}"]
        about += [f"user {self.user}"] if self.user else []
        about += [f"address {self.address}"] if self.address else []
        return f"server process {self.pid}, {', '.join(about)}"


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A replication slot. ``wal_status``: ``lost`` if the server gave it up, or removed WAL that it needs.

    ``retained_bytes``: WAL that the server keeps because of the slot. ``safe_bytes``: WAL that may still be
    written before the slot is in danger; None without ``max_slot_wal_keep_size``. ``invalidated``: why the
    server gave the slot up (PostgreSQL 17 and newer).
    """

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_status: str | None
    retained_bytes: int | None
    safe_bytes: int | None = None
    invalidated: str | None = None
    reader: SlotReader | None = None


@dataclass(frozen=True, slots=True)
class WalClock:
    """The server's clock, and the end of its flushed WAL, read just after the clock.

    A transaction that commits after ``clock`` has its commit record above ``flushed``. The exception are
    commits under way at that moment; ``max_clock_skew`` covers them.
    """

    clock: datetime
    flushed: Lsn


def server_facts(dsn: str) -> ServerFacts:
    """Return the facts of the server at ``dsn``. Needs the replication right, as IDENTIFY_SYSTEM does."""
    connection = connect_replication(dsn)
    try:
        return identify(connection)
    finally:
        connection.close()


def identify(replication: Connection) -> ServerFacts:
    """Return the facts of the server that a replication connection leads to."""
    with source_errors("asking the server who it is"), replication.cursor() as cursor:
        cursor.execute("IDENTIFY_SYSTEM")
        system_identifier, timeline, _, database = cursor.fetchone()
        cursor.execute("SELECT current_setting('server_version')")
        (version,) = cursor.fetchone()
    return ServerFacts(system_identifier, timeline, database, version)


def slot_facts(connection: Connection, name: str) -> SlotFacts | None:
    """Return the slot called ``name``; None if there is none."""
    # A standby has no current WAL position, only what it has replayed.
    end = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
    invalidated = "s.invalidation_reason" if connection.server_version >= 170000 else "NULL::text"
    with source_errors("reading the replication slot"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT s.slot_name, s.plugin, s.database, s.active_pid, s.restart_lsn::text,"
            " s.confirmed_flush_lsn::text, s.wal_status,"
            f" pg_wal_lsn_diff({end}, s.restart_lsn)::bigint, s.safe_wal_size, {invalidated},"
            " a.application_name, a.usename, host(a.client_addr)"
            " FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid"
            " WHERE s.slot_name = %s",
            (name,),
        )
        row = cursor.fetchone()
    if row is None:
        return None
    slot, plugin, database, pid, restart, confirmed, wal_status, retained, safe, reason, *reader = row
    return SlotFacts(
        slot,
        plugin,
        database,
        pid,
        _lsn(restart),
        _lsn(confirmed),
        wal_status,
        retained,
        safe,
        reason,
        None if pid is None else SlotReader(pid, *reader),
    )


SLOT_WAIT_SECONDS = 10.0
"""Seconds that a start waits for the server to notice that the slot's last reader has died."""


def wait_until_free(connection: Connection, name: str, seconds: float) -> None:
    """Wait until no process reads from the slot ``name``. Raises ``SlotInUse`` after ``seconds``.

    The server may need a moment to notice that a reader has died.
    """
    give_up = time.monotonic() + seconds
    while (slot := slot_facts(connection, name)) is not None and slot.reader is not None:
        if time.monotonic() >= give_up:
            raise slot_in_use(name, slot.reader)
        time.sleep(0.05)


def slot_in_use(name: str, reader: SlotReader) -> SlotInUse:
    """Return the error for a slot that another process reads from."""
    return SlotInUse(
        f"The replication slot {name} is being read from ({reader}).",
        fix="Stop the other reader, or set OMNISUPPORT_SLOT to a slot of this home's own. If the "
        f"reader is gone for certain: SELECT pg_terminate_backend({reader.pid});",
    )


def wal_clock(connection: Connection) -> WalClock:
    """Read the server's clock, then the end of its WAL. Raises ``SourceRefused`` for a standby."""
    with source_errors("reading the server's clock"), connection.cursor() as cursor:
        # Two statements: within one, the planner would choose the order of evaluation.
        cursor.execute("SELECT clock_timestamp()")
        (clock,) = cursor.fetchone()
        try:
            cursor.execute("SELECT pg_current_wal_flush_lsn()::text")
        except sql_errors.ObjectNotInPrerequisiteState:
            raise SourceRefused(STANDBY, fix=standby_fix(connection)) from None
        (flushed,) = cursor.fetchone()
    return WalClock(clock, Lsn.parse(flushed))


def current_wal_lsn(dsn: str) -> Lsn:
    """Return the end of the server's flushed WAL. Every commit acknowledged before now lies below it.

    Commits with ``synchronous_commit = off`` are acknowledged before they are flushed, so they may lie above
    it.
    """
    connection = connect(dsn)
    try:
        return wal_clock(connection).flushed
    finally:
        connection.close()


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


_OPEN_TRANSACTIONS = """
SELECT array_agg(l.transactionid::text::bigint), l.pid, p.gid, coalesce(a.datname, p.database),
    coalesce(a.usename, p.owner),
    min(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)))::float8
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock'
    AND (l.pid IS NOT NULL OR p.gid IS NOT NULL)
GROUP BY 2, 3, 4, 5
ORDER BY 6 DESC NULLS LAST, 2, 3
"""
_LONGEST = 80


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction. ``pid``: None for a prepared one. ``gid``: None for one of a session."""

    ids: frozenset[int]
    """The lower 32 bits of its id and of the ids of its subtransactions."""
    pid: int | None
    gid: str | None
    database: str | None
    user: str | None
    seconds: float | None
    """Seconds since it began, or since it was prepared; None if that is hidden."""

    @property
    def name(self) -> str:
        """Process id or gid, database and user: enough for a person to find it."""
        where = f"{self.user or 'an unknown user'} in database {self.database or 'unknown'}"
        if self.pid is None:
            gid = self.gid or ""
            shown = gid if len(gid) <= _LONGEST else f"{gid[:_LONGEST]}…"
            return f"prepared as {shown!r} by {where}"
        return f"of process {self.pid}, {where}"

    def __str__(self) -> str:
        if self.seconds is None:
            return self.name
        return f"{self.name}, for {max(self.seconds, 0):,.0f} s"


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return the open transactions of the server that have an id, the oldest first."""
    with source_errors("looking for transactions"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_OPEN_TRANSACTIONS)
        return [OpenTransaction(frozenset(ids), *rest) for ids, *rest in cursor.fetchall()]


def listed(transactions: Iterable[OpenTransaction]) -> str:
    """Return ``transactions`` as a part of a sentence."""
    return "; ".join(map(str, transactions))


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """Whether the source answered. ``problem``: why it did not, without a password.

    ``server``: major and minor version. ``slot``: None if there is no slot of that name.
    """

    reachable: bool
    problem: str | None = None
    server: str | None = None
    slot: SlotFacts | None = None


class SourceProbe:
    """Queries the source for its slot, in its own thread. ``result`` waits a limited time for the answer."""

    def __init__(self, dsn: str, slot: str) -> None:
        self._dsn, self._slot = dsn, slot
        self._result: SourceAnswer | None = None
        # A name that does not resolve, or a host that swallows packets, must not block the caller.
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> SourceAnswer:
        """Return the answer; "not reachable" if there is none within ``seconds`` from now."""
        self._thread.join(seconds)
        return self._result or SourceAnswer(False, f"No answer within {seconds:.1f} seconds.")

    def _ask(self) -> None:
        try:
            parts = dsn_parts(self._dsn) | {"connect_timeout": "2"}
            dsn = at_place_of(self._dsn, make_dsn(**parts))
            connection = connect(dsn, application_name="omnisupport-ingest status")
            try:
                slot = slot_facts(connection, self._slot)
                major, minor = divmod(connection.server_version, 10000)
                self._result = SourceAnswer(True, None, f"{major}.{minor}", slot)
            finally:
                connection.close()
        except IngestError as error:
            self._result = SourceAnswer(False, error.problem)
