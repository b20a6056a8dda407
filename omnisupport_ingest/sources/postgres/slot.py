"""The publication and the replication slot of a source: made, extended, dropped; and the exact
snapshot that a slot's creation exports."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psycopg2
from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.connection import connect_replication, source_errors
from omnisupport_ingest.sources.postgres.errors import PreflightFailed, SlotInUse
from omnisupport_ingest.sources.postgres.quoting import identifier, qualified


class ConsistentSnapshot(NamedTuple):
    """A snapshot that sees exactly the transactions that committed below ``consistent_point``.

    ``name`` is for ``SET TRANSACTION SNAPSHOT``, as long as the context that gave it is open.
    """

    consistent_point: Lsn
    name: str


def ensure_publication(connection: Connection, name: str, tables: Sequence[TableContract]) -> list[str]:
    """Make publication ``name`` cover ``tables``; returns the tables it added, ``schema.table``.

    Tables that it covers besides are left in it. Raises ``PreflightFailed`` if the role may not
    change it, or if the publication leaves out kinds of changes.
    """
    with source_errors("preparing the publication"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT puballtables, pubinsert AND pubupdate AND pubdelete AND pubtruncate"
            " FROM pg_publication WHERE pubname = %s",
            (name,),
        )
        publication = cursor.fetchone()
        if publication is not None and not publication[1]:
            raise PreflightFailed(
                f"Publication {name} leaves out some kinds of changes.",
                fix=f"ALTER PUBLICATION {identifier(name)}"
                " SET (publish = 'insert, update, delete, truncate');",
            )
        if publication is not None and publication[0]:
            return []
        cursor.execute(
            "SELECT n.nspname, c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
            " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE p.pubname = %s",
            (name,),
        )
        covered = set(cursor.fetchall())
        missing = [table for table in tables if (table.schema, table.table) not in covered]
        if not missing:
            return []
        listed = ", ".join(qualified(table.schema, table.table) for table in missing)
        command = (
            f"CREATE PUBLICATION {identifier(name)} FOR TABLE {listed}"
            " WITH (publish_via_partition_root = true)"
            if publication is None
            else f"ALTER PUBLICATION {identifier(name)} ADD TABLE {listed}"
        )
        try:
            cursor.execute(command)
        except sql_errors.InsufficientPrivilege as error:
            raise PreflightFailed(
                f"This role may not prepare publication {name}: {error.diag.message_primary}.",
                fix=f"Run as the owner of the tables: {command};",
            ) from None
    return [table.full_name for table in missing]


def create_slot(dsn: str, name: str) -> Lsn:
    """Create the permanent slot ``name``; returns its consistent point, where its stream starts.

    Waits for the transactions that run at that moment. ``SlotInUse`` if the name is taken.
    """
    connection = connect_replication(dsn)
    try:
        point, _ = _create(connection, f"{identifier(name)} LOGICAL pgoutput NOEXPORT_SNAPSHOT")
        return point
    except sql_errors.DuplicateObject:
        raise slot_taken(name) from None
    finally:
        connection.close()


def slot_taken(name: str) -> SlotInUse:
    """The error for a slot that is there although this home has not created it."""
    return SlotInUse(
        f"The replication slot {name} exists on the server, but this home has not created it.",
        fix="If another home captures through it, set OMNISUPPORT_SLOT to another name. If not, drop it: "
        f"SELECT pg_drop_replication_slot('{name}');",
    )


def drop_slot(connection: Connection, name: str) -> None:
    """Drop the slot ``name`` if it exists; ``SlotInUse`` while a process reads from it."""
    with source_errors("dropping the replication slot"), connection.cursor() as cursor:
        try:
            cursor.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
                (name,),
            )
        except sql_errors.ObjectInUse:
            raise SlotInUse(
                f"The replication slot {name} is being read from.", fix="Stop the capture that reads from it."
            ) from None


@contextmanager
def consistent_snapshot(dsn: str) -> Iterator[ConsistentSnapshot]:
    """An exact snapshot of the database, with the LSN it stands for, by a temporary slot.

    The slot is gone when the context ends. Waits for the transactions that run at the start.
    Raises ``SourceUnavailable``.
    """
    connection = connect_replication(dsn)
    name = f"omnisupport_tmp_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        point, snapshot = _create(
            connection, f"{identifier(name)} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
        )
        yield ConsistentSnapshot(point, snapshot)
    finally:
        connection.close()


def _create(connection: Connection, command: str) -> tuple[Lsn, str]:
    with source_errors("creating a replication slot"), connection.cursor() as cursor:
        try:
            cursor.execute(f"CREATE_REPLICATION_SLOT {command}")
        except psycopg2.errors.ConfigurationLimitExceeded:
            raise PreflightFailed(
                "All replication slots of the server are in use.",
                fix="ALTER SYSTEM SET max_replication_slots = 20;  -- then restart PostgreSQL",
            ) from None
        _, point, snapshot, _ = cursor.fetchone()
    return Lsn.parse(point), snapshot
