"""Cutting a table into ranges of its key, each about as many rows, and reading one of them.

Keys are walked in the order of an index, so ranges are even whatever the distribution of the keys and
without statistics: every step reads as many index entries as a chunk has rows. A table whose key has no
index is cut by place (``ctid``), as each range of keys would be another read of all of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.catalog.relations import CatalogRelation
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified

Bound = tuple[str, ...]
"""The values of the columns that a table is cut by, as PostgreSQL's text."""

PLACE = "ctid"
_ROWS_PER_PAGE = 60
"""Assumed where the server has never counted; only the size of chunks depends on it."""


def columns_to_cut_by(
    connection: Connection, schema: str, table: str, key: Sequence[str], *, partitioned: bool
) -> tuple[str, ...]:
    """The key's columns in the order of an index; ``ctid`` without one; none where neither will do.

    A table cut by place is exact only if updates carry whole rows (replica identity FULL), or if there
    are none: a row that moves from a place not read to one read is known by its update alone.
    """
    with source_errors(f"reading the indexes of {schema}.{table}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT array(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY k(number, place)"
            " JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number"
            " WHERE k.place <= %s ORDER BY k.place)"
            " FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_class x ON x.oid = i.indexrelid"
            " JOIN pg_am m ON m.oid = x.relam"
            " WHERE n.nspname = %s AND c.relname = %s AND m.amname = 'btree' AND i.indisvalid"
            " AND i.indpred IS NULL AND i.indnkeyatts >= %s"
            " ORDER BY i.indisprimary DESC, i.indisunique DESC, i.indnkeyatts, x.relname",
            (len(key), schema, table, len(key)),
        )
        for (columns,) in cursor.fetchall():
            if set(columns) == set(key):
                return tuple(columns)
    return () if partitioned else (PLACE,)


def cut(
    connection: Connection,
    schema: str,
    table: str,
    relation: CatalogRelation,
    by: Sequence[str],
    types: Sequence[str],
    rows: int,
    conditions: Sequence[str] = (),
) -> Iterator[Bound]:
    """The keys between chunks of about ``rows`` rows that meet ``conditions``; none if one chunk holds them.

    Each is read as it is asked for, in the open transaction of ``connection``: all of a large table take
    a while.
    """
    if not by:
        return
    if tuple(by) == (PLACE,):
        yield from _pages(connection, schema, table, rows)
        return
    listed = ", ".join(identifier(name) for name in by)
    # With names of their own, or ORDER BY would mean the texts.
    texts = ", ".join(f"{identifier(name)}::text AS bound_{n}" for n, name in enumerate(by))
    name = source_of_rows(schema, table, relation)
    bound: Bound | None = None
    while True:
        condition = where(by, types, bound, None, conditions)
        with source_errors(f"cutting {schema}.{table} into chunks"), connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {texts} FROM {name}{condition} ORDER BY {listed} OFFSET {rows - 1} LIMIT 1"
            )
            found = cursor.fetchone()
        if found is None:
            return
        bound = tuple(found)
        yield bound


def where_key(table: TableContract, types: Sequence[str], keys: Collection[str]) -> str:
    """The condition of the rows with one of ``keys``: JSON arrays of the texts of the contract's key."""
    listed = ", ".join(identifier(name) for name in table.key)
    rows = ", ".join(_row(json.loads(key), types) for key in sorted(keys))
    return f" WHERE ({listed}) IN ({rows})"


def where(
    by: Sequence[str],
    types: Sequence[str],
    start: Bound | None,
    end: Bound | None,
    others: Sequence[str] = (),
) -> str:
    """The condition of a chunk: above ``start``, up to and with ``end`` (null: open), and the ``others``."""
    left = f"({', '.join(identifier(name) for name in by)})"
    conditions = [*others]
    if start is not None:
        conditions.append(f"{left} > {_row(start, types)}")
    if end is not None:
        conditions.append(f"{left} <= {_row(end, types)}")
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def source_of_rows(schema: str, table: str, relation: CatalogRelation) -> str:
    """The rows that the stream is about, as they stand behind FROM; conditions may name every column.

    Of a partitioned table those of its partitions; of another not those of its children: an inheritance
    child is a table of its own in the stream.
    """
    name = f"{'' if relation.partitioned else 'ONLY '}{qualified(schema, table)}"
    if relation.row_filter is None:
        return name
    # So plain that the planner reads the table itself, by key, place or partition.
    rows = f"SELECT {PLACE}, tableoid, * FROM {name} WHERE ({relation.row_filter})"
    return f"({rows}) AS {identifier(table)}"


def _row(values: Sequence[str], types: Sequence[str]) -> str:
    cast = (f"CAST({literal(value)} AS {kind})" for value, kind in zip(values, types, strict=True))
    return f"({', '.join(cast)})"


def _pages(connection: Connection, schema: str, table: str, rows: int) -> Iterator[Bound]:
    with source_errors(f"reading the size of {schema}.{table}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_relation_size(c.oid) / current_setting('block_size')::int, c.reltuples, c.relpages"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s",
            (schema, table),
        )
        pages, counted, of_pages = cursor.fetchone()
    per_page = counted / of_pages if counted > 0 and of_pages > 0 else _ROWS_PER_PAGE
    step = max(1, int(rows / per_page))
    # Places in a page count from 1, so nothing stands at a bound.
    for page in range(step, pages, step):
        yield (f"({page},0)",)
