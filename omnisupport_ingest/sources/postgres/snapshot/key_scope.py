"""The range of keys that a person asks for, as the server understands it; else why there is none."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.key_range import ORDERED_TYPES, TEXT, KeyRange
from omnisupport_ingest.sources.postgres.catalog.relations import CatalogRelation, read_relation
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal

_BYTE_ORDER = ("C", "POSIX")
"""The locales of the C library that order texts by their bytes."""


class NoKeyRange(IngestError):
    """The keys that were asked for are no range that the lake can tell from others."""

    exit_code = 2


def key_range(
    connection: Connection,
    publication: str,
    table: TableContract,
    start: Sequence[str] | None,
    end: Sequence[str] | None,
) -> KeyRange:
    """The range of keys of ``table`` from ``start`` to ``end``, each of the key's first columns, in the text
    that the server has for them. ``NoKeyRange`` with the reason, or as ``read_relation`` raises."""
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
        if kind is None or (kind == TEXT and not _by_bytes(connection, table, column)):
            of_type = _type(relation, column)
            collated = " in a collation other than C" if kind == TEXT else ""
            raise NoKeyRange(
                f"Column {column} of {table.full_name} is {of_type}{collated}: the lake cannot tell which "
                "keys lie in a range of it.",
                fix="Have the table read as a whole: omnisupport-ingest source snapshot "
                f"{table.name}. Ranges are for keys of integers, uuid, date, and text in the collation C.",
            )
    told = tuple(kind for kind in kinds if kind is not None)
    found = KeyRange(
        told,
        None if start is None else _canonical(connection, table, relation, start),
        None if end is None else _canonical(connection, table, relation, end),
    )
    if found.is_empty:
        raise NoKeyRange(
            f"The range of keys ends before it starts: {found}.", fix="Swap the values of --from and --to."
        )
    return found


def kinds_of(relation: CatalogRelation, columns: Sequence[str]) -> tuple[str | None, ...]:
    """How the values of ``columns`` are ordered; null where the lake cannot tell."""
    return tuple(ORDERED_TYPES.get(_type(relation, column).partition("(")[0]) for column in columns)


def conditions(table: TableContract, relation: CatalogRelation, scope: KeyRange) -> tuple[str, ...]:
    """The SQL conditions of the rows whose keys lie in ``scope``."""
    found = []
    for bound, compared in ((scope.start, ">="), (scope.end, "<=")):
        if bound is not None:
            names = ", ".join(identifier(name) for name in table.key[: len(bound)])
            values = ", ".join(
                f"CAST({literal(value)} AS {_type(relation, name)})"
                for name, value in zip(table.key, bound, strict=False)
            )
            found.append(f"({names}) {compared} ({values})")
    return tuple(found)


def _type(relation: CatalogRelation, column: str) -> str:
    return dict(zip(relation.columns, relation.types, strict=True))[column]


def _canonical(
    connection: Connection, table: TableContract, relation: CatalogRelation, values: Sequence[str]
) -> tuple[str, ...]:
    """``values`` as the server writes them: ``007`` is ``7``."""
    found = []
    for column, value in zip(table.key, values, strict=False):
        of_type = _type(relation, column)
        try:
            with source_errors(f"reading a key of {table.full_name}"), connection.cursor() as cursor:
                # A text that is too long for the column would be cut by a cast to its type with the length.
                cursor.execute(f"SELECT CAST({literal(value)} AS {of_type.partition('(')[0]})::text")
                found.append(cursor.fetchone()[0])
        except psycopg2.DataError as error:
            raise NoKeyRange(
                f"{value!r} is no value of column {column} of {table.full_name}: {first_line(error)}.",
                fix=f"Give a value of type {of_type}.",
            ) from error
    return tuple(found)


def _by_bytes(connection: Connection, table: TableContract, column: str) -> bool:
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
        found = cursor.fetchone()
    if found is None:
        return False
    collate, provider = found
    # The collations that are built into the server order by code points; ICU has another order by any name.
    return provider == "b" or (provider == "c" and collate in _BYTE_ORDER)
