"""Converts a value as Debezium writes it in JSON to PostgreSQL's text.

The schema beside the value, if there is one, says what it means; else the type in the table's contract, as
the connector's default modes write it (``docs/debezium.md`` lists them). Without both, its JSON type decides.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from omnisupport_ingest.contracts.pg_values import whole_number
from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.sources.debezium import pg_literals, pg_times
from omnisupport_ingest.sources.debezium.expected import from_base64, number, string
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.pg_numbers import (
    Schema,
    connect_decimal,
    floating,
    integer,
    money,
    numeric,
    variable_decimal,
)
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.manifests.row_text import text as json_text

LONGEST_BITS = 83_886_080
"""Bits of the longest bit string (PostgreSQL: ``bit(n)``)."""

ZONED = "io.debezium.time.ZonedTimestamp"
ISO_TIMESTAMP = "io.debezium.time.IsoTimestamp"
VARIABLE_SCALE = "io.debezium.data.VariableScaleDecimal"
MEANS_TEXT = frozenset(
    f"io.debezium.data.{each}" for each in ("Json", "Uuid", "Enum", "Xml", "Ltree", "Tsvector")
)
"""Names of Connect schemas whose values already are PostgreSQL's texts."""

_INTEGERS = frozenset({"smallint", "integer", "bigint", "oid"})
_FLOATS = ("real", "double precision")


def text_of(value: Any, schema: Schema, target: Target, handling: Handling) -> str | None:
    """Return PostgreSQL's text of ``value``; ``ValueFault`` if it does not fit its schema or column type."""
    if value is None:
        return None
    read = _BY_MEANING.get(str(schema.get("name") or ""))
    if read is not None:
        return read(value, schema, target)
    if isinstance(value, list) and (target.element is not None or schema.get("type") == "array"):
        return _array(value, schema, target, handling)
    if target.name == "bytea" or schema.get("type") == "bytes":
        return _bytea(value, schema, handling)
    single = is_single(schema, target)
    if single is not None:
        return floating(value, single=single)
    if target.name == "numeric":
        is_text = schema.get("type") == "string"
        return numeric(value, target, decimals="string" if is_text else handling.decimals)
    by_type = _BY_TYPE.get(target.name)
    if by_type is not None:
        return by_type(value, target)
    return json_text(value)


def has_meaning(schema: Schema) -> bool:
    """Whether ``schema`` says more about its values than their type."""
    return str(schema.get("name") or "") in _BY_MEANING


def is_single(schema: Schema, target: Target) -> bool | None:
    """Whether values are floats of four bytes (True) or of eight (False); None if they are no floats."""
    if schema.get("type") in ("float", "double") and target.name in ("", *_FLOATS):
        return bool(schema["type"] == "float")
    return target.name == "real" if target.name in _FLOATS else None


def lands_as_it_comes(target: Target) -> bool:
    """Whether a text for a column of this type already is PostgreSQL's text, if no schema says otherwise.

    True for texts, enumerations, ranges, addresses and all unknown types.
    """
    return target.element is None and target.name not in (*_BY_TYPE, *_FLOATS, "bytea", "numeric")


def _array(values: list[Any], schema: Schema, target: Target, handling: Handling) -> str:
    items = schema.get("items")
    of_items = items if isinstance(items, dict) else {}
    element = target.element or Target()
    nested = [
        _array(each, of_items, target, handling)
        if isinstance(each, list)
        else text_of(each, of_items, element, handling)
        for each in values
    ]
    if any(isinstance(each, list) for each in values):
        return "{" + ",".join("NULL" if each is None else each for each in nested) + "}"
    return pg_literals.array(nested)


def _bytea(value: Any, schema: Schema, handling: Handling) -> str:
    text = string(value)
    form = handling.binary
    if form is None and schema.get("type") == "string":
        raise ValueFault("its bytes come as a text, which may be base64 or hexadecimal")
    try:
        if form == "hex":
            return "\\x" + bytes.fromhex(text).hex()
        if form == "base64-url-safe":
            return "\\x" + base64.b64decode(text, altchars=b"-_", validate=True).hex()
        return "\\x" + from_base64(text).hex()
    except ValueError:
        raise ValueFault("its bytes are not in the form that is expected") from None


def _as_text(value: Any, _: Schema, __: Target) -> str | None:
    return json_text(value)


def _timestamps(micros_per_unit: Callable[[int], int]) -> Callable[[Any, Schema, Target], str]:
    def read(value: Any, _: Schema, target: Target) -> str:
        zone = "+00" if target.name == "timestamptz" else ""
        return pg_times.timestamp_of_micros(micros_per_unit(number(value)), zone=zone)

    return read


def _times(micros_per_unit: Callable[[int], int]) -> Callable[[Any, Schema, Target], str]:
    return lambda value, _, __: pg_times.time_of_micros(micros_per_unit(number(value)))


def _date(value: Any, _: Schema, __: Target) -> str:
    return pg_times.date_of_text(value) if isinstance(value, str) else pg_times.date_of_days(number(value))


def _zoned(value: Any, _: Schema, target: Target) -> str:
    return pg_times.timestamp_of_text(string(value), zoned=target.name != "timestamp")


def _bits(value: Any, schema: Schema, target: Target) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    parameters = schema.get("parameters")
    length_text = parameters.get("length") if isinstance(parameters, dict) else None
    length = whole_number(length_text) if isinstance(length_text, str) else None
    length = target.modifier if length is None else length
    if length is not None and not 0 <= length <= LONGEST_BITS:
        raise ValueFault("its length is beyond PostgreSQL's")
    varying = target.name == "bit varying"
    return pg_literals.bits(from_base64(string(value)), None if varying else length)


def _point(value: Any, _: Schema, __: Target) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not {"x", "y"} <= value.keys():
        raise ValueFault("it is no point")
    return f"({floating(value['x'], single=False)},{floating(value['y'], single=False)})"


def _geometry(value: Any, _: Schema, target: Target) -> str:
    if target.name:
        raise ValueFault("it is a geometry in Debezium's own form, which is not converted")
    return json_text(value) or ""


def _boolean(value: Any, _: Target) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if value in ("t", "true", "f", "false"):
        return str(value)[0]
    raise ValueFault("it is neither true nor false")


def _timestamp(value: Any, target: Target) -> str:
    if isinstance(value, str):
        return pg_times.timestamp_of_text(value, zoned=False)
    coarse = target.modifier is not None and target.modifier <= 3
    return pg_times.timestamp_of_micros(number(value) * (1000 if coarse else 1))


def _time(value: Any, target: Target) -> str:
    if isinstance(value, str):
        return pg_times.time_of_text(value, zoned=False)
    coarse = target.modifier is not None and target.modifier <= 3
    return pg_times.time_of_micros(number(value) * (1000 if coarse else 1))


def _interval(value: Any, _: Target) -> str:
    if isinstance(value, str):
        return pg_times.interval_of_text(value)
    return pg_times.interval_of_micros(number(value))


def _hstore(value: Any, _: Target) -> str:
    pairs = value
    if isinstance(value, str):
        try:
            pairs = parse_row(value)
        except Unreadable:
            raise ValueFault("it is no hstore as JSON") from None
    if not isinstance(pairs, dict) or not all(
        each is None or isinstance(each, str) for each in pairs.values()
    ):
        raise ValueFault("it is no hstore as JSON")
    return pg_literals.hstore(pairs)


_BY_TYPE: dict[str, Callable[[Any, Target], str]] = {
    "boolean": _boolean,
    **dict.fromkeys(_INTEGERS, integer),
    "date": lambda value, target: _date(value, {}, target),
    "timestamp": _timestamp,
    "timestamptz": lambda value, target: _zoned(value, {}, target),
    "time": _time,
    "timetz": lambda value, _: pg_times.time_of_text(string(value), zoned=True),
    "interval": _interval,
    "hstore": _hstore,
    "money": money,
    "bit": lambda value, target: _bits(value, {}, target),
    "bit varying": lambda value, target: _bits(value, {}, target),
    "point": lambda value, target: _point(value, {}, target),
    "geometry": lambda value, target: _geometry(value, {}, target),
    "geography": lambda value, target: _geometry(value, {}, target),
}
"""PostgreSQL type → function that makes its text from what the default modes of the connector write."""

_MILLIS, _MICROS, _NANOS = (
    lambda unit: int(unit) * 1000,
    lambda unit: int(unit),
    lambda unit: int(unit) // 1000,
)

_BY_MEANING: dict[str, Callable[[Any, Schema, Target], str | None]] = {
    "io.debezium.time.Date": _date,
    "io.debezium.time.IsoDate": _date,
    "org.apache.kafka.connect.data.Date": _date,
    "io.debezium.time.Timestamp": _timestamps(_MILLIS),
    "io.debezium.time.MicroTimestamp": _timestamps(_MICROS),
    "io.debezium.time.NanoTimestamp": _timestamps(_NANOS),
    "org.apache.kafka.connect.data.Timestamp": _timestamps(_MILLIS),
    ISO_TIMESTAMP: lambda value, _, target: pg_times.timestamp_of_text(
        string(value), zoned=target.name == "timestamptz"
    ),
    ZONED: _zoned,
    "io.debezium.time.Time": _times(_MILLIS),
    "io.debezium.time.MicroTime": _times(_MICROS),
    "io.debezium.time.NanoTime": _times(_NANOS),
    "org.apache.kafka.connect.data.Time": _times(_MILLIS),
    "io.debezium.time.IsoTime": lambda value, _, __: pg_times.time_of_text(string(value), zoned=False),
    "io.debezium.time.ZonedTime": lambda value, _, __: pg_times.time_of_text(string(value), zoned=True),
    "io.debezium.time.MicroDuration": lambda value, _, target: _interval(value, target),
    "io.debezium.time.NanoDuration": lambda value, _, __: pg_times.interval_of_micros(number(value) // 1000),
    "io.debezium.time.Interval": lambda value, _, target: _interval(value, target),
    "org.apache.kafka.connect.data.Decimal": connect_decimal,
    VARIABLE_SCALE: variable_decimal,
    "io.debezium.data.Bits": _bits,
    "io.debezium.data.geometry.Point": _point,
    "io.debezium.data.geometry.Geometry": _geometry,
    "io.debezium.data.geometry.Geography": _geometry,
    **dict.fromkeys(MEANS_TEXT, _as_text),
}
"""Name of a Connect schema → function that makes the text of its values."""
