"""Holding a table readable for a transaction, without waiting for its lock for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2
import psycopg2.errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable, TableUnreadable
from omnisupport_ingest.sources.postgres.session.quoting import qualified

_LOCK_SECONDS = 2
"""How long a lock on the table is waited for before the caller may look whether to stop."""


def hold_readable(connection: Connection, table: TableContract) -> bool:
    """Take, in the transaction that has begun, the lock that every SELECT takes; no change waits for it.

    False if somebody holds a lock against it: the transaction has failed then and is to be rolled back, and
    the caller to try again. ``TableUnreadable`` if the table cannot be read.
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
    """Turn errors in what is asked of ``table`` alone into ``TableUnreadable``: it was dropped, say, a right
    is missing, a value cannot be written as text, or its file cannot be read."""
    try:
        yield
    except _OF_ONE_TABLE as error:
        raise _unreadable(table, error) from error
    except SourceUnavailable as error:
        told = error.__cause__
        if isinstance(told, psycopg2.Error) and (told.pgcode or "")[:2] in _CLASSES_OF_ONE_TABLE:
            raise _unreadable(table, told) from told
        raise


_OF_ONE_TABLE = (
    psycopg2.ProgrammingError,
    psycopg2.DataError,
    psycopg2.InternalError,
    psycopg2.NotSupportedError,
)

_CLASSES_OF_ONE_TABLE = ("54", "58")
"""Operational errors that the same read would meet again (PostgreSQL manual, "PostgreSQL Error Codes"): a row
longer than the server can send, and files that it cannot read."""

_WITHOUT_VALUES = (*_CLASSES_OF_ONE_TABLE, "XX", "55")
"""Errors whose words are of files and rows' places; others may quote a value, which the server's log has."""


def _unreadable(table: TableContract, error: psycopg2.Error) -> TableUnreadable:
    code = error.pgcode or ""
    quotes_no_value = isinstance(error, psycopg2.ProgrammingError) or code[:2] in _WITHOUT_VALUES
    told = first_line(error) if quotes_no_value else f"{type(error).__name__}, SQLSTATE {code}"
    return TableUnreadable(
        f"Table {table.full_name} cannot be read: {told}.",
        fix="If it was altered just now, start capture again (the platform does so by itself): it is "
        "read as it is then. If not, act on the message.",
        table=table.full_name,
    )
