"""Comparing a table of the lake with rows of its source, key by key and column by column.

The comparison shares no code with the pipeline that made the table: DuckDB reads the lake's files
and casts the source's text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind

_SHOWN = 20
"""Differing keys that are listed; all of them are counted."""

_CASTS = {
    Kind.BOOLEAN: "BOOLEAN",
    Kind.SHORT: "SMALLINT",
    Kind.INTEGER: "INTEGER",
    Kind.LONG: "BIGINT",
    Kind.FLOAT: "FLOAT",
    Kind.DOUBLE: "DOUBLE",
    Kind.DATE: "DATE",
    Kind.TIMESTAMPTZ: "TIMESTAMPTZ",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose rows differ: ``columns`` that do, or why the row as a whole does."""

    key: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one table. ``unresolved``: live rows with a column whose value is not known."""

    source_rows: int
    current_rows: int
    deleted_rows: int
    unresolved: int
    differences: int
    examples: tuple[Difference, ...]


def compare(contract: TableContract, expected: Path, files: Sequence[str]) -> Comparison:
    """Compare the published rows in ``files`` with ``expected``, the source's rows as text.

    ``expected``: a Parquet file with the contract's columns as PostgreSQL's text, arrays also as
    JSON in ``json:<column>``. A row of the source must be in the lake with equal values, deleted
    there only if its soft-delete column says so; a live row of the lake must be in the source.
    """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"CREATE VIEW source AS SELECT * FROM read_parquet({_text(str(expected))})")
        listed = ", ".join(_text(file) for file in files)
        state = f"read_parquet([{listed}], union_by_name = true)" if files else _nothing(contract)
        connection.execute(f"CREATE VIEW lake AS SELECT * FROM {state}")
        connection.execute(f"CREATE TABLE pairs AS {_pairs(contract)}")
        counts = connection.execute(
            "SELECT (SELECT count(*) FROM source), count(*) FILTER (NOT _cdc_is_deleted),"
            " count(*) FILTER (_cdc_is_deleted),"
            " count(*) FILTER (NOT _cdc_is_deleted AND len(_cdc_unresolved) > 0) FROM lake"
        ).fetchone()
        differing = "FROM pairs WHERE len(differing) > 0"
        total = connection.execute(f"SELECT count(*) {differing}").fetchone()
        examples = connection.execute(
            f"SELECT key, differing {differing} ORDER BY key LIMIT {_SHOWN}"
        ).fetchall()
    assert counts is not None and total is not None
    source_rows, current_rows, deleted_rows, unresolved = counts
    return Comparison(
        source_rows=source_rows,
        current_rows=current_rows,
        deleted_rows=deleted_rows,
        unresolved=unresolved,
        differences=total[0],
        examples=tuple(Difference(key, tuple(columns)) for key, columns in examples),
    )


def _pairs(contract: TableContract) -> str:
    keys = [contract.column(name) for name in contract.key]
    same_key = " AND ".join(f"{_cast(column)} = l.{_name(column.name)}" for column in keys)
    plain = [column for column in contract.columns if column.name not in contract.key]
    in_source, in_lake = f"s.{_name(keys[0].name)} IS NOT NULL", "l._cdc_key IS NOT NULL"
    both = f"{in_source} AND {in_lake}"
    reasons = [
        f"CASE WHEN NOT ({in_lake}) THEN 'missing in the lake' END",
        f"CASE WHEN NOT ({in_source}) AND NOT l._cdc_is_deleted THEN 'not in the source' END",
        f"CASE WHEN {both} AND l._cdc_is_deleted AND {_alive(contract)} THEN 'deleted in the lake' END",
        *(f"CASE WHEN {both} AND NOT ({_equal(column)}) THEN {_text(column.name)} END" for column in plain),
    ]
    key = " || ',' || ".join(f"coalesce(s.{_name(k.name)}, l.{_name(k.name)}::VARCHAR)" for k in keys)
    return (
        f"SELECT {key} AS key, list_filter([{', '.join(reasons)}], lambda x: x IS NOT NULL) AS differing"
        f" FROM source s FULL OUTER JOIN lake l ON {same_key}"
    )


def _alive(contract: TableContract) -> str:
    mark = contract.soft_delete_column
    return "true" if mark is None else f"s.{_name(mark)} IS NULL"


def _equal(column: Column) -> str:
    text, value = f"s.{_name(column.name)}", f"l.{_name(column.name)}"
    exact = f"l._cdc_exact[{_text(column.name)}]"
    return (
        f"({text} IS NULL) = ({value} IS NULL AND {exact} IS NULL) AND "
        f"CASE WHEN {exact} IS NOT NULL THEN {exact} = {text} "
        f"ELSE {_cast(column)} IS NOT DISTINCT FROM {value} END"
    )


def _cast(column: Column) -> str:
    """The source's text of ``column`` as a value of the type that the lake has for it."""
    kind, text = column.type.kind, f"s.{_name(column.name)}"
    if kind is Kind.DECIMAL:
        return f"TRY_CAST({text} AS DECIMAL({column.type.precision}, {column.type.scale}))"
    if kind is Kind.TIMESTAMP:
        return f"TRY_CAST({text} || '+00' AS TIMESTAMPTZ)"
    if kind is Kind.BINARY:
        return f"unhex(substr({text}, 3))"
    if kind in ARRAYS:
        items = "VARCHAR[]" if kind is Kind.TEXT_ARRAY else "BIGINT[]"
        return f"TRY_CAST(s.{_name('json:' + column.name)}::JSON AS {items})"
    return f"TRY_CAST({text} AS {_CASTS[kind]})" if kind in _CASTS else text


def _nothing(contract: TableContract) -> str:
    """A lake table without rows: no file tells its columns."""
    listed = ", ".join(f"NULL AS {_name(column.name)}" for column in contract.columns)
    return (
        f"(SELECT {listed}, NULL::VARCHAR AS _cdc_key, false AS _cdc_is_deleted,"
        " []::VARCHAR[] AS _cdc_unresolved, MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact WHERE false)"
    )


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
