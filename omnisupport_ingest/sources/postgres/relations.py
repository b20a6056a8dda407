"""Tables as the source's catalog describes them, and the names of types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import RelationVersion
from omnisupport_ingest.sources.postgres.connection import source_errors
from omnisupport_ingest.sources.postgres.pgoutput import RelationColumn


@dataclass(frozen=True, slots=True)
class CatalogRelation:
    """A table's published columns, with their types as ``format_type`` writes them."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    replica_identity: str
    partitioned: bool

    def version(self, table: TableContract) -> RelationVersion:
        """The same as a manifest records it."""
        return RelationVersion(
            table.schema, table.table, self.columns, self.types, table.key, self.replica_identity
        )


def read_relation(connection: Connection, schema: str, table: str) -> CatalogRelation:
    """The table as the transaction of ``connection`` sees it, without generated columns.

    ``pgoutput`` does not publish those, so a snapshot of them would be history that never goes on.
    """
    with source_errors(f"reading the columns of {schema}.{table}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), c.relreplident::text, c.relkind = 'p'"
            " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped"
            " AND a.attgenerated = '' ORDER BY a.attnum",
            (schema, table),
        )
        rows = cursor.fetchall()
    if not rows:
        raise IngestError(
            f"Table {schema}.{table} has no columns to read; was it dropped?",
            fix="Create the table again, or take its contract out.",
        )
    names, types, identities, partitioned = zip(*rows, strict=True)
    return CatalogRelation(names, types, identities[0], partitioned[0])


def read_storage(connection: Connection, schema: str, table: str) -> str:
    """The table and the file that its rows stand in: another one as soon as it is rewritten."""
    with source_errors(f"reading the file of {schema}.{table}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.oid, pg_relation_filenode(c.oid) FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            (schema, table),
        )
        found = cursor.fetchone()
    return "none" if found is None else f"{found[0]}/{found[1]}"


class TypeNames:
    """Names of column types, asked for once each; the stream itself sends only their numbers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names: dict[tuple[int, int], str] = {}

    def of(self, columns: Iterable[RelationColumn]) -> tuple[str, ...]:
        """The types of ``columns``; ``???`` stands for a type that has been dropped since."""
        pairs = [(column.type_oid, column.type_modifier) for column in columns]
        unknown = sorted(set(pairs) - self._names.keys())
        if unknown:
            with source_errors("reading names of types"), self._connection.cursor() as cursor:
                for pair in unknown:
                    cursor.execute("SELECT format_type(%s, %s)", pair)
                    (self._names[pair],) = cursor.fetchone()
        return tuple(self._names[pair] for pair in pairs)
