"""The replication slot of a source: made and dropped; and the exact snapshot that a slot's creation
exports."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psycopg2
from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import connect, connect_replication, source_errors
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, SlotInUse
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.server import SlotFacts, slot_facts, slot_in_use
from omnisupport_ingest.sources.postgres.slot.slot_making import make_slot

_FLUSH_MILLISECONDS = 1000


class ConsistentSnapshot(NamedTuple):
    """A snapshot that sees exactly the transactions that committed below ``consistent_point``.

    ``name`` is for ``SET TRANSACTION SNAPSHOT``, as long as the context that gave it is open.
    """

    consistent_point: Lsn
    name: str


def create_slot(dsn: str, name: str, stop: threading.Event) -> Lsn:
    """Create the permanent slot ``name``; returns its consistent point, where its stream starts.

    Waits for the transactions that run at that moment; ``SlotNotMade`` if ``stop`` comes first. ``SlotInUse``
    if the name is taken.
    """
    connection = connect_replication(dsn)
    try:
        with gate("source.slot"):
            point, _ = _create(
                dsn, connection, f"{identifier(name)} LOGICAL pgoutput NOEXPORT_SNAPSHOT", stop
            )
        return point
    except sql_errors.DuplicateObject:
        raise slot_taken(name) from None
    finally:
        connection.close()


def slot_taken(name: str, slot: SlotFacts | None = None) -> SlotInUse:
    """The error for a slot that is there although this home has not created it; ``slot``: its facts."""
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
    """Drop the slot ``name`` if it exists; ``SlotInUse`` while a process reads from it."""
    with source_errors("dropping the replication slot"), connection.cursor() as cursor:
        try:
            with gate("source.slot_drop"):
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
def consistent_snapshot(dsn: str) -> Iterator[ConsistentSnapshot]:
    """An exact snapshot of the database, with the LSN it stands for, by a temporary slot.

    The slot is gone when the context ends. Waits for the transactions that run at the start.
    Raises ``SourceUnavailable``.
    """
    connection = connect_replication(dsn)
    name = _temporary_name()
    try:
        command = f"{identifier(name)} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
        point, snapshot = _create(dsn, connection, command, threading.Event())
        yield ConsistentSnapshot(point, snapshot)
    finally:
        connection.close()


def flush_wal(dsn: str) -> None:
    """Have the server flush the WAL that it has inserted, as the making of any logical slot does first.

    Without a commit it flushes such WAL only after seconds, and the stream sends nothing of it before. The
    slot is a temporary one, and is given up where its making would wait for transactions. Needs a free slot;
    without one nothing happens.
    """
    connection = connect(dsn)
    try:
        with suppress(psycopg2.Error), connection.cursor() as cursor:
            cursor.execute(f"SET statement_timeout = {_FLUSH_MILLISECONDS}")
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
