"""A value as Debezium writes it in JSON → the text that PostgreSQL has for it.

What a value is says the schema beside it, if there is one; else the type in the table's contract, as
the connector's default modes write it (``docs/debezium.md`` lists them). Without both, JSON's own type.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from hashlib import md5
from typing import Any

from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.sources.debezium import pg_literals, pg_times
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.manifests.row_text import text as json_text

PLACEHOLDER = "__debezium_unavailable_value"

_BYTES = PLACEHOLDER.encode()
_UNAVAILABLE_TEXTS = frozenset(
    {
        PLACEHOLDER,
        base64.b64encode(_BYTES).decode(),
        base64.urlsafe_b64encode(_BYTES).decode(),
        _BYTES.hex(),
        json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":")),
    }
)
_UNAVAILABLE_ELEMENTS = frozenset(
    {*_UNAVAILABLE_TEXTS, str(uuid.UUID(bytes=md5(_BYTES, usedforsecurity=False).digest(), version=3))}
)
_CODES = list(_BYTES)

_MODIFIER = re.compile(r"\(\s*(\d+)\s*(?:,\s*-?\d+\s*)?\)")
_ALIASES = {
    "bool": "boolean",
    "varbit": "bit varying",
    "decimal": "numeric",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "time with time zone": "timetz",
    "float4": "real",
    "float8": "double precision",
    "int2": "smallint",
    "int4": "integer",
    "int": "integer",
    "int8": "bigint",
}
_OF_EXTENSIONS = (".hstore", ".geometry", ".geography")
"""Types that stand in the schema of their extension, whichever that is."""

_INTEGERS = frozenset({"smallint", "integer", "bigint", "oid"})
_SPECIAL_NUMBERS = {
    "NAN": "NaN",
    "NaN": "NaN",
    "POSITIVE_INFINITY": "Infinity",
    "Infinity": "Infinity",
    "NEGATIVE_INFINITY": "-Infinity",
    "-Infinity": "-Infinity",
}

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What a column is: its PostgreSQL type, taken apart.

    ``name`` is the type's plain name, empty if nothing is known; ``modifier`` its first number
    (length, precision); ``scale`` of a numeric. ``element`` of an array is its elements' type.
    """

    name: str = ""
    modifier: int | None = None
    scale: int = 0
    element: Target | None = None

    @classmethod
    def of(cls, pg_type: str | None) -> Target:
        """The target that ``pg_type`` names, as a contract writes it; null: nothing is known."""
        return cls() if pg_type is None else _target(pg_type)


@cache
def _target(pg_type: str) -> Target:
    found = _MODIFIER.search(pg_type)
    name = " ".join(_MODIFIER.sub(" ", pg_type).lower().split())
    if name.endswith("[]"):
        return Target("array", element=_target(pg_type.rstrip()[:-2]))
    name = name.removeprefix("pg_catalog.")
    if name.endswith(_OF_EXTENSIONS):
        name = name.rpartition(".")[2]
    parsed = PgType.parse(pg_type)
    scale = parsed.scale if parsed.kind is Kind.DECIMAL else 0
    return Target(_ALIASES.get(name, name), int(found.group(1)) if found else None, scale)


def is_unavailable(value: Any) -> bool:
    """Whether ``value`` stands for one that was not sent (unchanged TOAST), in any of its disguises."""
    if isinstance(value, str):
        return value in _UNAVAILABLE_TEXTS
    if isinstance(value, list) and value:
        alone = value[0] if len(value) == 1 else None
        return value == _CODES or (isinstance(alone, str) and alone in _UNAVAILABLE_ELEMENTS)
    return isinstance(value, dict) and value == {PLACEHOLDER: PLACEHOLDER}


def text_of(value: Any, schema: Schema, target: Target, handling: Handling) -> str | None:
    """PostgreSQL's text of ``value``; ``ValueFault`` if it is no value of what it is said to be."""
    if value is None:
        return None
    read = _BY_MEANING.get(str(schema.get("name") or ""))
    if read is not None:
        return read(value, schema, target)
    if isinstance(value, list) and (target.element is not None or schema.get("type") == "array"):
        return _array(value, schema, target, handling)
    if target.name == "bytea" or schema.get("type") == "bytes":
        return _bytea(value, schema, handling)
    if schema.get("type") in ("float", "double") and target.name in ("", "real", "double precision"):
        return _float(value, single=schema["type"] == "float")
    if target.name == "numeric":
        told = schema.get("type") == "string"
        return _numeric(value, target, decimals="string" if told else handling.decimals)
    by_type = _BY_TYPE.get(target.name)
    if by_type is not None:
        return by_type(value, target)
    return json_text(value)


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
    text = _string(value)
    form = handling.binary
    if form is None and schema.get("type") == "string":
        raise ValueFault("its bytes come as a text, which may be base64 or hexadecimal")
    try:
        if form == "hex":
            return "\\x" + bytes.fromhex(text).hex()
        if form == "base64-url-safe":
            return "\\x" + base64.b64decode(text, altchars=b"-_", validate=True).hex()
        return "\\x" + _base64(text).hex()
    except ValueError:
        raise ValueFault("its bytes are not in the form that is expected") from None


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueFault("it is not base64") from None


def _float(value: Any, *, single: bool) -> str:
    if isinstance(value, str):
        if value in _SPECIAL_NUMBERS:
            return _SPECIAL_NUMBERS[value]
        value = _decimal(value)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueFault("it is no number")
    try:
        return pg_literals.float_text(float(value), single=single)
    except OverflowError:
        raise ValueFault("it is larger than its type") from None


def _numeric(value: Any, target: Target, *, decimals: str) -> str:
    if isinstance(value, dict):
        return _variable_decimal(value, {}, target)
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return _scaled(Decimal(value), target)
    text = _string(value)
    if text in _SPECIAL_NUMBERS:
        return _SPECIAL_NUMBERS[text]
    # A decimal as text has its point, which base64 has not, unless its scale is 0.
    if decimals == "precise" and "." not in text and target.modifier is not None:
        return pg_literals.plain_number(_unscaled(text, target.scale))
    return pg_literals.plain_number(_decimal(text))


def _scaled(number: Decimal, target: Target) -> str:
    """A number that came as JSON's, with the digits after the point that its type has."""
    if target.modifier is not None and number.is_finite() and number.adjusted() < 1000:
        exponent = number.as_tuple().exponent
        if isinstance(exponent, int) and -exponent < target.scale:
            return format(number, f".{target.scale}f")
    return pg_literals.plain_number(number)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueFault("it is no number") from None


def _unscaled(text: str, scale: int) -> Decimal:
    number = int.from_bytes(_base64(text), "big", signed=True)
    return Decimal((int(number < 0), tuple(int(digit) for digit in str(abs(number))), -scale))


def _connect_decimal(value: Any, schema: Schema, target: Target) -> str:
    parameters = schema.get("parameters")
    try:
        scale = int(parameters["scale"]) if isinstance(parameters, dict) else target.scale
    except (KeyError, TypeError, ValueError):
        raise ValueFault("the schema does not tell its scale") from None
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        number = Decimal(value)
    else:
        number = _unscaled(_string(value), scale)
    return pg_literals.money(number) if target.name == "money" else pg_literals.plain_number(number)


def _variable_decimal(value: Any, _: Schema, __: Target) -> str:
    if not isinstance(value, dict) or type(value.get("scale")) is not int:
        raise ValueFault("it is no decimal of a scale of its own")
    if abs(value["scale"]) > 20_000:
        raise ValueFault("its scale is beyond PostgreSQL's")
    return pg_literals.plain_number(_unscaled(_string(value.get("value")), value["scale"]))


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueFault("it is no text")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueFault("it is no whole number")
    return value


def _as_text(value: Any, _: Schema, __: Target) -> str | None:
    return json_text(value)


def _timestamps(micros_per_unit: Callable[[int], int]) -> Callable[[Any, Schema, Target], str]:
    def read(value: Any, _: Schema, target: Target) -> str:
        zone = "+00" if target.name == "timestamptz" else ""
        return pg_times.timestamp_of_micros(micros_per_unit(_number(value)), zone=zone)

    return read


def _times(micros_per_unit: Callable[[int], int]) -> Callable[[Any, Schema, Target], str]:
    return lambda value, _, __: pg_times.time_of_micros(micros_per_unit(_number(value)))


def _date(value: Any, _: Schema, __: Target) -> str:
    return pg_times.date_of_text(value) if isinstance(value, str) else pg_times.date_of_days(_number(value))


def _zoned(value: Any, _: Schema, target: Target) -> str:
    return pg_times.timestamp_of_text(_string(value), zoned=target.name != "timestamp")


def _bits(value: Any, schema: Schema, target: Target) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    parameters = schema.get("parameters")
    told = parameters.get("length") if isinstance(parameters, dict) else None
    length = int(told) if isinstance(told, str) and told.isdigit() else target.modifier
    varying = target.name == "bit varying"
    return pg_literals.bits(_base64(_string(value)), None if varying else length)


def _point(value: Any, _: Schema, __: Target) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not {"x", "y"} <= value.keys():
        raise ValueFault("it is no point")
    return f"({_float(value['x'], single=False)},{_float(value['y'], single=False)})"


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


def _integer(value: Any, _: Target) -> str:
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit():
        return value
    return str(_number(value))


def _timestamp(value: Any, target: Target) -> str:
    if isinstance(value, str):
        return pg_times.timestamp_of_text(value, zoned=False)
    coarse = target.modifier is not None and target.modifier <= 3
    return pg_times.timestamp_of_micros(_number(value) * (1000 if coarse else 1))


def _time(value: Any, target: Target) -> str:
    if isinstance(value, str):
        return pg_times.time_of_text(value, zoned=False)
    coarse = target.modifier is not None and target.modifier <= 3
    return pg_times.time_of_micros(_number(value) * (1000 if coarse else 1))


def _interval(value: Any, _: Target) -> str:
    if isinstance(value, str):
        return pg_times.interval_of_text(value)
    return pg_times.interval_of_micros(_number(value))


def _hstore(value: Any, _: Target) -> str:
    pairs = value
    if isinstance(value, str):
        try:
            pairs = json.loads(value)
        except ValueError:
            raise ValueFault("it is no hstore as JSON") from None
    if not isinstance(pairs, dict) or not all(
        each is None or isinstance(each, str) for each in pairs.values()
    ):
        raise ValueFault("it is no hstore as JSON")
    return pg_literals.hstore(pairs)


def _money(value: Any, _: Target) -> str:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return pg_literals.money(Decimal(value))
    text = _string(value)
    return pg_literals.money(_decimal(text) if "." in text else _unscaled(text, 2))


_BY_TYPE: dict[str, Callable[[Any, Target], str]] = {
    "boolean": _boolean,
    **dict.fromkeys(_INTEGERS, _integer),
    "real": lambda value, _: _float(value, single=True),
    "double precision": lambda value, _: _float(value, single=False),
    "date": lambda value, target: _date(value, {}, target),
    "timestamp": _timestamp,
    "timestamptz": lambda value, target: _zoned(value, {}, target),
    "time": _time,
    "timetz": lambda value, _: pg_times.time_of_text(_string(value), zoned=True),
    "interval": _interval,
    "hstore": _hstore,
    "money": _money,
    "bit": lambda value, target: _bits(value, {}, target),
    "bit varying": lambda value, target: _bits(value, {}, target),
    "point": lambda value, target: _point(value, {}, target),
    "geometry": lambda value, target: _geometry(value, {}, target),
    "geography": lambda value, target: _geometry(value, {}, target),
}
"""PostgreSQL type → its text, from what the connector's default modes write."""

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
    "io.debezium.time.IsoTimestamp": lambda value, _, target: pg_times.timestamp_of_text(
        _string(value), zoned=target.name == "timestamptz"
    ),
    "io.debezium.time.ZonedTimestamp": _zoned,
    "io.debezium.time.Time": _times(_MILLIS),
    "io.debezium.time.MicroTime": _times(_MICROS),
    "io.debezium.time.NanoTime": _times(_NANOS),
    "org.apache.kafka.connect.data.Time": _times(_MILLIS),
    "io.debezium.time.IsoTime": lambda value, _, __: pg_times.time_of_text(_string(value), zoned=False),
    "io.debezium.time.ZonedTime": lambda value, _, __: pg_times.time_of_text(_string(value), zoned=True),
    "io.debezium.time.MicroDuration": lambda value, _, target: _interval(value, target),
    "io.debezium.time.NanoDuration": lambda value, _, __: pg_times.interval_of_micros(_number(value) // 1000),
    "io.debezium.time.Interval": lambda value, _, target: _interval(value, target),
    "org.apache.kafka.connect.data.Decimal": _connect_decimal,
    "io.debezium.data.VariableScaleDecimal": _variable_decimal,
    "io.debezium.data.Bits": _bits,
    "io.debezium.data.geometry.Point": _point,
    "io.debezium.data.geometry.Geometry": _geometry,
    "io.debezium.data.geometry.Geography": _geometry,
    "io.debezium.data.Json": _as_text,
    "io.debezium.data.Uuid": _as_text,
    "io.debezium.data.Enum": _as_text,
    "io.debezium.data.Xml": _as_text,
    "io.debezium.data.Ltree": _as_text,
    "io.debezium.data.Tsvector": _as_text,
}
"""Name of a Connect schema → the text of its values."""
