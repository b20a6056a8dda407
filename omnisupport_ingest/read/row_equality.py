"""SQL for DuckDB that decides whether a row of the source equals a row of the lake, column by column.

A source row has its columns as PostgreSQL's text, arrays also as JSON in ``json:<column>``; a lake row is a
row of a dimension. This shares no code with the pipeline that made the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from duckdb import DuckDBPyConnection

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind
from omnisupport_ingest.contracts.pii_policies import HASH
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.read.protected_rows import HASHES_PREFIX

CASTS = {
    Kind.BOOLEAN: "BOOLEAN",
    Kind.SHORT: "SMALLINT",
    Kind.INTEGER: "INTEGER",
    Kind.LONG: "BIGINT",
    Kind.FLOAT: "FLOAT",
    Kind.DOUBLE: "DOUBLE",
    Kind.DATE: "DATE",
    Kind.TIMESTAMPTZ: "TIMESTAMPTZ",
}
"""DuckDB's types for kinds whose values it reads from PostgreSQL's text."""


def select_source(contract: TableContract, rows: Path) -> str:
    """SQL: the rows of a file with rows of the source, with the parts of their keys."""
    parts = [f"{named(name)} AS {key_part(i)}" for i, name in enumerate(contract.key)]
    return f"SELECT *, {', '.join(parts)} FROM read_parquet({text(str(rows))})"


def select_lake(
    connection: DuckDBPyConnection, contract: TableContract, files: Sequence[LakeFile | str]
) -> str:
    """SQL: the rows in ``files`` of a dimension (none: it has no rows), with the parts of their keys."""
    state = live_sql(connection, files) if files else _nothing(contract)
    return f"SELECT *, {parts_of('_cdc_key', contract)} FROM {state}"


def key_part(number: int) -> str:
    """Return the name of the column with the text of that part of the key."""
    # No column of a contract may begin like this.
    return f"_cdc_key_{number}"


def parts_of(key: str, contract: TableContract) -> str:
    """SQL: the values in the JSON array ``key``, each as a column of its own."""
    return ", ".join(
        f"json_extract_string({key}, '$[{i}]') AS {key_part(i)}" for i in range(len(contract.key))
    )


def same_key(contract: TableContract, one: str, other: str) -> str:
    """SQL: whether the rows of two relations have the same key."""
    parts = [key_part(i) for i in range(len(contract.key))]
    return " AND ".join(f"{one}.{part} = {other}.{part}" for part in parts)


def not_marked(contract: TableContract) -> str:
    """SQL: whether the source's row ``s`` is not marked as deleted."""
    mark = contract.soft_delete_column
    return "true" if mark is None else f"s.{named(mark)} IS NULL"


def equal(column: Column) -> str:
    """SQL: whether the source's row ``s`` and the lake's ``l`` have equal values in ``column``.

    A hashed value is equal if the lake has its hash by one of the keys in force (``protected_rows``).
    """
    if column.pii == HASH:
        hashes, hashed = f"s.{named(HASHES_PREFIX + column.name)}", f"l.{named(column.name)}"
        one_of_them = f"list_contains(string_split({hashes}, ' '), {hashed})"
        return f"(({hashes} IS NULL AND {hashed} IS NULL) OR coalesce({one_of_them}, false))"
    shown, value = f"s.{named(column.name)}", f"l.{named(column.name)}"
    exact = f"l._cdc_exact[{text(column.name)}]"
    return (
        f"({shown} IS NULL) = ({value} IS NULL AND {exact} IS NULL) AND "
        f"CASE WHEN {exact} IS NOT NULL THEN {exact} = {shown} "
        f"ELSE {_cast(column)} IS NOT DISTINCT FROM {value} END"
    )


def _cast(column: Column) -> str:
    """SQL: the source's text of ``column`` as a value of the type that the lake has for it."""
    kind, shown = column.type.kind, f"s.{named(column.name)}"
    if kind is Kind.DECIMAL:
        return f"TRY_CAST({shown} AS DECIMAL({column.type.precision}, {column.type.scale}))"
    if kind is Kind.TIMESTAMP:
        # A column of the source may have a zone, which is UTC: the session's.
        zone = f"CASE WHEN regexp_matches({shown}, '[+]00( BC)?$') THEN '' ELSE '+00' END"
        return f"TRY_CAST({shown} || {zone} AS TIMESTAMPTZ)"
    if kind is Kind.BINARY:
        return f"unhex(substr({shown}, 3))"
    if kind in ARRAYS:
        items = "VARCHAR[]" if kind is Kind.TEXT_ARRAY else "BIGINT[]"
        return f"TRY_CAST(s.{named('json:' + column.name)}::JSON AS {items})"
    return f"TRY_CAST({shown} AS {CASTS[kind]})" if kind in CASTS else shown


def _nothing(contract: TableContract) -> str:
    """Return SQL for an empty lake table; without a file its columns come from the contract."""
    columns = ", ".join(f"NULL AS {named(column.name)}" for column in contract.columns)
    return (
        f"(SELECT {columns}, NULL::VARCHAR AS _cdc_key, NULL::VARCHAR AS _cdc_op, false AS _cdc_is_deleted,"
        " NULL::TIMESTAMPTZ AS _cdc_deleted_at, NULL::TIMESTAMPTZ AS _cdc_updated_at,"
        " []::VARCHAR[] AS _cdc_unresolved, MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact WHERE false)"
    )


def listed(files: Sequence[str]) -> str:
    """Return SQL for a list of texts."""
    return f"[{', '.join(text(file) for file in files)}]"


def named(name: str) -> str:
    """Return SQL for the name of a column, quoted."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return SQL for a text."""
    return "'" + value.replace("'", "''") + "'"
