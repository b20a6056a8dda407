"""Converts numbers, in every mode of Debezium, to PostgreSQL's text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from omnisupport_ingest.contracts.pg_values import (
    NUMERIC_DIGITS_AFTER,
    NUMERIC_DIGITS_BEFORE,
    is_finite_number,
    whole_number,
)
from omnisupport_ingest.sources.debezium import pg_literals
from omnisupport_ingest.sources.debezium.expected import from_base64, number, string
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.value_text import plain_number

_SPECIAL_NUMBERS = {
    "NAN": "NaN",
    "NaN": "NaN",
    "POSITIVE_INFINITY": "Infinity",
    "Infinity": "Infinity",
    "NEGATIVE_INFINITY": "-Infinity",
    "-Infinity": "-Infinity",
}

_LARGEST_SCALE = 20_000
_LONGEST_UNSCALED = math.ceil((NUMERIC_DIGITS_BEFORE + NUMERIC_DIGITS_AFTER) * math.log2(10) / 8) + 1
"""Most bytes of the unscaled number of a PostgreSQL numeric."""

_MONEY_DIGITS = 17
"""Most digits before the point of a money value, which is a 64-bit number of cents."""

Schema = Mapping[str, Any]
"""The schema of a value, as Kafka Connect writes it beside the payload; empty: none."""


def floating(value: Any, *, single: bool) -> str:
    """Return a float of four (``single``) or eight bytes, or a special value under any of its names."""
    if isinstance(value, str):
        if value in _SPECIAL_NUMBERS:
            return _SPECIAL_NUMBERS[value]
        value = _decimal(value)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueFault("it is no number")
    try:
        text = pg_literals.float_text(float(value), single=single)
    except OverflowError:
        raise ValueFault("it is larger than its type") from None
    if text in ("Infinity", "-Infinity"):
        # It overflowed to infinity here; an infinite value at the source comes under a name of its own.
        raise ValueFault("it is larger than its type")
    return text


def numeric(value: Any, target: Target, *, decimals: str) -> str:
    """Return a numeric. ``decimals``: the connector's ``decimal.handling.mode``."""
    if isinstance(value, dict):
        return variable_decimal(value, {}, target)
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return _scaled(Decimal(value), target)
    text = string(value)
    if text in _SPECIAL_NUMBERS:
        return _SPECIAL_NUMBERS[text]
    # A decimal as text has a point unless its scale is 0; base64 has none.
    if decimals == "precise" and "." not in text and target.modifier is not None:
        return plain_number(_unscaled(text, target.scale))
    return plain_number(_decimal(text))


def _scaled(number: Decimal, target: Target) -> str:
    """Return a JSON number with as many digits after the point as its type has."""
    if target.modifier is not None and number.is_finite() and number.adjusted() < 1000:
        exponent = number.as_tuple().exponent
        if isinstance(exponent, int) and -exponent < target.scale:
            return format(number, f".{target.scale}f")
    return plain_number(number)


def _decimal(text: str) -> Decimal:
    # Python accepts more texts as numbers than PostgreSQL: 1_000, digits of other scripts, sNaN.
    if not is_finite_number(text):
        raise ValueFault("it is no number")
    return Decimal(text)


def _unscaled(text: str, scale: int) -> Decimal:
    content = from_base64(text)
    if len(content) > _LONGEST_UNSCALED:
        raise ValueFault("it has more digits than a numeric of PostgreSQL")
    # Not through ``str(int)``: Python refuses to write more than 4,300 digits.
    return Decimal(f"{Decimal(int.from_bytes(content, 'big', signed=True)):f}E{-scale}")


def connect_decimal(value: Any, schema: Schema, target: Target) -> str:
    """Return Connect's ``Decimal``: the unscaled number in base64, with the scale of the schema."""
    parameters = schema.get("parameters")
    scale_setting = parameters.get("scale") if isinstance(parameters, dict) else target.scale
    scale = whole_number(scale_setting) if isinstance(scale_setting, str) else scale_setting
    if isinstance(scale, bool) or not isinstance(scale, int):
        raise ValueFault("the schema does not tell its scale")
    if abs(scale) > _LARGEST_SCALE:
        raise ValueFault("its scale is beyond PostgreSQL's")
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        number = Decimal(value)
    else:
        number = _unscaled(string(value), scale)
    return _money(number) if target.name == "money" else plain_number(number)


def variable_decimal(value: Any, _: Schema, __: Target) -> str:
    """Return Debezium's ``VariableScaleDecimal``: an object with scale and unscaled number."""
    if not isinstance(value, dict) or type(value.get("scale")) is not int:
        raise ValueFault("it is no decimal of a scale of its own")
    if abs(value["scale"]) > _LARGEST_SCALE:
        raise ValueFault("its scale is beyond PostgreSQL's")
    return plain_number(_unscaled(string(value.get("value")), value["scale"]))


def integer(value: Any, _: Target) -> str:
    """Return a whole number, given as a number or as its digits."""
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit():
        return value
    if isinstance(value, Decimal) and value.as_tuple().exponent == 0:
        # A whole number with very many digits comes so. It lands, and judging reports that it breaks its
        # type.
        return f"{value:f}"
    return str(number(value))


def money(value: Any, _: Target) -> str:
    """Return money: a number, its text, or the unscaled number in base64 with two digits after the point."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return _money(Decimal(value))
    text = string(value)
    return _money(_decimal(text) if "." in text else _unscaled(text, 2))


def _money(amount: Decimal) -> str:
    # All digits are written out, and 1e999999999 would have as many.
    if amount.adjusted() > _MONEY_DIGITS:
        raise ValueFault("it is larger than its type")
    return pg_literals.money(amount)
