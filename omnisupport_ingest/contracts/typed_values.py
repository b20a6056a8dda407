r"""PostgreSQL's texts of values as typed Arrow columns: without loss, and never with an error.

``typed_array`` reads a column of texts. Texts in the usual formats are read by whole columns; each other
text is read by itself, once for all rows that have it. A value that the typed column cannot hold (``NaN``
in a numeric, the date ``infinity``, a two-dimensional array) becomes NULL: it does not *fit*, and its exact
text is kept beside it. ``pg_values`` decides whether a text is a value of its type at all.

Text is canonical: ``DateStyle=ISO``, ``TimeZone=UTC``, ``bytea_output=hex``.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.contracts.pg_values import LONGEST_NUMERIC, value_test, whole_number
from omnisupport_ingest.contracts.plain_texts import (
    SAFE_DIGITS,
    TIME,
    are_decimals,
    dates,
    moments,
    whole_numbers,
)

# Possessive quantifiers (++, *+), so that a long text is not matched again at each of its characters.
_QUOTED = r'"((?:[^"\\]++|\\.)*+)"'
_BARE = r'([^,{}"\\ \t\n\v\f\r]++)'
_ELEMENT = re.compile(rf"{_QUOTED}|{_BARE}", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"-?[0-9]+\Z")
_LONGS = range(-(2**63), 2**63)


def strings_of(text: str) -> list[str | None] | None:
    """Return the elements of ``text``; None if it is not a one-dimensional array literal."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    inside, at = text[1:-1], 0
    elements: list[str | None] = []
    while inside:
        found = _ELEMENT.match(inside, at)
        if found is None:
            return None
        quoted, bare = found.groups()
        if quoted is not None:
            elements.append(_ESCAPED.sub(r"\1", quoted))
        else:
            elements.append(None if bare.upper() == "NULL" else bare)
        at = found.end()
        if at == len(inside):
            break
        if inside[at] != ",":
            return None
        at += 1
    return elements


def longs_of(text: str) -> list[int | None] | None:
    """Return the elements of ``text`` as numbers; None also if one is not a 64-bit integer."""
    strings = strings_of(text)
    if strings is None:
        return None
    longs: list[int | None] = []
    for element in strings:
        number = None if element is None or not _WHOLE_NUMBER.match(element) else whole_number(element)
        if element is not None and (number is None or number not in _LONGS):
            return None
        longs.append(number)
    return longs


_ARROW_TYPES: dict[Kind, pa.DataType] = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.SHORT: pa.int16(),
    Kind.INTEGER: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.FLOAT: pa.float32(),
    Kind.DOUBLE: pa.float64(),
    Kind.NUMERIC_TEXT: pa.string(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: TIME,
    Kind.TIMESTAMPTZ: TIME,
    Kind.BINARY: pa.binary(),
    Kind.TEXT_ARRAY: pa.list_(pa.string()),
    Kind.INTEGER_ARRAY: pa.list_(pa.int64()),
    Kind.TEXT: pa.string(),
}

_MOMENT = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?"
    r"(?:Z|([+-])([0-9]{2})(?::?([0-9]{2}))?)?\Z"
)


def arrow_type(of: PgType) -> pa.DataType:
    """Return the Arrow type of the typed column for ``of``."""
    if of.kind is Kind.DECIMAL:
        return pa.decimal128(of.precision, of.scale)
    return _ARROW_TYPES[of.kind]


def typed_array(texts: pa.Array, of: PgType) -> pa.Array:
    """Return ``texts`` (PostgreSQL's texts of values) as ``arrow_type(of)``.

    NULL where a text is NULL, is no value of the type, or does not fit. Never raises.
    """
    wanted = arrow_type(of)
    if pa.types.is_string(wanted):
        return texts
    if of.kind is Kind.BOOLEAN:
        true, false = (pc.is_in(texts, pa.array(values)) for values in (["t", "true"], ["f", "false"]))
        return pc.if_else(pc.or_(true, false), true, pa.scalar(None, pa.bool_()))
    usual = _usual(texts, of, wanted)
    if usual is None:
        return _one_by_one(texts, of, wanted)
    if usual.null_count == texts.null_count:
        return usual
    odd = pc.and_(pc.is_valid(texts), pc.is_null(usual))
    return pc.replace_with_mask(usual, odd, _one_by_one(texts.filter(odd), of, wanted))


def typed_column(texts: pa.Array, column: Column) -> pa.Array:
    """Return ``typed_array`` of the texts of ``column``; NULL also where a number that the lake keeps as text
    is a value of a former type only."""
    typed = typed_array(texts, column.type)
    if not column.former_types or column.type.kind is not Kind.NUMERIC_TEXT:
        return typed
    distinct, is_value = typed.dictionary_encode(), value_test(column.type.kind)
    values = [text if is_value(text) else None for text in distinct.dictionary.to_pylist()]
    return pa.array(values, typed.type).take(distinct.indices)


def _usual(texts: pa.Array, of: PgType, wanted: pa.DataType) -> pa.Array | None:
    """Return the values of the texts in the usual spelling, null for others; None if ``of`` has none."""
    if of.kind in SAFE_DIGITS:
        return whole_numbers(texts, SAFE_DIGITS[of.kind]).values.cast(wanted)
    if wanted == TIME:
        return moments(texts).values
    if of.kind is Kind.DATE:
        return dates(texts).values
    if of.kind is Kind.DECIMAL and of.precision > of.scale:
        plain = are_decimals(texts, of.precision - of.scale, of.scale)
    elif of.kind is Kind.DOUBLE:
        plain = are_decimals(texts, 15, 17, 2)
    elif of.kind is Kind.FLOAT:
        plain = are_decimals(texts, 9, 9)
    else:
        return None
    return pc.if_else(plain, texts, pa.scalar(None, pa.string())).cast(wanted)


def _one_by_one(texts: pa.Array, of: PgType, wanted: pa.DataType) -> pa.Array:
    encoded = texts.dictionary_encode()
    read, is_value = _EXACT[of.kind], value_test(of.kind)
    found = [read(text, of) if is_value(text) else None for text in encoded.dictionary.to_pylist()]
    return pa.array(found, wanted).take(encoded.indices)


def _whole(text: str, _: PgType) -> int | None:
    return whole_number(text)


def _float(text: str, of: PgType) -> Any:
    if of.kind is Kind.DOUBLE:
        return float(text)
    try:
        # Directly to 32 bits: rounding to 64 bits first may end at a neighbouring number.
        return pa.scalar(text).cast(pa.float32()).as_py()
    except pa.ArrowInvalid:
        return float(text)


def _decimal(text: str, of: PgType) -> Decimal | None:
    digits = rf"[+-]?[0-9]++(?:\.[0-9]{{0,{of.scale}}}0*+)?\Z"
    if len(text) > LONGEST_NUMERIC or re.match(digits, text) is None:
        return None
    # Only zeros are cut off.
    whole, _, after = text.partition(".")
    value = Decimal(f"{whole}.{after[: of.scale]}")
    held = decimal.Context(prec=of.precision, traps=[])
    fitted = value.quantize(Decimal(1).scaleb(-of.scale), context=held)
    return None if fitted.is_nan() else fitted


def _date(text: str, _: PgType) -> dt.date | None:
    try:
        return dt.date.fromisoformat(text) if len(text) == 10 else None
    except ValueError:
        return None


def _moment(text: str, _: PgType) -> dt.datetime | None:
    found = _MOMENT.match(text)
    if found is None:
        return None
    *clock, fraction, sign, hours, minutes = found.groups()
    try:
        local = dt.datetime(*map(int, clock), int((fraction or "").ljust(6, "0")), tzinfo=dt.UTC)  # type: ignore[arg-type, misc]
        ahead = dt.timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        return local + ahead if sign == "-" else local - ahead
    except (ValueError, OverflowError):
        # In UTC a time near an end of the calendar may lie beyond it.
        return None


def _bytes(text: str, _: PgType) -> bytes:
    return bytes.fromhex(text[2:])


_EXACT: dict[Kind, Callable[[str, PgType], Any]] = {
    Kind.SHORT: _whole,
    Kind.INTEGER: _whole,
    Kind.LONG: _whole,
    Kind.FLOAT: _float,
    Kind.DOUBLE: _float,
    Kind.DECIMAL: _decimal,
    Kind.DATE: _date,
    Kind.TIMESTAMP: _moment,
    Kind.TIMESTAMPTZ: _moment,
    Kind.BINARY: _bytes,
    Kind.TEXT_ARRAY: lambda text, _: strings_of(text),
    Kind.INTEGER_ARRAY: lambda text, _: longs_of(text),
}
"""Kind → the value of a text that is one of its kind; None where the typed column cannot hold it."""
