"""The publication of a source: reads, creates and extends it, and drops it if capture created it.

A publication that capture creates has a comment that says so. The comment stays with the publication,
whatever happens to the home. ``grants_sql`` writes the least rights that a capture role needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableDropped
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified

OPERATIONS = ("insert", "update", "delete", "truncate")
"""Operations that a publication must publish."""

MADE_BY_CAPTURE = "Made by omnisupport-ingest capture."
"""The comment on a publication that capture created, and therefore may drop."""

_ROW_FILTERS_SINCE = 150000


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of a publication. ``columns``: the published columns; empty if the server is too old for column
    lists, so that all are published."""

    columns: tuple[str, ...]
    row_filter: str | None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication. ``tables``: by table name, as ``pg_publication_tables`` lists them. ``ours``: this role
    may alter it.

    Unless it publishes via partition roots, ``tables`` contains partitions instead of their roots. Then
    ``roots`` contains the partitioned tables that it covers, each with those of its partitions that have
    their own row filter or column list. ``named``: the tables that it lists individually. ``schemas``: the
    schemas that it publishes whole.
    """

    name: str
    operations: tuple[str, ...]
    all_tables: bool
    ours: bool
    made_by_capture: bool
    tables: Mapping[TableName, PublishedTable]
    roots: Mapping[TableName, tuple[TableName, ...]]
    named: frozenset[TableName]
    schemas: tuple[str, ...]

    def covers(self, name: TableName) -> bool:
        """Whether it publishes the changes of table ``name``."""
        return name in self.tables or name in self.roots

    def lets_go(self, name: TableName) -> bool:
        """Whether table ``name`` alone can be removed: it is listed, and not also published by its schema."""
        return name in self.named and name[0] not in self.schemas

    @property
    def left_out(self) -> tuple[str, ...]:
        """The operations that it does not publish."""
        return tuple(each for each in OPERATIONS if each not in self.operations)


def read_publication(connection: Connection, name: str) -> Publication | None:
    """Return the publication called ``name``; None if there is none."""
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
        roots: dict[TableName, tuple[TableName, ...]] = {}
        if not via_root:
            since_15 = connection.server_version >= _ROW_FILTERS_SINCE
            cursor.execute(_ROOTS_15 if since_15 else _ROOTS_13, (name,))
            for schema, table, partitions in cursor.fetchall():
                roots[schema, table] = tuple((each["schema"], each["table"]) for each in partitions)
        # No failpoint: SELECTs, written below.
        cursor.execute(_NAMED, (name,))
        named = frozenset((schema, table) for schema, table in cursor.fetchall())
        schemas: tuple[str, ...] = ()
        if connection.server_version >= _ROW_FILTERS_SINCE:
            cursor.execute(_SCHEMAS, (name,))
            schemas = tuple(schema for (schema,) in cursor.fetchall())
    operations = tuple(each for each, published in zip(OPERATIONS, publishes, strict=True) if published)
    made_by_capture = comment == MADE_BY_CAPTURE
    return Publication(name, operations, all_tables, ours, made_by_capture, tables, roots, named, schemas)


def create_statement(name: str, tables: Iterable[TableName]) -> str:
    """Return the SQL that creates publication ``name`` for ``tables``."""
    return (
        f"CREATE PUBLICATION {identifier(name)} FOR TABLE {_listed(tables)}"
        " WITH (publish_via_partition_root = true);"
    )


def add_statement(name: str, tables: Iterable[TableName]) -> str:
    """Return the SQL that adds ``tables`` to publication ``name``."""
    return f"ALTER PUBLICATION {identifier(name)} ADD TABLE {_listed(tables)};"


def operations_statement(name: str) -> str:
    """Return the SQL that makes publication ``name`` publish every operation."""
    return f"ALTER PUBLICATION {identifier(name)} SET (publish = {literal(', '.join(OPERATIONS))});"


def drop_statement(name: str, tables: Iterable[TableName]) -> str:
    """Return the SQL that removes ``tables`` from publication ``name``."""
    return f"ALTER PUBLICATION {identifier(name)} DROP TABLE {_listed(tables)};"


def only_statement(publication: Publication, tables: Sequence[TableName]) -> str:
    """Return the SQL after which ``publication`` publishes exactly ``tables``, even if it lists none now.

    Without ``tables``, the SQL drops the publication.
    """
    name = publication.name
    drop = f"DROP PUBLICATION {identifier(name)};"
    if not tables:
        return drop
    if publication.all_tables:
        return f"BEGIN; {drop} {create_statement(name, tables)} COMMIT;"
    return f"ALTER PUBLICATION {identifier(name)} SET TABLE {_listed(tables)};"


def ensure_publication(connection: Connection, name: str, tables: Sequence[TableContract]) -> list[str]:
    """Make publication ``name`` cover ``tables``; return the tables that were added, as ``schema.table``.

    Other tables of the publication stay in it. Raises ``PreflightFailed`` if the role may not change it, or
    if it does not publish all operations; ``TableDropped`` if one of ``tables`` does not exist (any more).
    """
    publication = read_publication(connection, name)
    if publication is not None and publication.left_out:
        raise PreflightFailed(
            f"Publication {name} leaves out {', '.join(publication.left_out)}.",
            fix=operations_statement(name),
        )
    missing = [table for table in tables if publication is None or not publication.covers(table.table_name)]
    if not missing or (publication is not None and publication.all_tables):
        return []
    names = [table.table_name for table in missing]
    if publication is None:
        command = create_statement(name, names)
        # In one transaction: without the comment, capture would never drop the publication that it created.
        comment = f"COMMENT ON PUBLICATION {identifier(name)} IS {literal(MADE_BY_CAPTURE)}"
        statements = f"BEGIN; {command} {comment}; COMMIT"
    else:
        command = statements = add_statement(name, names)
    with source_errors("preparing the publication"), connection.cursor() as cursor:
        try:
            with failpoint("source.publication"):
                cursor.execute(statements)
        except sql_errors.InsufficientPrivilege as error:
            cursor.execute("ROLLBACK")
            raise PreflightFailed(
                f"This role may not prepare publication {name}: {error.diag.message_primary}.",
                fix=f"Run as the owner of the tables: {command}",
            ) from None
        except sql_errors.UndefinedTable as error:
            cursor.execute("ROLLBACK")
            raise TableDropped(
                f"Publication {name} could not be prepared: {error.diag.message_primary}.",
                fix="Start capture again: it reads again which tables exist.",
            ) from None
    return [table.full_name for table in missing]


def remove_table(connection: Connection, name: str, table: TableName) -> None:
    """Remove ``table`` from publication ``name``. Raises ``PreflightFailed`` if the role may not alter it."""
    statement = drop_statement(name, [table])
    with source_errors("taking a table out of the publication"), connection.cursor() as cursor:
        try:
            with failpoint("source.publication"):
                cursor.execute(statement)
        except sql_errors.InsufficientPrivilege as error:
            raise PreflightFailed(
                f"This role may not alter publication {name}: {error.diag.message_primary}.",
                fix=f"Run as its owner: {statement}",
            ) from None


def drop_publication(connection: Connection, name: str) -> None:
    """Drop publication ``name`` if it exists. Raises ``PreflightFailed`` if the role may not drop it."""
    with source_errors("dropping the publication"), connection.cursor() as cursor:
        try:
            with failpoint("source.publication_drop"):
                cursor.execute(f"DROP PUBLICATION IF EXISTS {identifier(name)}")
        except sql_errors.InsufficientPrivilege as error:
            raise PreflightFailed(
                f"This role may not drop publication {name}: {error.diag.message_primary}.",
                fix=f"Run as its owner: DROP PUBLICATION {identifier(name)};",
            ) from None


_NAMED = """
SELECT n.nspname::text, c.relname::text
FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s
"""

_SCHEMAS = """
SELECT n.nspname::text
FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
JOIN pg_namespace n ON n.oid = s.pnnspid
WHERE p.pubname = %s
"""

_ROOTS = """
SELECT n.nspname::text, c.relname::text, {own_terms}
FROM pg_publication p, pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s AND c.relkind = 'p' AND (p.puballtables OR EXISTS (
    SELECT FROM pg_partition_ancestors(c.oid) a JOIN pg_class above ON above.oid = a.relid
    WHERE EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = above.oid)
       OR {in_schema}
))
"""

_ROOTS_13 = _ROOTS.format(own_terms="'[]'::json", in_schema="false")

_ROOTS_15 = _ROOTS.format(
    own_terms="""(
    SELECT coalesce(json_agg(json_build_object('schema', m.nspname, 'table', leaf.relname)), '[]')
    FROM pg_partition_tree(c.oid) t JOIN pg_class leaf ON leaf.oid = t.relid
    JOIN pg_namespace m ON m.oid = leaf.relnamespace
    JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = leaf.oid
    WHERE t.isleaf AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL))""",
    in_schema="""EXISTS (
        SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = above.relnamespace)""",
)


def _listed(tables: Iterable[TableName]) -> str:
    return ", ".join(qualified(schema, table) for schema, table in tables)


DEFAULT_ROLE = "omnisupport_capture"


def grants_sql(role: str, database: str, publication: str, tables: Sequence[TableContract]) -> str:
    """Return a psql script that creates ``role`` and gives it the least rights to capture ``tables``.

    The script contains no password; it is set afterwards. Whoever runs the script creates the publication, so
    the role needs neither CREATE on the database nor the ownership of a table.
    """
    name = identifier(role)
    schemas = sorted({table.schema for table in tables})
    lines = [
        "-- 1. As a superuser, or as the administrator of a managed service.",
        f"CREATE ROLE {name} LOGIN REPLICATION;",
        f"--    Its password, in psql:  \\password {role}",
        f"--    Amazon RDS has no REPLICATION; there:  GRANT rds_replication TO {name};",
        f"GRANT CONNECT ON DATABASE {identifier(database)} TO {name};",
        "",
        f"-- 2. In database {database}, as the owner of the schemas and tables, with CREATE on the database",
        "--    (for the publication), or as a superuser.",
        *(f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {name};" for schema in schemas),
        *(f"GRANT SELECT ON {qualified(table.schema, table.table)} TO {name};" for table in tables),
        create_statement(publication, [table.table_name for table in tables]),
    ]
    return "\n".join(lines)
