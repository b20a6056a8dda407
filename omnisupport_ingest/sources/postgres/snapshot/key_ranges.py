"""Cuts a table into key ranges with about equally many rows, and checks requested key ranges.

The bounds of a large table are keys of a sample of its pages, at even distances in their order. Bounds are
read from an index if the table is small, partitioned, read in part, or has no statistics: each is one chunk
of index entries above the bound before. So the ranges are even for any distribution of keys. A table whose
key has no index is cut by ``ctid``, because otherwise each key range would read the whole table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.key_range import ORDERED_TYPES, TEXT, KeyRange
from omnisupport_ingest.sources.postgres.catalog.relations import CatalogRelation, read_relation
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import TableUnreadable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified

Bound = tuple[str, ...]
"""Values of the columns that a table is cut by, as PostgreSQL's text."""

CTID = "ctid"
XMIN = "xmin"
"""The transaction that wrote the row's current version."""

_ROWS_PER_PAGE = 60
"""Assumed if the server has no statistics; only the size of chunks depends on it."""

_SAMPLED_PAGES = 400
"""Pages that are sampled for each chunk: chunks then differ by a few percent. To read 2,000,000 entries of an
index takes 0.3 s, the sample 0.02."""

_MOST_PAGES = 40_000
"""Pages of a sample: the server sorts their keys in one statement. Of more chunks, each has fewer."""

_FEWEST_CHUNKS = 2

_LARGEST_SHARE = 0.1
"""If a larger share of the pages would be sampled, the index is read instead."""


def columns_to_cut_by(
    connection: Connection, name: TableName, key: Sequence[str], *, partitioned: bool
) -> tuple[str, ...]:
    """Return the columns to cut a table by: those of its key, in the order of an index.

    Without an index: ``ctid``; for a partitioned table, nothing. Cutting by ctid is exact only if there are
    no updates, or updates carry whole rows (replica identity FULL). If an update moves a row into a page that
    was read already, the snapshot lacks the row, and only the update shows it.
    """
    with source_errors(f"reading the indexes of {'.'.join(name)}"), connection.cursor() as cursor:
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
            (len(key), *name, len(key)),
        )
        for (columns,) in cursor.fetchall():
            if set(columns) == set(key):
                return tuple(columns)
    return () if partitioned else (CTID,)


@dataclass(frozen=True, slots=True)
class CutBy:
    """How to cut a table: by the columns ``by`` with ``types``, into chunks of about ``rows`` rows."""

    by: tuple[str, ...]
    types: tuple[str, ...]
    rows: int


def cut(
    connection: Connection,
    table: TableContract,
    relation: CatalogRelation,
    into: CutBy,
    conditions: Sequence[str] = (),
) -> Iterator[Bound]:
    """Yield the bounds between the chunks of the rows that meet ``conditions``; none if one chunk is enough.

    Bounds are read as the caller iterates, in the open transaction of ``connection``. This takes a while if
    an index is read for many rows. Raises ``TableUnreadable`` if a column that the table is cut by is NULL in
    one of the rows: no key range has such a row.
    """
    by, rows = into.by, into.rows
    if not by:
        return
    size = _size(connection, table.table_name)
    if by == (CTID,):
        yield from _pages(size, rows)
        return
    _refuse_null(connection, table, relation, by, conditions)
    listed = ", ".join(identifier(name) for name in by)
    # With aliases, because ORDER BY would otherwise order by the texts.
    bounds = [f"bound_{number}" for number in range(len(by))]
    texts = ", ".join(f"{identifier(name)}::text AS {each}" for name, each in zip(by, bounds, strict=True))
    name = source_of_rows(table.table_name, relation)
    share = size.share_to_sample(rows)
    if share is not None and relation.row_filter is None and not conditions:
        sample = f"{name} TABLESAMPLE SYSTEM ({100 * share:.6f}) REPEATABLE (1)"
        with source_errors(f"cutting {table.full_name} into chunks"), connection.cursor() as cursor:
            # The sample tells how many rows there are now, so how many chunks.
            cursor.execute(
                f"SELECT {', '.join(bounds)} FROM (SELECT {texts},"
                f" row_number() OVER (ORDER BY {listed}) AS n, count(*) OVER () AS total"
                f" FROM {sample}) AS sample,"
                f" LATERAL (SELECT greatest(1, round(total / {share * rows:.3f}))::bigint AS chunks) AS cut"
                " WHERE n * chunks / total > (n - 1) * chunks / total AND n < total ORDER BY n"
            )
            # Keys are repeated if no index makes them unique.
            yield from dict.fromkeys(map(tuple, cursor.fetchall()))
        return
    bound: Bound | None = None
    while True:
        condition = where(by, into.types, bound, None, conditions)
        with source_errors(f"cutting {table.full_name} into chunks"), connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {texts} FROM {name}{condition} ORDER BY {listed} OFFSET {rows - 1} LIMIT 1"
            )
            bound_row = cursor.fetchone()
        if bound_row is None:
            return
        bound = tuple(bound_row)
        yield bound


def _refuse_null(
    connection: Connection,
    table: TableContract,
    relation: CatalogRelation,
    columns: Sequence[str],
    conditions: Sequence[str],
) -> None:
    """Raise ``TableUnreadable`` if one of ``columns`` is NULL in a row that meets ``conditions``.

    A capture does not start with a key column that may be NULL, but a column may become so later.
    """
    with source_errors(f"reading the columns of {table.full_name}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT a.attname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s AND a.attname = ANY(%s) AND NOT a.attnotnull",
            (*table.table_name, list(columns)),
        )
        nullable = sorted(column for (column,) in cursor.fetchall())
    for column in nullable:
        name = source_of_rows(table.table_name, relation)
        is_null = where((), (), None, None, (*conditions, f"{identifier(column)} IS NULL"))
        with source_errors(f"looking for NULL in {table.full_name}"), connection.cursor() as cursor:
            cursor.execute(f"SELECT FROM {name}{is_null} LIMIT 1")
            if cursor.fetchone() is None:
                continue
        raise TableUnreadable(
            f"Key column {column} of {table.full_name} is NULL in some rows, and no range of keys has these.",
            fix=f"Give these rows a value in {column}, then ALTER TABLE {qualified(*table.table_name)} ALTER "
            f"COLUMN {identifier(column)} SET NOT NULL; and omnisupport-ingest source snapshot {table.name}. "
            "omnisupport-ingest preflight names whatever else the key lacks.",
            table=table.full_name,
        )


def where_key(table: TableContract, types: Sequence[str], keys: Collection[str]) -> str:
    """Return the WHERE clause for the rows with one of ``keys`` (JSON arrays of key values without null)."""
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
    """Return the WHERE clause of a chunk: keys above ``start``, up to and including ``end``, and ``others``.

    A bound of None is open. ``others``: further conditions.
    """
    key_columns = f"({', '.join(identifier(name) for name in by)})"
    conditions = [*others]
    if start is not None:
        conditions.append(f"{key_columns} > {_row(start, types)}")
    if end is not None:
        conditions.append(f"{key_columns} <= {_row(end, types)}")
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def source_of_rows(table: TableName, relation: CatalogRelation) -> str:
    """Return the SQL that follows FROM for the rows that the stream sends. Conditions may use every column.

    For a partitioned table these are the rows of its partitions. Rows of inheritance children are left out:
    in the stream, a child is a separate table.
    """
    name = f"{'' if relation.partitioned else 'ONLY '}{qualified(*table)}"
    if relation.row_filter is None:
        return name
    # A plain subquery: the planner can still read the table by key, ctid or partition.
    rows = f"SELECT {CTID}, tableoid, {XMIN}, * FROM {name} WHERE ({relation.row_filter})"
    return f"({rows}) AS {identifier(table[1])}"


def _row(values: Sequence[str], types: Sequence[str]) -> str:
    cast = (f"CAST({literal(value)} AS {kind})" for value, kind in zip(values, types, strict=True))
    return f"({', '.join(cast)})"


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of a table: its pages, and the rows in each by the server's statistics (0: it has none)."""

    pages: int
    rows_per_page: float

    def share_to_sample(self, rows: int) -> float | None:
        """Return the share of the pages to sample for chunks of about ``rows`` rows; None: read an index."""
        chunks = round(self.pages * self.rows_per_page / rows)
        if chunks < _FEWEST_CHUNKS:
            return None
        share = min(_SAMPLED_PAGES * chunks, _MOST_PAGES) / self.pages
        return share if share <= _LARGEST_SHARE else None


def _size(connection: Connection, name: TableName) -> _Size:
    with source_errors(f"reading the size of {'.'.join(name)}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_relation_size(c.oid) / current_setting('block_size')::int, c.reltuples, c.relpages"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s",
            name,
        )
        pages, counted, of_pages = cursor.fetchone()
    return _Size(pages, counted / of_pages if counted > 0 and of_pages > 0 else 0)


def _pages(size: _Size, rows: int) -> Iterator[Bound]:
    step = max(1, int(rows / (size.rows_per_page or _ROWS_PER_PAGE)))
    # The tuples in a page are numbered from 1, so no row has the ctid of a bound.
    for page in range(step, size.pages, step):
        yield (f"({page},0)",)


_BYTE_ORDER = ("C", "POSIX")
"""Locales of the C library that order texts by their bytes."""


class NoKeyRange(IngestError):
    """The range of keys is none: a value does not fit its column, it ends before it starts, or the lake
    cannot order such keys.

    Fix: Correct ``--from`` and ``--to``, or have the whole table read: ``omnisupport-ingest source snapshot
    TABLE``.
    """

    exit_code = 2


def key_range(
    connection: Connection,
    publication: str,
    table: TableContract,
    start: Sequence[str] | None,
    end: Sequence[str] | None,
) -> KeyRange:
    """Return the range of keys of ``table`` from ``start`` to ``end``, with values as the server writes them.

    Each bound has values for the first columns of the key; None: open. Raises ``NoKeyRange`` with the reason,
    and as ``read_relation`` does.
    """
    longest = max(len(start or ()), len(end or ()))
    if longest > len(table.key) or longest == 0:
        raise NoKeyRange(
            f"{longest} values were given, and the key of {table.full_name} has {len(table.key)} columns: "
            f"{', '.join(table.key)}.",
            fix="Give the value of the first column, or a JSON array with those of the first few.",
        )
    relation = read_relation(connection, publication, table)
    columns = table.key[:longest]
    kinds = kinds_of(relation, columns)
    for column, kind in zip(columns, kinds, strict=True):
        if kind is None or (kind == TEXT and not by_bytes(connection, table, column)):
            of_type = _type(relation, column)
            collated = " in a collation other than C" if kind == TEXT else ""
            raise NoKeyRange(
                f"Column {column} of {table.full_name} is {of_type}{collated}: the lake cannot tell which "
                "keys lie in a range of it.",
                fix="Have the table read as a whole: omnisupport-ingest source snapshot "
                f"{table.name}. Ranges are for keys of integers, uuid, date, and text in the collation C.",
            )
    known = tuple(kind for kind in kinds if kind is not None)
    bounds = KeyRange(
        known,
        None if start is None else _canonical(connection, table, relation, start),
        None if end is None else _canonical(connection, table, relation, end),
    )
    if bounds.is_empty:
        raise NoKeyRange(
            f"The range of keys ends before it starts: {bounds}.",
            fix="Swap the values of --from and --to.",
        )
    return bounds


def kinds_of(relation: CatalogRelation, columns: Sequence[str]) -> tuple[str | None, ...]:
    """Return how the values of each of ``columns`` are ordered; None if the lake cannot order them."""
    return tuple(ORDERED_TYPES.get(_type(relation, column).partition("(")[0]) for column in columns)


def conditions(table: TableContract, relation: CatalogRelation, scope: KeyRange) -> tuple[str, ...]:
    """Return the SQL conditions for the rows whose keys lie in ``scope``."""
    compared_keys = []
    for bound, compared in ((scope.start, ">="), (scope.end, "<=")):
        if bound is not None:
            names = ", ".join(identifier(name) for name in table.key[: len(bound)])
            values = ", ".join(
                f"CAST({literal(value)} AS {_type(relation, name)})"
                for name, value in zip(table.key, bound, strict=False)
            )
            compared_keys.append(f"({names}) {compared} ({values})")
    return tuple(compared_keys)


def _type(relation: CatalogRelation, column: str) -> str:
    return dict(zip(relation.columns, relation.types, strict=True))[column]


def _canonical(
    connection: Connection, table: TableContract, relation: CatalogRelation, values: Sequence[str]
) -> tuple[str, ...]:
    """Return ``values`` as the server writes them: ``007`` becomes ``7``."""
    texts = []
    for column, value in zip(table.key, values, strict=False):
        of_type = _type(relation, column)
        try:
            with source_errors(f"reading a key of {table.full_name}"), connection.cursor() as cursor:
                # Cast without the length: otherwise a text that is too long for the column would be cut.
                cursor.execute(f"SELECT CAST({literal(value)} AS {of_type.partition('(')[0]})::text")
                texts.append(cursor.fetchone()[0])
        except psycopg2.DataError as error:
            raise NoKeyRange(
                f"{value!r} is no value of column {column} of {table.full_name}: {first_line(error)}.",
                fix=f"Give a value of type {of_type}.",
            ) from error
    return tuple(texts)


def by_bytes(connection: Connection, table: TableContract, column: str) -> bool:
    """Whether texts in ``column`` are ordered by their UTF-8 bytes."""
    with source_errors(f"reading the collation of {table.full_name}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT CASE o.collprovider WHEN 'd' THEN d.datcollate ELSE o.collcollate END,"
            " CASE o.collprovider WHEN 'd' THEN coalesce(to_jsonb(d) ->> 'datlocprovider', 'c')"
            "   ELSE o.collprovider::text END"
            " FROM pg_attribute a JOIN pg_collation o ON o.oid = a.attcollation"
            " JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
            " JOIN pg_database d ON d.datname = current_database()"
            " WHERE n.nspname = %s AND c.relname = %s AND a.attname = %s"
            " AND current_setting('server_encoding') = 'UTF8'",
            (table.schema, table.table, column),
        )
        collation = cursor.fetchone()
    if collation is None:
        return False
    collate, provider = collation
    # The server's builtin collations order by code points. Those of ICU never do, whatever their names.
    return provider == "b" or (provider == "c" and collate in _BYTE_ORDER)
