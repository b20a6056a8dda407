"""The columns of a target: those of the contract under PostgreSQL's types, then what the lake knows.

Values travel as PostgreSQL's own text (manual, COPY, "Text Format"), so what the typed column of the lake
cannot hold (``NaN``, ``infinity``) arrives as the value that the source had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified

POSITION = ("_cdc_epoch", "_cdc_commit_lsn", "_cdc_ordinal")
"""The columns of a row's position, in the order in which positions compare."""

_TYPES = {
    Kind.BOOLEAN: "boolean",
    Kind.SHORT: "smallint",
    Kind.INTEGER: "integer",
    Kind.LONG: "bigint",
    Kind.FLOAT: "real",
    Kind.DOUBLE: "double precision",
    Kind.NUMERIC_TEXT: "numeric",
    Kind.DATE: "date",
    Kind.TIMESTAMP: "timestamp without time zone",
    Kind.TIMESTAMPTZ: "timestamp with time zone",
    Kind.BINARY: "bytea",
    Kind.TEXT_ARRAY: "text[]",
    Kind.INTEGER_ARRAY: "bigint[]",
}
_KEPT_BY_NAME = frozenset({"uuid", "json", "jsonb"})


class TargetRefused(IngestError):
    """The table of a target cannot be written as it is, or its server refuses the connection.

    Fix: Run the SQL in the message, or name another table in ``x-cdc.target`` of the contract.
    """

    exit_code = 5


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the target.

    ``pg_type``: its type as ``format_type`` writes it. ``text``: SQL for DuckDB that makes its text from the
    lake's row (null: NULL). ``escaped``: the text may hold characters that COPY escapes.
    """

    name: str
    pg_type: str
    text: str
    escaped: bool = False


def target_columns(contract: TableContract) -> tuple[TargetColumn, ...]:
    """Return every column of the target of ``contract``, in order."""
    return (
        *(_of_contract(column) for column in contract.columns),
        TargetColumn("_cdc_key", "text", "_cdc_key", escaped=True),
        TargetColumn("_cdc_is_deleted", "boolean", "_cdc_is_deleted::VARCHAR"),
        TargetColumn("_cdc_deleted_at", "timestamp with time zone", "_cdc_deleted_at::VARCHAR"),
        TargetColumn("_cdc_updated_at", "timestamp with time zone", "_cdc_updated_at::VARCHAR"),
        TargetColumn("_cdc_unresolved", "text[]", _array("_cdc_unresolved"), escaped=True),
        TargetColumn("_cdc_epoch", "integer", "_cdc_epoch::VARCHAR"),
        TargetColumn("_cdc_commit_lsn", "bigint", "_cdc_commit_lsn::VARCHAR"),
        TargetColumn("_cdc_ordinal", "bigint", "_cdc_ordinal::VARCHAR"),
        TargetColumn("_cdc_row_hash", "bigint", "_cdc_row_hash::VARCHAR"),
    )


def create_sql(schema: str, table: str, columns: Sequence[TargetColumn]) -> str:
    """Return the CREATE TABLE of a target. Its key is ``_cdc_key``, a text, which is the key of every
    table."""
    listed = [f"{identifier(each.name)} {each.pg_type}" for each in columns]
    return f"CREATE TABLE {qualified(schema, table)} ({', '.join(listed)}, PRIMARY KEY (_cdc_key))"


def missing_columns(
    schema: str, table: str, columns: Sequence[TargetColumn], live_types: dict[str, str]
) -> list[TargetColumn]:
    """Return the columns that the table still lacks; it has those in ``live_types`` (name → type).

    Raises ``TargetRefused``, with the SQL to run, if a column has another type. A column that the contract no
    longer names stays, with its values.
    """
    name = qualified(schema, table)
    for each in columns:
        live_type = live_types.get(each.name, each.pg_type)
        if live_type != each.pg_type:
            column = identifier(each.name)
            raise TargetRefused(
                f"The column {each.name} of the target {schema}.{table} is {live_type}, and the contract "
                f"makes it {each.pg_type}.",
                fix=f"Run there: ALTER TABLE {name} ALTER COLUMN {column} TYPE {each.pg_type} "
                f"USING {_converted(column, live_type, each.pg_type)};  -- then sync again, which sends "
                f"every row. Or, to begin anew: DROP TABLE {name};",
            )
    return [each for each in columns if each.name not in live_types]


def _converted(column: str, former: str, pg_type: str) -> str:
    """Return SQL that makes a value of ``former`` one of ``pg_type``, whatever the session's TimeZone is."""
    zoned = [name.startswith("timestamp") and name.endswith(" with time zone") for name in (former, pg_type)]
    dated = [name == "date" or name.startswith("timestamp") for name in (former, pg_type)]
    if all(dated) and zoned == [True, False]:
        return f"({column} AT TIME ZONE 'UTC')::{pg_type}"
    if all(dated) and zoned == [False, True]:
        return f"{column}::timestamp without time zone AT TIME ZONE 'UTC'"
    return f"{column}::{pg_type}"


def copy_line(columns: Sequence[TargetColumn]) -> str:
    """Return SQL for DuckDB: the line of a row for COPY, with its line feed."""
    fields = []
    for each in columns:
        text = escaped(each.text) if each.escaped else each.text
        fields.append(rf"coalesce({text}, '\N')")
    return f"concat({', chr(9), '.join(fields)}, chr(10))"


def escaped(text: str) -> str:
    """Return SQL for DuckDB: ``text`` with everything escaped that COPY's text format escapes."""
    for character, written in (
        (r"'\'", r"'\\'"),
        ("chr(9)", r"'\t'"),
        ("chr(10)", r"'\n'"),
        ("chr(13)", r"'\r'"),
    ):
        text = f"replace({text}, {character}, {written})"
    return text


def _of_contract(column: Column) -> TargetColumn:
    name, kind = '"' + column.name.replace('"', '""') + '"', column.type.kind
    pg_type, text, escaped = _TYPES.get(kind, "text"), f"{name}::VARCHAR", False
    if kind is Kind.DECIMAL:
        pg_type = f"numeric({column.type.precision},{column.type.scale})"
    elif kind is Kind.TEXT:
        pg_type = column.pg_type if column.pg_type in _KEPT_BY_NAME else "text"
        text, escaped = name, True
    elif kind is Kind.NUMERIC_TEXT:
        text = name
    elif kind is Kind.BINARY:
        text, escaped = f"'\\x' || lower(hex({name}))", True
    elif kind in (Kind.TEXT_ARRAY, Kind.INTEGER_ARRAY):
        text, escaped = _array(name), True
    elif kind is Kind.TIMESTAMP:
        text = f"timezone('UTC', {name})::VARCHAR"
    if column.former_types:
        # The exact text of such a column may be a value of a former type, so it is not sent.
        return TargetColumn(column.name, pg_type, text, escaped)
    exact = "_cdc_exact['" + column.name.replace("'", "''") + "']"
    return TargetColumn(column.name, pg_type, f"coalesce({exact}, {text})", escaped)


def _array(name: str) -> str:
    """Return SQL for DuckDB: a list as PostgreSQL writes an array."""
    quoted = r"""'"' || replace(replace(x::VARCHAR, '\', '\\'), '"', '\"') || '"'"""
    items = f"list_transform({name}, lambda x: CASE WHEN x IS NULL THEN 'NULL' ELSE {quoted} END)"
    return f"CASE WHEN {name} IS NOT NULL THEN '{{' || array_to_string({items}, ',') || '}}' END"
