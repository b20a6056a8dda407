"""Holding a table readable for a transaction, without waiting for its lock for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2
import psycopg2.errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.connect_errors import first_line
from omnisupport_ingest.sources.postgres.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.quoting import qualified

_LOCK_SECONDS = 2
"""How long a lock on the table is waited for before the caller may look whether to stop."""


def hold_readable(connection: Connection, table: TableContract) -> bool:
    """Take, in the transaction that has begun, the lock that every SELECT takes; no change waits for it.

    False if somebody holds a lock against it: the transaction has failed then and is to be rolled back, and
    the caller to try again. ``SourceUnavailable`` if the table cannot be read.
    """
    with readable(table), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
        try:
            cursor.execute(f"LOCK TABLE {qualified(table.schema, table.table)} IN ACCESS SHARE MODE")
        except psycopg2.errors.LockNotAvailable:
            return False
    return True


@contextmanager
def readable(table: TableContract) -> Iterator[None]:
    """Turn errors in what is asked of ``table``, which was dropped, say, into ``SourceUnavailable``."""
    try:
        yield
    except psycopg2.ProgrammingError as error:
        raise SourceUnavailable(
            f"Table {table.full_name} cannot be read: {first_line(error)}.",
            fix="If it was altered just now, start capture again (the platform does so by itself): it is "
            "read as it is then. If not, act on the message.",
        ) from error
