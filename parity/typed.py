"""PostgreSQL's text of a value → the JSON that Debezium's default modes must have for it.

This is the one normaliser of the comparison. It goes from our text to Debezium's form, by the types of
Debezium's documentation ("PostgreSQL connector", "Data type mappings"), and not back: what cannot be
gone back is a loss, and says which. ``land`` goes the other way, by code of its own.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Any

from omnisupport_ingest.landing.debezium_envelope import UNAVAILABLE
from parity.categories import INTERVAL, INTERVAL_CUT, NESTED_LIST, NOT_A_NUMBER, TRAILING_ZEROS
from parity.modes import DEFAULT, Modes

_DAY = 86_400_000_000
_DAYS_OF_MONTH = 30.4375
"""As Debezium counts a month in an interval."""

_INFINITE_DAYS = {"infinity": -2_147_472_692, "-infinity": -2_147_472_691}
_INFINITE_MICROS = {"infinity": 9_223_372_036_825_200_000, "-infinity": -9_223_372_036_832_400_000}
"""What the JDBC driver has for infinite dates and timestamps, in days and microseconds."""

_ITEM = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}"]+)')
"""One item of an array: in quotes, or bare."""

_NOT_FINITE = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}
"""What a ``numeric`` as text is where it is no number."""

_MOMENT = re.compile(r"(\d+)-(\d\d)-(\d\d)(?: (\d\d:\d\d:\d\d(?:\.\d+)?))?(?:\+00)?( BC)?")
_SPAN = re.compile(r"([+-]?\d+) (year|mon|day)s?")
_CLOCK = re.compile(r"([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d+))?$")


@dataclass(frozen=True, slots=True)
class Typed:
    """A value of Debezium's. ``loss``: the category under which it tells less than our text; null if
    both tell the same."""

    value: Any
    loss: str | None = None


def typed(text: str | None, pg_type: str, modes: Modes = DEFAULT) -> Typed:
    """``text`` of type ``pg_type`` (as ``format_type`` names it) in Debezium's form, by ``modes``."""
    if text is None:
        return Typed(None)
    if text == UNAVAILABLE:
        return Typed(_unavailable(pg_type))
    if pg_type.endswith("[]"):
        return _list(text, pg_type.removesuffix("[]"))
    name, _, modifier = pg_type.partition("(")
    if modes.as_text and name in _AS_TEXT:
        return _AS_TEXT[name](text)
    read = _BY_TYPE.get(name)
    if name == "numeric" and modifier:
        return _decimal(text, int(modifier.rstrip(")").partition(",")[2]))
    if name == "timestamp" and modifier.startswith(("0", "1", "2", "3")):
        return Typed(_timestamp(text).value // 1000)
    return Typed(text) if read is None else read(text)


def comparable(value: Any, pg_type: str) -> Any:
    """A value of Debezium's, so that equal ones are equal: single precision numbers are rounded to it."""
    return _single(value) if pg_type == "real" and isinstance(value, float) else value


def _single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _unavailable(pg_type: str) -> Any:
    if pg_type == "bytea":
        return base64.b64encode(UNAVAILABLE.encode()).decode()
    return [UNAVAILABLE] if pg_type == "text[]" else UNAVAILABLE


def _list(text: str, of_items: str) -> Typed:
    if text.startswith("{{"):
        return Typed(None, NESTED_LIST)
    items = [
        None if bare == "NULL" else bare or re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
        for quoted, bare in _ITEM.findall(text)
    ]
    return Typed([typed(each, of_items).value for each in items])


def _floating(text: str) -> Typed:
    return Typed(text if text in ("NaN", "Infinity", "-Infinity") else float(text))


def _real(text: str) -> Typed:
    found = _floating(text).value
    return Typed(_single(found) if isinstance(found, float) else found)


def _decimal(text: str, scale: int) -> Typed:
    number = Decimal(text)
    if not number.is_finite():
        return Typed(None, NOT_A_NUMBER)
    return Typed(_unscaled(int(number.scaleb(scale))))


def _numeric(text: str) -> Typed:
    number = Decimal(text)
    if not number.is_finite():
        return Typed(None, NOT_A_NUMBER)
    short = without_trailing_zeros(text)
    scale = len(short.partition(".")[2])
    value = {"scale": scale, "value": _unscaled(int(short.replace(".", "")))}
    return Typed(value, None if short == text else TRAILING_ZEROS)


def without_trailing_zeros(number: str) -> str:
    """``1.10`` as ``1.1``: what Debezium leaves of a ``numeric`` without a scale."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def _unscaled(number: int) -> str:
    """The bytes of Java's ``BigInteger.toByteArray``: two's complement, no longer than needed."""
    bits = number.bit_length() if number >= 0 else (-number - 1).bit_length()
    return base64.b64encode(number.to_bytes(bits // 8 + 1, "big", signed=True)).decode()


def _decimal_as_text(text: str) -> Typed:
    return Typed(_NOT_FINITE.get(text, text))


def _interval_as_text(text: str) -> Typed:
    """ISO 8601; the seconds as a binary fraction is written, the tenth digit and on cut off."""
    months, days, exact = _interval_parts(text)
    sign, minus = (-1, "-") if exact < 0 else (1, "")
    hours, minutes, seconds = _clock_parts(exact)
    cut = Decimal(repr(seconds)).quantize(Decimal("1e-9"), ROUND_DOWN)
    written = f"{cut:f}".rstrip("0").rstrip(".")
    years = int(months / 12)
    date = f"P{years}Y{months - 12 * years}M{days}D"
    value = f"{date}T{sign * hours}H{sign * minutes}M{minus if cut else ''}{written}S"
    same = Decimal(abs(exact) % 60_000_000).scaleb(-6) == cut
    return Typed(value, None if same else INTERVAL_CUT)


def _date(text: str) -> Typed:
    return Typed(_INFINITE_DAYS[text] if text in _INFINITE_DAYS else _micros(text) // _DAY)


def _timestamp(text: str) -> Typed:
    return Typed(_INFINITE_MICROS[text] if text in _INFINITE_MICROS else _micros(text))


def _zoned(text: str) -> Typed:
    """ISO 8601 in UTC with six digits; a year before 1 counted through 0, one above 9999 with its sign."""
    if text in _INFINITE_MICROS:
        return Typed(text)
    found = _MOMENT.fullmatch(text)
    assert found is not None, text
    year = 1 - int(found[1]) if found[5] else int(found[1])
    written = f"{'+' if year > 9999 else '-' if year < 0 else ''}{abs(year):04d}-{found[2]}-{found[3]}"
    clock, _, fraction = found[4].partition(".")
    return Typed(f"{written}T{clock}.{fraction:0<6}Z")


def _time(text: str) -> Typed:
    return Typed(_clock(text))


def _interval(text: str) -> Typed:
    """Microseconds, worked out as Debezium does (``io.debezium.time.MicroDuration``): in binary fractions,
    the rest cut off, so now and then one is missing."""
    months, days, exact = _interval_parts(text)
    sign = -1 if exact < 0 else 1
    hours, minutes, seconds = _clock_parts(exact)
    whole_days = months * _DAYS_OF_MONTH + days
    whole_minutes = (whole_days * 24 + sign * hours) * 60 + sign * minutes
    micros = int((whole_minutes * 60 + sign * seconds) * 1e6)
    if months or days:
        return Typed(micros, INTERVAL)
    return Typed(micros, None if micros == exact else INTERVAL_CUT)


def _interval_parts(text: str) -> tuple[int, int, int]:
    """Months, days and microseconds of an interval."""
    months = days = 0
    for number, unit in _SPAN.findall(text):
        if unit == "day":
            days += int(number)
        else:
            months += int(number) * (12 if unit == "year" else 1)
    rest = _SPAN.sub("", text).strip()
    return months, days, _clock(rest) if rest else 0


def _clock_parts(micros: int) -> tuple[int, int, float]:
    """Hours, minutes and seconds of ``micros`` without its sign; the driver adds up the seconds so."""
    whole_seconds, fraction = divmod(abs(micros), 1_000_000)
    minutes, whole_seconds = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return hours, minutes, whole_seconds + fraction / 1_000_000


def _clock(text: str) -> int:
    found = _CLOCK.match(text)
    assert found is not None, text
    seconds = (int(found[2]) * 60 + int(found[3])) * 60 + int(found[4])
    micros = seconds * 1_000_000 + int(f"{found[5] or '':0<6}")
    return -micros if found[1] == "-" else micros


def _micros(text: str) -> int:
    """Microseconds from 1970 to a date or time, in the Gregorian calendar extended to all years."""
    found = _MOMENT.fullmatch(text)
    assert found is not None, text
    year = 1 - int(found[1]) if found[5] else int(found[1])
    return _days(year, int(found[2]), int(found[3])) * _DAY + (_clock(found[4]) if found[4] else 0)


def _days(year: int, month: int, day: int) -> int:
    # Years begin in March here, so that the day that comes and goes is the last one.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    leap_days = year // 4 - year // 100 + year // 400
    return 365 * year + leap_days + (153 * month + 2) // 5 + day - 1 - 719_468


_BY_TYPE: dict[str, Callable[[str], Typed]] = {
    "smallint": lambda text: Typed(int(text)),
    "integer": lambda text: Typed(int(text)),
    "bigint": lambda text: Typed(int(text)),
    "boolean": lambda text: Typed(text == "t"),
    "real": _real,
    "double precision": _floating,
    "numeric": _numeric,
    "bytea": lambda text: Typed(base64.b64encode(bytes.fromhex(text[2:])).decode()),
    "date": _date,
    "time without time zone": _time,
    "timestamp without time zone": _timestamp,
    "timestamp with time zone": _zoned,
    "interval": _interval,
}
"""Type → its values. Every other type is its text: text, uuid, json, jsonb, enums."""

_AS_TEXT: dict[str, Callable[[str], Typed]] = {
    "numeric": _decimal_as_text,
    "interval": _interval_as_text,
}
"""The same for the types that ``modes.TEXT`` writes otherwise."""
