"""The checksum of rows (``row_checksum``) of a dimension: SQL of DuckDB, for rows of relation ``l``."""

from __future__ import annotations

from collections.abc import Sequence

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind
from omnisupport_ingest.contracts.row_checksum import DIGITS, by_number
from omnisupport_ingest.read.row_equality import CASTS, named, text

Bound = Sequence[str] | None


def checksum_columns(contract: TableContract) -> str:
    """SQL: the three columns of a ``RowChecksum``, as texts."""
    digest = row_digest(contract.columns)
    sums = (f"coalesce(sum({row_number(digest, number)}::HUGEINT), 0)::VARCHAR" for number in (1, 2))
    return f"count(*)::VARCHAR, {', '.join(sums)}"


def row_digest(columns: Sequence[Column]) -> str:
    """SQL: the SHA-256 of the text of a row, in hexadecimal digits."""
    return f"sha256({' || '.join(_part(column) for column in columns)})"


def row_number(digest: str, number: int) -> str:
    """SQL: the first or second number of a row with ``digest``."""
    return f"('0x' || substr({digest}, {1 + (number - 1) * DIGITS}, {DIGITS}))::BIGINT"


def first_key(contract: TableContract) -> str:
    """Return SQL for the first key column, by which key spans (``KeySpan``) are made."""
    column = contract.column(contract.key[0])
    value = f"l.{named(column.name)}"
    if by_number(contract):
        return f"{value}::BIGINT"
    # A plain column, so that files are passed over by their statistics.
    if column.type.kind is Kind.TEXT:
        return value
    return f"coalesce(l._cdc_exact[{text(column.name)}], {_text(column, value)})"


def in_range(contract: TableContract, by: Sequence[str], start: Bound, end: Bound) -> str:
    """SQL: whether a row lies above ``start`` and not above ``end``, in the order of the lake's types.

    If the server orders keys in another way, the range has other rows there.
    """
    columns = {column.name: column for column in contract.columns}
    key_columns = f"({', '.join(f'l.{named(name)}' for name in by)})"
    conditions = ["true"]
    for bound, compared in ((start, ">"), (end, "<=")):
        if bound is not None:
            values = (_value(columns[name], value) for name, value in zip(by, bound, strict=True))
            conditions.append(f"{key_columns} {compared} ({', '.join(values)})")
    return " AND ".join(conditions)


def is_at_source(contract: TableContract) -> str:
    """SQL: whether the source has the row, as far as the lake knows. A row that is only marked as deleted
    exists.

    A marked row that was deleted later keeps its mark. Its last event shows that it is gone: a delete of its
    own, or, if the whole table was emptied, a time of deletion that is not the mark's.
    """
    mark = contract.soft_delete_column
    if mark is None:
        return "(NOT l._cdc_is_deleted)"
    value, marked_at = f"l.{named(mark)}", "l._cdc_updated_at"
    if contract.column(mark).type.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        marked_at = f"coalesce({value}, {marked_at})"
    # The exact text holds a mark that the typed column cannot hold.
    marked = f"coalesce({value}::VARCHAR, l._cdc_exact[{text(mark)}]) IS NOT NULL"
    alive_at_source = f"l._cdc_op IS DISTINCT FROM 'd' AND l._cdc_deleted_at IS NOT DISTINCT FROM {marked_at}"
    return f"(NOT l._cdc_is_deleted OR ({marked} AND {alive_at_source}))"


def _value(column: Column, value: str) -> str:
    kind = column.type.kind
    if kind is Kind.DECIMAL:
        return f"TRY_CAST({text(value)} AS DECIMAL({column.type.precision}, {column.type.scale}))"
    return f"TRY_CAST({text(value)} AS {CASTS[kind]})" if kind in CASTS else text(value)


def _part(column: Column) -> str:
    value, exact = f"l.{named(column.name)}", f"l._cdc_exact[{text(column.name)}]"
    shown = _text(column, value)
    # Reading the map of exact texts costs more than all else, so skip it for columns that always fit.
    if not column.always_fits:
        shown = f"coalesce({exact}, {shown})"
    return f"CASE WHEN {shown} IS NULL THEN 'N' ELSE strlen({shown}) || ':' || {shown} END"


def _text(column: Column, value: str) -> str:
    """Return SQL for the value as PostgreSQL writes it."""
    kind = column.type.kind
    if kind is Kind.BOOLEAN:
        return f"CASE {value} WHEN true THEN 't' WHEN false THEN 'f' END"
    if kind is Kind.TIMESTAMP:
        return f"regexp_replace({value}::VARCHAR, '[+]00$', '')"
    if kind is Kind.BINARY:
        return f"'\\x' || lower(hex({value}))"
    if kind is Kind.DECIMAL and column.type.scale == column.type.precision:
        # DuckDB writes no digit before the point where the type has room for none.
        return f"regexp_replace({value}::VARCHAR, '^(-?)[.]', '\\10.')"
    if kind in ARRAYS:
        return f"to_json({value})::VARCHAR"
    return f"{value}::VARCHAR"
