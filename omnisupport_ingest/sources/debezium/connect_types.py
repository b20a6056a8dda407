"""The PostgreSQL type that the Connect schema of a column implies.

It says less than the source's type: a ``varchar(20)``, an ``inet`` and a ``citext`` all come as texts. And
what the modes of the connector change (decimals as texts, times as texts) is another type here. So types from
events are compared with one another, never with the contract.
"""

from __future__ import annotations

from typing import Any

from omnisupport_ingest.contracts.pg_values import whole_number
from omnisupport_ingest.sources.debezium.pg_numbers import Schema
from omnisupport_ingest.sources.shown_columns import ShownColumn

_TIMESTAMP, _TIME = "timestamp without time zone", "time without time zone"
_BY_MEANING = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.IsoDate": "date",
    "org.apache.kafka.connect.data.Date": "date",
    "io.debezium.time.Timestamp": "timestamp(3) without time zone",
    "io.debezium.time.MicroTimestamp": _TIMESTAMP,
    "io.debezium.time.NanoTimestamp": _TIMESTAMP,
    "io.debezium.time.IsoTimestamp": _TIMESTAMP,
    "org.apache.kafka.connect.data.Timestamp": "timestamp(3) without time zone",
    "io.debezium.time.ZonedTimestamp": "timestamp with time zone",
    "io.debezium.time.Time": "time(3) without time zone",
    "io.debezium.time.MicroTime": _TIME,
    "io.debezium.time.NanoTime": _TIME,
    "io.debezium.time.IsoTime": _TIME,
    "org.apache.kafka.connect.data.Time": "time(3) without time zone",
    "io.debezium.time.ZonedTime": "time with time zone",
    "io.debezium.time.MicroDuration": "interval",
    "io.debezium.time.NanoDuration": "interval",
    "io.debezium.time.Interval": "interval",
    "io.debezium.data.VariableScaleDecimal": "numeric",
    "io.debezium.data.Bits": "bit varying",
    "io.debezium.data.Json": "json",
    "io.debezium.data.Uuid": "uuid",
    "io.debezium.data.Enum": "text",
    "io.debezium.data.Xml": "xml",
    "io.debezium.data.Ltree": "ltree",
    "io.debezium.data.Tsvector": "tsvector",
    "io.debezium.data.geometry.Point": "point",
}
_BY_TYPE = {
    "boolean": "boolean",
    "int8": "smallint",
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "float": "real",
    "float32": "real",
    "double": "double precision",
    "float64": "double precision",
    "string": "text",
    "bytes": "bytea",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"


def shown_column(name: str, schema: Schema) -> ShownColumn:
    """Return the column ``name`` as its Connect ``schema`` describes it; empty: it has none."""
    optional = schema.get("optional")
    not_null = not optional if isinstance(optional, bool) else None
    return ShownColumn(name, pg_type(schema), not_null, _labels(schema))


def pg_type(schema: Schema) -> str:
    """Return the type that ``schema`` implies, as ``format_type`` writes it; empty if it implies none."""
    meaning, kind = str(schema.get("name") or ""), str(schema.get("type") or "")
    if meaning == _DECIMAL:
        scale, precision = _parameter(schema, "scale"), _parameter(schema, "connect.decimal.precision")
        return "numeric" if scale is None or precision is None else f"numeric({precision},{scale})"
    if meaning in _BY_MEANING:
        return _BY_MEANING[meaning]
    items = schema.get("items")
    if kind == "array" and isinstance(items, dict):
        element = pg_type(items)
        return f"{element}[]" if element else ""
    # A schema with an unknown name says more than its type does.
    return "" if meaning else _BY_TYPE.get(kind, "")


def _parameter(schema: Schema, name: str) -> int | None:
    value = _parameters(schema).get(name)
    return whole_number(value) if isinstance(value, str) else None


def _parameters(schema: Schema) -> dict[str, Any]:
    parameters = schema.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _labels(schema: Schema) -> tuple[str, ...]:
    allowed = _parameters(schema).get("allowed")
    if schema.get("name") != "io.debezium.data.Enum" or not isinstance(allowed, str):
        return ()
    return tuple(allowed.split(","))
