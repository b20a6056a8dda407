"""Whether a text is a value of a PostgreSQL type, and how it compares: plain Python, value by value.

Text is canonical: ``DateStyle=ISO``, ``TimeZone=UTC``, ``bytea_output=hex``. A value that the lake's typed
column cannot hold (``NaN`` in a numeric, the date ``infinity``) is a value here; ``typed_values`` decides
what fits.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable
from decimal import Decimal

from omnisupport_ingest.contracts.pg_types import Kind

# Possessive (++, *+), so that a long text that is no number is not matched again at each of its digits.
_INTEGER = re.compile(r"([+-]?)(?=[0-9])0*+([0-9]{0,19})\Z")
_NUMBER = re.compile(r"[+-]?([0-9]++\.?+[0-9]*+|\.[0-9]++)([eE][+-]?[0-9]{1,9})?\Z")
_NOT_FINITE = re.compile(r"(NaN|[+-]?[Ii]nf(inity)?)\Z")
_SOME_DIGIT_SET = re.compile(r"[^eE]*[1-9]")
_DAY = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})\Z")
_MOMENT = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]{1,6})?"
    r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)?\Z"
)
_BEYOND_SPARKS_TIME = re.compile(
    r"(-?infinity|[0-9]{4,}-[0-9]{2}-[0-9]{2}.* BC|[0-9]{5,}-[0-9]{2}-[0-9]{2}.*)\Z"
)
_BYTES = re.compile(r"\\x([0-9a-fA-F]{2})*+\Z")
_ANY_ARRAY = re.compile(r"(\[[-+:0-9\[\]]+\]=)?\{.*\}\Z", re.DOTALL)

_RANGES = {
    Kind.SHORT: (-(2**15), 2**15 - 1),
    Kind.INTEGER: (-(2**31), 2**31 - 1),
    Kind.LONG: (-(2**63), 2**63 - 1),
}

NUMERIC_DIGITS_BEFORE, NUMERIC_DIGITS_AFTER = 131_072, 16_383
"""The most digits before and after the point of a numeric (PostgreSQL manual, table "Numeric Types")."""

LONGEST_NUMERIC = NUMERIC_DIGITS_BEFORE + NUMERIC_DIGITS_AFTER + len("-.")
"""Characters of the longest text that PostgreSQL writes for a numeric."""

_SURELY_NUMERIC = 1000
"""A number of at most so many characters, without an exponent, is within the limits of numeric."""

Test = Callable[[str], bool]


def value_test(kind: Kind) -> Test:
    """Return the test whether a text is a value of ``kind``."""
    return _TESTS[kind]


def number(text: str, kind: Kind) -> Decimal | float | None:
    """Return the number that ``text`` spells, comparable with a ``Decimal``; None if it is none of ``kind``.

    Exact, except for ``real`` and ``double precision``, whose values are binary fractions.
    """
    if not _TESTS[kind](text):
        return None
    if kind is Kind.FLOAT:
        return float(struct.unpack("<f", struct.pack("<f", float(text)))[0])
    if kind is Kind.DOUBLE or _NOT_FINITE.match(text):
        return float(text)
    return Decimal(text)


def whole_number(text: str) -> int | None:
    """Return the whole number that ``text`` spells; None if it is none, or has more than 19 digits.

    All texts become ``int`` here: Python raises ``ValueError`` for more than 4,300 digits, and no type has
    more than 19.
    """
    found = _INTEGER.match(text)
    return None if found is None else int(found[1] + (found[2] or "0"))


def is_finite_number(text: str) -> bool:
    """Whether ``text`` spells a finite number as PostgreSQL reads one, of any size."""
    return _NUMBER.match(text) is not None


def below(value: Decimal | float, bound: Decimal) -> bool:
    """Whether ``value`` is less than ``bound``. ``NaN`` is greater than every number, as in PostgreSQL."""
    return value < _comparable(value, bound)


def above(value: Decimal | float, bound: Decimal) -> bool:
    """Whether ``value`` is greater than ``bound``; ``NaN`` always is."""
    return value != value or value > _comparable(value, bound)


def _comparable(value: Decimal | float, bound: Decimal) -> Decimal | float:
    # 0.1 as a double is not 0.1 exactly; the bound of a double is the double nearest to it.
    return float(bound) if isinstance(value, float) else bound


def _is_numeric(text: str) -> bool:
    found = _NUMBER.match(text)
    if found is None:
        return _NOT_FINITE.match(text) is not None
    if len(text) <= _SURELY_NUMERIC and found[2] is None:
        return True
    if len(text) > LONGEST_NUMERIC:
        return False
    value = Decimal(text)
    exponent = value.as_tuple().exponent
    after = -exponent if isinstance(exponent, int) else 0
    return after <= NUMERIC_DIGITS_AFTER and value.adjusted() < NUMERIC_DIGITS_BEFORE


def _integer(kind: Kind) -> Test:
    lowest, highest = _RANGES[kind]

    def test(text: str) -> bool:
        value = whole_number(text)
        return value is not None and lowest <= value <= highest

    return test


def _is_double(text: str) -> bool:
    if _NUMBER.match(text) is None:
        return _NOT_FINITE.match(text) is not None
    value = float(text)
    return math.isfinite(value) and (value != 0.0 or _SOME_DIGIT_SET.match(text) is None)


def _is_float(text: str) -> bool:
    if not _is_double(text):
        return False
    value = float(text)
    if not math.isfinite(value) or value == 0.0:
        return True
    try:
        # "<f": in native format a number that is too large becomes infinite without an error.
        return bool(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return False


def _is_date(text: str) -> bool:
    found = _DAY.match(text)
    if found is None:
        return _BEYOND_SPARKS_TIME.match(text) is not None
    return _is_day(*map(int, found.groups()))


def _is_moment(text: str) -> bool:
    found = _MOMENT.match(text)
    if found is None:
        return _BEYOND_SPARKS_TIME.match(text) is not None
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    return hour < 24 and minute < 60 and second < 60 and _is_day(year, month, day)


def _is_day(year: int, month: int, day: int) -> bool:
    if day <= 28 and 1 <= month <= 12 and day and year:
        return True
    try:
        dt.date(year, month, day)
    except ValueError:
        return False
    return True


_TESTS: dict[Kind, Test] = {
    Kind.BOOLEAN: frozenset({"t", "true", "f", "false"}).__contains__,
    Kind.SHORT: _integer(Kind.SHORT),
    Kind.INTEGER: _integer(Kind.INTEGER),
    Kind.LONG: _integer(Kind.LONG),
    Kind.FLOAT: _is_float,
    Kind.DOUBLE: _is_double,
    Kind.DECIMAL: _is_numeric,
    Kind.NUMERIC_TEXT: _is_numeric,
    Kind.DATE: _is_date,
    Kind.TIMESTAMP: _is_moment,
    Kind.TIMESTAMPTZ: _is_moment,
    Kind.BINARY: lambda text: _BYTES.match(text) is not None,
    Kind.TEXT_ARRAY: lambda text: _ANY_ARRAY.match(text) is not None,
    Kind.INTEGER_ARRAY: lambda text: _ANY_ARRAY.match(text) is not None,
    Kind.TEXT: lambda _: True,
}
