"""The publication of a source: read, made, extended, and dropped if capture has made it.

One that capture makes carries a comment that says so; the comment lives and dies with it, whatever
happens to the home.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.sources.postgres.connection import source_errors
from omnisupport_ingest.sources.postgres.errors import PreflightFailed
from omnisupport_ingest.sources.postgres.quoting import identifier, literal, qualified

OPERATIONS = ("insert", "update", "delete", "truncate")
"""What a publication must publish."""

MADE_BY_CAPTURE = "Made by omnisupport-ingest capture."
"""The comment on a publication that capture has made, and so may drop."""

_ROW_FILTERS_SINCE = 150000


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """``columns``: those that are published (empty: the server is too old for lists, so all)."""

    columns: tuple[str, ...]
    row_filter: str | None


@dataclass(frozen=True, slots=True)
class Publication:
    """``tables``: by (schema, table), as ``pg_publication_tables`` lists them, partitions apart from
    their root unless ``via_root``. ``ours``: this role may alter it."""

    name: str
    operations: tuple[str, ...]
    all_tables: bool
    via_root: bool
    ours: bool
    made_by_capture: bool
    tables: Mapping[tuple[str, str], PublishedTable]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The operations that it does not publish."""
        return tuple(each for each in OPERATIONS if each not in self.operations)


def read_publication(connection: Connection, name: str) -> Publication | None:
    """The publication called ``name``; none if there is none."""
    with source_errors("reading the publication"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pubinsert, pubupdate, pubdelete, pubtruncate, puballtables, pubviaroot,"
            " pg_has_role(pubowner, 'USAGE'), obj_description(oid, 'pg_publication')"
            " FROM pg_publication WHERE pubname = %s",
            (name,),
        )
        row = cursor.fetchone()
        if row is None:
            return None
        *publishes, all_tables, via_root, ours, comment = row
        details = (
            "attnames::text[], rowfilter"
            if connection.server_version >= _ROW_FILTERS_SINCE
            else "'{}'::text[], NULL::text"
        )
        cursor.execute(
            f"SELECT schemaname, tablename, {details} FROM pg_publication_tables WHERE pubname = %s",
            (name,),
        )
        tables = {
            (schema, table): PublishedTable(tuple(columns or ()), row_filter)
            for schema, table, columns, row_filter in cursor.fetchall()
        }
    operations = tuple(each for each, given in zip(OPERATIONS, publishes, strict=True) if given)
    return Publication(name, operations, all_tables, via_root, ours, comment == MADE_BY_CAPTURE, tables)


def create_statement(name: str, tables: Iterable[tuple[str, str]]) -> str:
    """The SQL that makes publication ``name`` for ``tables``, each (schema, table)."""
    return (
        f"CREATE PUBLICATION {identifier(name)} FOR TABLE {_listed(tables)}"
        " WITH (publish_via_partition_root = true);"
    )


def add_statement(name: str, tables: Iterable[tuple[str, str]]) -> str:
    """The SQL that adds ``tables`` to publication ``name``."""
    return f"ALTER PUBLICATION {identifier(name)} ADD TABLE {_listed(tables)};"


def operations_statement(name: str) -> str:
    """The SQL that makes publication ``name`` publish every operation."""
    return f"ALTER PUBLICATION {identifier(name)} SET (publish = {literal(', '.join(OPERATIONS))});"


def via_root_statement(name: str) -> str:
    """The SQL that makes publication ``name`` send changes of partitions as those of their root."""
    return f"ALTER PUBLICATION {identifier(name)} SET (publish_via_partition_root = true);"


def ensure_publication(connection: Connection, name: str, tables: Sequence[TableContract]) -> list[str]:
    """Make publication ``name`` cover ``tables``; returns the tables it added, ``schema.table``.

    Tables that it covers besides are left in it. Raises ``PreflightFailed`` if the role may not
    change it, or if the publication leaves out kinds of changes.
    """
    publication = read_publication(connection, name)
    if publication is not None and publication.left_out:
        raise PreflightFailed(
            f"Publication {name} leaves out {', '.join(publication.left_out)}.",
            fix=operations_statement(name),
        )
    covered = publication.tables if publication is not None else {}
    missing = [table for table in tables if (table.schema, table.table) not in covered]
    if not missing or (publication is not None and publication.all_tables):
        return []
    names = [(table.schema, table.table) for table in missing]
    if publication is None:
        command = create_statement(name, names)
        # One transaction: a publication of ours without the comment would never be dropped.
        comment = f"COMMENT ON PUBLICATION {identifier(name)} IS {literal(MADE_BY_CAPTURE)}"
        statements = f"BEGIN; {command} {comment}; COMMIT"
    else:
        command = statements = add_statement(name, names)
    with source_errors("preparing the publication"), connection.cursor() as cursor:
        try:
            with gate("source.publication"):
                cursor.execute(statements)
        except sql_errors.InsufficientPrivilege as error:
            cursor.execute("ROLLBACK")
            raise PreflightFailed(
                f"This role may not prepare publication {name}: {error.diag.message_primary}.",
                fix=f"Run as the owner of the tables: {command}",
            ) from None
    return [table.full_name for table in missing]


def drop_publication(connection: Connection, name: str) -> None:
    """Drop publication ``name``; nothing happens if there is none."""
    with source_errors("dropping the publication"), connection.cursor() as cursor:
        try:
            with gate("source.publication_drop"):
                cursor.execute(f"DROP PUBLICATION IF EXISTS {identifier(name)}")
        except sql_errors.InsufficientPrivilege as error:
            raise PreflightFailed(
                f"This role may not drop publication {name}: {error.diag.message_primary}.",
                fix=f"Run as its owner: DROP PUBLICATION {identifier(name)};",
            ) from None


def _listed(tables: Iterable[tuple[str, str]]) -> str:
    return ", ".join(qualified(schema, table) for schema, table in tables)
