"""Tables as the catalog describes them and the publication sends them; names of types; the lock of a read.

``hold_readable`` locks a table for reading within a transaction, and waits a limited time for the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg2
import psycopg2.errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.manifest import RelationVersion
from omnisupport_ingest.sources.postgres.protocol.pgoutput import RelationColumn
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import (
    ColumnsNotSent,
    SourceUnavailable,
    TableUnreadable,
)
from omnisupport_ingest.sources.postgres.session.quoting import qualified


@dataclass(frozen=True, slots=True)
class CatalogRelation:
    """The part of a table that a publication sends: columns, with types as ``format_type`` writes them, and
    the rows that meet ``row_filter``, an SQL expression over any of the table's columns (None: all rows)."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    replica_identity: str
    partitioned: bool
    row_filter: str | None

    def version(self, table: TableContract) -> RelationVersion:
        """Return the relation as a manifest records it."""
        return RelationVersion(
            table.schema, table.table, self.columns, self.types, table.key, self.replica_identity
        )


def read_relation(connection: Connection, publication: str, table: TableContract) -> CatalogRelation:
    """Return the table as ``publication`` sends it, by the catalogs as ``connection`` sees them.

    If the publication does not exist yet, or does not contain the table yet: all columns but generated ones,
    and all rows. Raises ``TableUnreadable`` if the table does not exist. Raises ``ColumnsNotSent`` if a
    column that the contract names is not sent: a snapshot would give it a value that no change could update.
    """
    with source_errors(f"reading the columns of {table.full_name}"), connection.cursor() as cursor:
        cursor.execute(_relation_query(connection.server_version), (publication, table.schema, table.table))
        rows = cursor.fetchall()
    columns = [(name, kind) for name, kind, sent, *_ in rows if sent]
    if not columns:
        raise TableUnreadable(
            f"Table {table.full_name} has no columns to read; was it dropped?",
            fix="Create the table again, or take its contract out.",
            table=table.full_name,
        )
    unsent = [
        name
        for name, _, sent, *_ in rows
        if not sent and name in {column.name for column in table.source_columns}
    ]
    if unsent:
        raise ColumnsNotSent(
            f"Publication {publication} does not send {', '.join(unsent)} of {table.full_name}, which the "
            "contract names.",
            fix="omnisupport-ingest preflight has the SQL that publishes it.",
            table=table.full_name,
        )
    _, _, _, identity, partitioned, row_filter = rows[0]
    names, types = zip(*columns, strict=True)
    return CatalogRelation(names, types, identity, partitioned, row_filter)


_RELATION = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), {sent}, c.relreplident::text, c.relkind = 'p',
       {row_filter}
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication p ON p.pubname = %s
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid{listed}
WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

_NOT_GENERATED = "a.attgenerated = ''"
_AS_PUBLISHED = f"({_NOT_GENERATED} OR coalesce(a.attgenerated = p.pubgencols, false))"
# A table that is published with its schema is sent whole, whatever its own entry says.
_NOT_BY_SCHEMA = """
  AND NOT EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = n.oid)"""


def _relation_query(server_version: int) -> str:
    if server_version < 150000:
        return _RELATION.format(sent=_NOT_GENERATED, row_filter="NULL", listed="")
    unlisted = _NOT_GENERATED if server_version < 180000 else _AS_PUBLISHED
    return _RELATION.format(
        sent=f"CASE WHEN r.prattrs IS NULL THEN {unlisted} ELSE a.attnum = ANY (r.prattrs) END",
        row_filter="pg_get_expr(r.prqual, c.oid)",
        listed=_NOT_BY_SCHEMA,
    )


def read_storage(connection: Connection, name: TableName) -> str:
    """Return the table's oid and file node as one text. A rewrite of the table changes the file node."""
    with source_errors(f"reading the file of {'.'.join(name)}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.oid, pg_relation_filenode(c.oid) FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            name,
        )
        row = cursor.fetchone()
    return "none" if row is None else f"{row[0]}/{row[1]}"


class TypeNames:
    """Names of column types, each queried only once; the stream sends only their oids."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names: dict[tuple[int, int], tuple[str, str]] = {}

    def of(self, columns: Iterable[RelationColumn]) -> tuple[str, ...]:
        """Return the types of ``columns``; ``???`` stands for a type that has been dropped since."""
        return tuple(name for name, _ in self._of(columns))

    def base_of(self, columns: Iterable[RelationColumn]) -> tuple[str, ...]:
        """Return the types of ``columns``, of a domain its base type, as ``LiveColumn`` has them."""
        return tuple(base for _, base in self._of(columns))

    def _of(self, columns: Iterable[RelationColumn]) -> list[tuple[str, str]]:
        pairs = [(column.type_oid, column.type_modifier) for column in columns]
        unknown = sorted(set(pairs) - self._names.keys())
        if unknown:
            with source_errors("reading names of types"), self._connection.cursor() as cursor:
                for pair in unknown:
                    # No failpoint: a SELECT, put together elsewhere.
                    cursor.execute(_TYPE, (*pair, *pair))
                    self._names[pair] = cursor.fetchone()
        return [self._names[pair] for pair in pairs]


# Domains, and arrays of domains, are resolved as in ``live_table``.
_TYPE = """
WITH RECURSIVE base (type, modifier, elements, depth) AS (
    SELECT %s::bigint::oid, %s, '', 0
  UNION ALL
    SELECT CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.typelem END,
           CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE -1 END,
           CASE WHEN t.typtype = 'd' THEN b.elements ELSE b.elements || '[]' END, b.depth + 1
    FROM base b JOIN pg_type t ON t.oid = b.type LEFT JOIN pg_type e ON e.oid = t.typelem
    WHERE t.typtype = 'd' OR (t.typcategory = 'A' AND e.typtype = 'd')
)
SELECT format_type(%s::bigint::oid, %s), format_type(type, modifier) || elements
FROM base ORDER BY depth DESC LIMIT 1
"""


_LOCK_SECONDS = 2
"""Seconds to wait for the lock on a table. After that, the caller can check whether to stop."""


def hold_readable(connection: Connection, table: TableContract) -> bool:
    """In the open transaction, take the lock that every SELECT takes. It blocks no change of rows.

    Returns False if another session holds a conflicting lock; the transaction has then failed, so roll it
    back. Raises ``TableUnreadable`` if the table cannot be read.
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
    """Turn errors that concern ``table`` alone into ``TableUnreadable``.

    Examples: it was dropped, a right is missing, a value cannot be written as text, its file is unreadable.
    """
    try:
        yield
    except _OF_ONE_TABLE as error:
        raise _unreadable(table, error) from error
    except SourceUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, psycopg2.Error) and (cause.pgcode or "")[:2] in _CLASSES_OF_ONE_TABLE:
            raise _unreadable(table, cause) from cause
        raise


_OF_ONE_TABLE = (
    psycopg2.ProgrammingError,
    psycopg2.DataError,
    psycopg2.InternalError,
    psycopg2.NotSupportedError,
)

_CLASSES_OF_ONE_TABLE = ("54", "58")
"""Classes of operational errors that would occur again with the same read (PostgreSQL manual, "PostgreSQL
Error Codes"): a row longer than the server can send, and files that it cannot read."""

_WITHOUT_VALUES = (*_CLASSES_OF_ONE_TABLE, "XX", "55")
"""Classes of errors whose texts name only files and row positions. Other texts may quote a value; the
server's log has them."""


def _unreadable(table: TableContract, error: psycopg2.Error) -> TableUnreadable:
    code = error.pgcode or ""
    quotes_no_value = isinstance(error, psycopg2.ProgrammingError) or code[:2] in _WITHOUT_VALUES
    reason = first_line(error) if quotes_no_value else f"{type(error).__name__}, SQLSTATE {code}"
    return TableUnreadable(
        f"Table {table.full_name} cannot be read: {reason}.",
        fix="If it was altered just now, start capture again (the platform does so by itself): it is "
        "read as it is then. If not, act on the message.",
        table=table.full_name,
    )
