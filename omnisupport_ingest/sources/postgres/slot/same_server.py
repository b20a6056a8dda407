"""Connections for SQL that certainly lead to the server that an epoch is captured from.

A name may lead elsewhere from one connection to the next: after a fail-over, while the stream is still
open to the old primary, or by a connection string with several hosts.
"""

from __future__ import annotations

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused
from omnisupport_ingest.sources.postgres.session.server import STANDBY, STANDBY_FIX
from omnisupport_ingest.sources.postgres.slot.continuity import require_same_server

_TIMELINE_DIGITS = 8
"""The name of a WAL file begins with its timeline, in hexadecimal."""


def connect_to_source(dsn: str, epoch: EpochRecord) -> Connection:
    """``connect``, to the server of ``epoch`` and no other: ``HoleInSource``, or ``SourceRefused`` for a
    standby."""
    connection = connect(dsn)
    try:
        require_source(connection, epoch)
    except BaseException:
        connection.close()
        raise
    return connection


def require_source(connection: Connection, epoch: EpochRecord) -> None:
    """Raise as ``connect_to_source`` does, unless ``connection`` is to the server of ``epoch``."""
    if epoch.facts is None:
        return
    with source_errors("asking the server who it is"), connection.cursor() as cursor:
        try:
            cursor.execute("SELECT current_database()::text, pg_walfile_name(pg_current_wal_insert_lsn())")
        except sql_errors.ObjectNotInPrerequisiteState:
            raise SourceRefused(STANDBY, fix=STANDBY_FIX) from None
        database, wal_file = cursor.fetchone()
        try:
            cursor.execute("SELECT system_identifier::text FROM pg_control_system()")
            (identifier,) = cursor.fetchone()
        except sql_errors.InsufficientPrivilege:
            identifier = None
    require_same_server(epoch.facts, identifier, int(wal_file[:_TIMELINE_DIGITS], 16), database)
