"""Converts the columns of a Parquet file to the texts that PostgreSQL would write.

Times are read as whole numbers, because Python's own times cannot hold all of them: an infinite one, or one
with a zone that is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import FLOATS, Kind
from omnisupport_ingest.sources.value_text import value_text

Convert = Callable[[Any], Any]
"""Converts a value that is not None."""

_START = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 86_400_000_000
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LONG, _INT = (1 << 63) - 1, (1 << 31) - 1


class NoText(ValueError):
    """Raised for a value that PostgreSQL has no text for. The message ends the sentence "the value of …"."""


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return ``batch`` with its times as whole numbers, and without dictionaries."""
    arrays = []
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = _plain_type(column.type)
        arrays.append(column if kind == column.type else column.cast(kind))
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def names_a_field_twice(kind: pa.DataType) -> bool:
    """Whether an object in a column of ``kind`` has two fields of one name, which a JSON object cannot
    have."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    twice = pa.types.is_struct(kind) and len({each.name for each in fields}) < len(fields)
    return twice or any(names_a_field_twice(each.type) for each in fields)


def converter(kind: pa.DataType, column: Column | None) -> Convert:
    """Return what converts the values of ``plain`` in a column that was of ``kind``: to a text, a number, or
    to lists and objects of them. ``column``: that of the contract; None if it names none.

    It raises ``NoText``.
    """
    if pa.types.is_dictionary(kind):
        return converter(kind.value_type, column)
    target = None if column is None else column.type.kind
    if pa.types.is_floating(kind):
        single = kind.bit_width < 64 or target is Kind.FLOAT
        if target is None or target in FLOATS:
            return lambda value: float_text(value, single=single)
        return lambda value: _number(value, single=single)
    if pa.types.is_timestamp(kind):
        zoned = target is Kind.TIMESTAMPTZ or (target is not Kind.TIMESTAMP and kind.tz is not None)
        return lambda value: _moment(value, kind.unit, zoned=zoned)
    if _is_binary(kind) and target not in (None, Kind.BINARY):
        is_uuid = column is not None and column.pg_type == "uuid"
        return lambda value: _decoded(value, is_uuid=is_uuid)
    if pa.types.is_nested(kind) or _is_time(kind) or pa.types.is_boolean(kind):
        return _inside(kind)
    return lambda value: value if isinstance(value, str | int | Decimal) else value_text(value, target)


def float_text(value: float, *, single: bool = False) -> str:
    """Return ``value`` as PostgreSQL writes a float (``single``: a real).

    These are the shortest digits that read as the same number, with an exponent below 1e-4 and from 1e15
    (1e6) on (``src/common/d2s.c``). For a few numbers the server writes one digit more.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    sign, digits, exponent = _shortest(value, single=single).normalize().as_tuple()
    assert isinstance(exponent, int)
    power = len(digits) - 1 + exponent
    if value == 0 or -5 < power < (6 if single else 15):
        return format(Decimal((sign, digits, exponent)), "f")
    rest = "".join(map(str, digits[1:]))
    return f"{'-' if sign else ''}{digits[0]}{'.' + rest if rest else ''}e{power:+03d}"


def _shortest(value: float, *, single: bool) -> Decimal:
    return Decimal(str(np.float32(value)) if single else repr(value))


def _number(value: float, *, single: bool) -> str:
    """Return ``value`` with the digits of its width and without an exponent."""
    return format(_shortest(value, single=single), "f") if math.isfinite(value) else float_text(value)


def _inside(kind: pa.DataType) -> Convert:
    """Return what converts values of ``kind`` inside a list, an object or a map to what JSON has; infinity
    becomes a text."""
    types = pa.types
    if types.is_map(kind):
        name, item = _inside(kind.key_type), _inside(kind.item_type)
        return lambda value: {_member(name(key)): _or_null(item, each) for key, each in value.items()}
    if types.is_struct(kind):
        members = {field.name: _inside(field.type) for field in kind}
        return lambda value: {key: _or_null(members[key], each) for key, each in value.items()}
    if types.is_nested(kind) and kind.num_fields == 1:
        element = _inside(kind.field(0).type)
        return lambda value: [_or_null(element, each) for each in value]
    if types.is_floating(kind):
        single = kind.bit_width < 64
        return lambda value: (
            _shortest(value, single=single) if math.isfinite(value) else float_text(value, single=single)
        )
    if types.is_timestamp(kind):
        return lambda value: _moment(value, kind.unit, zoned=kind.tz is not None)
    if types.is_date(kind):
        return _date32 if types.is_date32(kind) else _date64
    if types.is_time(kind):
        return lambda value: _clock(_micros(value, kind.unit))
    if types.is_duration(kind):
        return lambda value: _interval(_micros(value, kind.unit))
    return lambda value: value if isinstance(value, str | int | Decimal) else value_text(value, None)


def _or_null(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _member(name: Any) -> str:
    return name if isinstance(name, str) else value_text(name, None)


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _is_time(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_date(kind) or types.is_time(kind) or types.is_duration(kind))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if types.is_timestamp(kind) or _is_time(kind):
        return pa.int64()
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    for is_of, make in (
        (types.is_list, pa.list_),
        (types.is_large_list, pa.large_list),
        (types.is_fixed_size_list, lambda field: pa.list_(field, kind.list_size)),
    ):
        if is_of(kind):
            return make(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


def _micros(value: int, unit: str) -> int:
    """Return ``value`` in microseconds; what is finer is cut, as PostgreSQL has nothing finer."""
    per_second = _PER_SECOND[unit]
    if per_second > 1_000_000:
        finer = per_second // 1_000_000
        return value // finer if value >= 0 else -(-value // finer)
    return value * (1_000_000 // per_second)


def _moment(value: int, unit: str, *, zoned: bool) -> str:
    if value == _LONG or value <= -_LONG:
        return "infinity" if value > 0 else "-infinity"
    try:
        moment = _START + timedelta(microseconds=_micros(value, unit))
    except OverflowError:
        raise NoText("is a time outside the years 1 to 9999") from None
    return _without_zeros(moment.replace(tzinfo=None).isoformat(sep=" ")) + ("+00" if zoned else "")


def _date32(value: int) -> str:
    if value == _INT or value <= -_INT:
        return "infinity" if value > 0 else "-infinity"
    try:
        return (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    except OverflowError:
        raise NoText("is a date outside the years 1 to 9999") from None


def _date64(value: int) -> str:
    if value == _LONG or value <= -_LONG:
        return "infinity" if value > 0 else "-infinity"
    return _date32(max(-_INT + 1, min(_INT - 1, value // 86_400_000)))


def _clock(micros: int) -> str:
    if not 0 <= micros <= _DAY:
        raise NoText("is no time of a day")
    return _interval(micros)


def _interval(micros: int) -> str:
    seconds, fraction = divmod(abs(micros), 1_000_000)
    hours, minutes = divmod(seconds // 60, 60)
    text = f"{'-' if micros < 0 else ''}{hours:02d}:{minutes:02d}:{seconds % 60:02d}"
    return _without_zeros(f"{text}.{fraction:06d}") if fraction else text


def _without_zeros(text: str) -> str:
    return text.rstrip("0") if "." in text else text


def _decoded(value: bytes, *, is_uuid: bool) -> str:
    if is_uuid and len(value) == 16:
        return str(UUID(bytes=value))
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise NoText("is bytes that are not UTF-8") from None
