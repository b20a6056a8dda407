"""Reads tables as they are at the source now: columns with their true types, comments, and keys.

This module reads everything that a contract can say about a table. A few queries read all tables, so hundreds
of tables need no more round trips than one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pg_types import PgType
from omnisupport_ingest.sources.postgres.session.connection import source_errors

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class LiveColumn:
    """A column. ``pg_type``: its type as ``format_type`` writes it; a domain is replaced by its base type.

    ``generated``: the server computes it, so the stream never sends it. ``labels``: labels of an enum type,
    else empty. ``max_length``: the n of ``varchar(n)`` and ``char(n)``.
    """

    name: str
    pg_type: str
    not_null: bool
    generated: bool
    labels: tuple[str, ...]
    max_length: int | None
    comment: str | None

    @property
    def type(self) -> PgType:
        return PgType.parse(self.pg_type)


@dataclass(frozen=True, slots=True)
class LiveIndex:
    """A unique index that can identify every row: not partial, only NOT NULL columns, no expressions.

    ``columns``: its key columns, without those of ``INCLUDE``. ``identity``: it is the table's replica
    identity. ``deferrable``: two rows may share a key until their transaction commits.
    """

    name: str
    columns: tuple[str, ...]
    primary: bool
    identity: bool
    deferrable: bool


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table, view, materialized view or foreign table.

    ``kind``, ``persistence`` and ``replica_identity``: letters of ``pg_class``. ``root``: the partitioned
    table that this is a partition of. ``extension``: the extension that it belongs to.
    """

    schema: str
    table: str
    kind: str
    persistence: str
    replica_identity: str
    root: str | None
    extension: str | None
    comment: str | None
    columns: tuple[LiveColumn, ...]
    unique: tuple[LiveIndex, ...]

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def is_logged(self) -> bool:
        """Whether its changes can be captured: an ordinary or partitioned table, permanent and logged."""
        return self.kind in ("r", "p") and self.persistence == "p"

    @property
    def primary_key(self) -> LiveIndex | None:
        return next((index for index in self.unique if index.primary), None)

    @property
    def identity(self) -> frozenset[str]:
        """The columns of the old row that the stream sends with an update or delete."""
        if self.replica_identity == "f":
            return frozenset(column.name for column in self.columns if not column.generated)
        chosen = [index for index in self.unique if self._is_identity(index)]
        return frozenset(chosen[0].columns) if chosen else frozenset()

    def column(self, name: str) -> LiveColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    def _is_identity(self, index: LiveIndex) -> bool:
        by_default = self.replica_identity == "d" and index.primary and not index.deferrable
        return by_default or (self.replica_identity == "i" and index.identity)


def read_live_tables(
    connection: Connection, only: Collection[TableName] | None = None
) -> dict[TableName, LiveTable]:
    """Return the tables of the database, or those of ``only`` that exist, views and foreign tables included.

    Leaves out system schemas and temporary tables. Needs no right on the tables themselves. Raises
    ``SourceUnavailable``.
    """
    wanted = sorted(only) if only is not None else None
    with source_errors("reading the tables of the source"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_TABLES, _filter(wanted))
        tables = cursor.fetchall()
        oids = [row[0] for row in tables]
        cursor.execute(_COLUMNS, (oids,))
        columns = _by_table(cursor.fetchall(), LiveColumn)
        cursor.execute(_UNIQUE, (oids,))
        unique = _by_table(cursor.fetchall(), LiveIndex)
    return {
        (schema, table): LiveTable(
            schema, table, kind, persistence, identity, root, extension, comment,
            columns.get(oid, ()), unique.get(oid, ()),
        )
        for oid, schema, table, kind, persistence, identity, root, extension, comment in tables
    }  # fmt: skip


_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       c.relreplident::text,
       CASE WHEN c.relispartition THEN (
           SELECT rn.nspname || '.' || r.relname
           FROM pg_class r JOIN pg_namespace rn ON rn.oid = r.relnamespace
           WHERE r.oid = pg_partition_root(c.oid)) END,
       (SELECT e.extname::text FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
        WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.refclassid = 'pg_extension'::regclass
          AND d.deptype = 'e' LIMIT 1),
       obj_description(c.oid, 'pg_class')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relpersistence <> 't'
  AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
  AND (%s OR (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%s::text[], %s::text[])))
ORDER BY 2, 3
"""

# Resolves domains, and arrays of domains, to their base types.
_COLUMNS = """
WITH RECURSIVE base (relation, place, type, modifier, elements, depth) AS (
    SELECT a.attrelid, a.attnum, a.atttypid, a.atttypmod, '', 0 FROM pg_attribute a
    WHERE a.attrelid = ANY (%s::bigint[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT b.relation, b.place,
           CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.typelem END,
           CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE -1 END,
           CASE WHEN t.typtype = 'd' THEN b.elements ELSE b.elements || '[]' END, b.depth + 1
    FROM base b JOIN pg_type t ON t.oid = b.type LEFT JOIN pg_type e ON e.oid = t.typelem
    WHERE t.typtype = 'd' OR (t.typcategory = 'A' AND e.typtype = 'd')
), resolved AS (
    SELECT DISTINCT ON (relation, place) * FROM base ORDER BY relation, place, depth DESC
)
SELECT a.attrelid::bigint, a.attname::text, format_type(r.type, r.modifier) || r.elements, a.attnotnull,
       a.attgenerated <> '',
       ARRAY(SELECT enumlabel::text FROM pg_enum WHERE enumtypid = r.type AND r.elements = ''
             ORDER BY enumsortorder),
       CASE WHEN r.type IN ('bpchar'::regtype, 'varchar'::regtype) AND r.modifier > 4 AND r.elements = ''
            THEN r.modifier - 4 END,
       col_description(a.attrelid, a.attnum)
FROM resolved r JOIN pg_attribute a ON a.attrelid = r.relation AND a.attnum = r.place
ORDER BY a.attrelid, a.attnum
"""

# An int2vector is indexed from 0. Columns from ``indnkeyatts`` on are those of INCLUDE.
_UNIQUE = """
SELECT i.indrelid::bigint, c.relname::text,
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE k.place <= i.indnkeyatts ORDER BY k.place),
       i.indisprimary, i.indisreplident, NOT i.indimmediate
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = ANY (%s::bigint[]::oid[]) AND i.indisunique AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
  AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND NOT a.attnotnull
                  AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
ORDER BY i.indrelid, NOT i.indisprimary, c.relname
"""


def _filter(wanted: list[TableName] | None) -> tuple[bool, list[str], list[str]]:
    if wanted is None:
        return True, [], []
    return False, [schema for schema, _ in wanted], [table for _, table in wanted]


def _by_table(rows: list[tuple[Any, ...]], value: Callable[..., _Value]) -> dict[int, tuple[_Value, ...]]:
    by_oid: dict[int, list[_Value]] = {}
    for oid, *facts in rows:
        built = value(*(tuple(fact) if isinstance(fact, list) else fact for fact in facts))
        by_oid.setdefault(oid, []).append(built)
    return {oid: tuple(values) for oid, values in by_oid.items()}
