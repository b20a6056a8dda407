"""Facts about the tables of a database that is read by queries, for their first contracts.

PostgreSQL gives the same facts as for a log. From other databases, SQLAlchemy reads columns, types, NOT NULL,
keys and indexes of the tables in the default schema. SQLite does not enforce declared types, so no length and
no number of digits is taken from it, and a whole number may have 64 bits. A reading by queries needs less of
a table than a log does (no WAL, no replica identity), and it sees generated columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from omnisupport_ingest.contracts.cursor_policy import TIMES
from omnisupport_ingest.contracts.model import CursorCandidate
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.sources.postgres.catalog.cursor_candidates import (
    ColumnFacts,
    cursor_candidates,
    judged,
)
from omnisupport_ingest.sources.postgres.catalog.live_table import (
    LiveColumn,
    LiveTable,
    read_live_tables,
)
from omnisupport_ingest.sources.postgres.catalog.new_contract import Draft, NoKey, draft
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.reflected import pg_type_of, refusals, unique_keys
from omnisupport_ingest.sources.query.run import postgres_dsn


@dataclass
class ShownTables:
    """Tables of a source, and for each the columns that could be its cursor, the usable ones first."""

    live: dict[TableName, LiveTable] = field(default_factory=dict)
    candidates: dict[TableName, tuple[CursorCandidate, ...]] = field(default_factory=dict)


def shown_tables(connection: str) -> ShownTables:
    """Return the tables of the database at ``connection`` (as of ``run.open_reader``).

    Raises the errors of the reader.
    """
    dsn = postgres_dsn(connection)
    if dsn is not None:
        with closing(connect(dsn)) as session:
            return ShownTables(read_live_tables(session), cursor_candidates(session))
    found = ShownTables()
    with closing(DialectReader(connection)) as reader:
        reader.begin()
        with refusals("the source"):
            for shown in _tables(reader.inspect(), lite=reader.lite):
                name = (shown.live.schema, shown.live.table)
                found.live[name], found.candidates[name] = shown.live, shown.candidates
    return found


def draft_by_query(
    table: LiveTable, *, source: str, name: str, owner: str, candidates: tuple[CursorCandidate, ...] = ()
) -> Draft:
    """Return the contract of ``table`` for a reading by queries; arguments and errors as of ``draft``."""
    if not table.unique:
        raise NoKey(
            f"{table.full_name} has no primary key, and no unique index over columns that are NOT NULL: "
            "nothing keeps its rows apart.",
            fix="Give it one. Or write a contract by hand, with columns that you know to keep its rows apart "
            "as x-cdc.key: docs/incremental.md.",
        )
    # What only a reading by log requires is set as fulfilled.
    columns = tuple(replace(each, generated=False) for each in table.columns)
    read = replace(table, kind="r", persistence="p", replica_identity="f", columns=columns)
    return draft(read, source=source, name=name, owner=owner, candidates=candidates)


@dataclass(frozen=True, slots=True)
class _Shown:
    live: LiveTable
    candidates: tuple[CursorCandidate, ...]


def _tables(inspector: sa.Inspector, *, lite: bool) -> Iterator[_Shown]:
    """Yield the tables of the default schema. ``lite``: the database is SQLite."""
    schema = inspector.default_schema_name or ""
    for table in sorted(inspector.get_table_names(schema)):
        unique = unique_keys(inspector, (table, schema))
        key = tuple(inspector.get_pk_constraint(table, schema)["constrained_columns"])
        shown = inspector.get_columns(table, schema)
        columns = tuple(_column(each, in_key=each["name"] in key, lite=lite) for each in shown)
        live = LiveTable(schema, table, "r", "p", "d", None, None, None, columns, unique)
        indexes = inspector.get_indexes(table, schema)
        first = {each["column_names"][0] for each in indexes} | {*key[:1]}
        candidates = [
            judged(
                ColumnFacts(
                    column.name,
                    column.pg_type,
                    column.not_null,
                    default=each.get("default") is not None,
                    indexed=column.name in first,
                    correlation=None,
                    trigger=None,
                    in_key=column.name in key,
                ),
                triggers_known=False,
            )
            for each, column in zip(shown, columns, strict=True)
            if column.type.kind in TIMES | INTEGERS
        ]
        if lite:
            candidates += [
                CursorCandidate(each.name, False, _TEXT)
                for each in columns
                if each.pg_type == "text" and each.name not in key and _NAMED_AS_TIME.search(each.name)
            ]
        yield _Shown(live, tuple(sorted(candidates, key=lambda each: not each.usable)))


_NAMED_AS_TIME = re.compile(
    r"(?i:(^|_)(date|time(?!_?zone))|(^|_)(at|on)$)|[a-z](At|On|Date|Time)$",
)
_TEXT = "it is declared as text: correct x-pg-type to a time if it holds ISO texts in UTC"


def _column(shown: Any, *, in_key: bool, lite: bool) -> LiveColumn:
    declared = shown["type"]
    pg_type, length = pg_type_of(declared), getattr(declared, "length", None)
    if lite:
        length = None
        if isinstance(declared, sa.Integer):
            pg_type = "bigint"
        elif isinstance(declared, sa.String):
            pg_type = "text"
        elif isinstance(declared, sa.Numeric) and not isinstance(declared, sa.Float):
            # SQLAlchemy gives this name to every type that it does not know, for example timestamptz.
            pg_type = "numeric" if declared.precision is not None else ""
    comment = shown.get("comment")
    if not pg_type:
        comment = f"{comment or ''} Its type is not known to be one of PostgreSQL: correct x-pg-type.".strip()
    max_length = length if pg_type.startswith("character varying") else None
    # SQLite reports the columns of a key as nullable.
    not_null = in_key or not shown.get("nullable", True)
    return LiveColumn(shown["name"], pg_type or "text", not_null, False, (), max_length, comment)
