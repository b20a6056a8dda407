"""Converts Debezium's dates, times and intervals to PostgreSQL's text, for all of PostgreSQL's range.

The driver that Debezium reads with writes infinity as certain numbers. No date of PostgreSQL, or none that is
used in practice, has these numbers, so they are read as infinity again.
"""

from __future__ import annotations

import re

from omnisupport_ingest.sources.debezium.faults import ValueFault

DAY = 86_400_000_000
"""Microseconds."""

_LONGEST_DAYS = 1 << 31
_LONGEST_MICROS = 1 << 64
"""Beyond PostgreSQL's range, and still short enough to write out."""

_INFINITE_DAYS = {-2_147_472_692: "infinity", -2_147_472_691: "-infinity"}
_INFINITE_MICROS = {9_223_372_036_825_200_000: "infinity", -9_223_372_036_832_400_000: "-infinity"}
_INFINITE_TEXTS = {
    "-5877611-06-21": "infinity",
    "-5877611-06-22": "-infinity",
    "+294247-01-10T04:00:25.2": "infinity",
    "-290308-12-21T19:59:27.6": "-infinity",
}

_DATE = re.compile(r"([+-]?\d{4,7})-(\d\d)-(\d\d)", re.ASCII)
_MOMENT = re.compile(
    r"([+-]?\d{4,7})-(\d\d)-(\d\d)[T ](\d\d:\d\d)(:\d\d)?(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_CLOCK = re.compile(r"(\d\d:\d\d)(:\d\d)?(\.\d{1,9})?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_NUMBER = r"([+-]?\d{1,18})"
_INTERVAL = re.compile(
    rf"P(?:{_NUMBER}Y)?(?:{_NUMBER}M)?(?:{_NUMBER}D)?"
    rf"(?:T(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}(?:\.(\d{{1,9}}))?S)?)?",
    re.ASCII,
)


def date_of_days(days: int) -> str:
    """Return the date so many days after 1970-01-01."""
    _refuse_beyond(days, _LONGEST_DAYS)
    return _INFINITE_DAYS.get(days) or _date(*_civil(days))


def timestamp_of_micros(micros: int, *, zone: str = "") -> str:
    """Return the time so many microseconds after 1970-01-01; ``zone`` is appended."""
    if micros in _INFINITE_MICROS:
        return _INFINITE_MICROS[micros]
    _refuse_beyond(micros, _LONGEST_MICROS)
    days, rest = divmod(micros, DAY)
    day, era = _split_era(_date(*_civil(days)))
    return f"{day} {time_of_micros(rest)}{zone}{era}"


def time_of_micros(micros: int) -> str:
    """Return the time so many microseconds after midnight; the end of the day is 24:00:00."""
    if not 0 <= micros <= DAY:
        raise ValueFault("its number is no time of a day")
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return text + _fraction(f"{fraction:06d}")


def date_of_text(text: str) -> str:
    """Return the date in ``2026-02-28Z``, ISO 8601 with a year 0 and negative years before it."""
    plain = text.removesuffix("Z")
    if plain in _INFINITE_TEXTS or plain in ("infinity", "-infinity"):
        return _INFINITE_TEXTS.get(plain, plain)
    match = _DATE.fullmatch(plain)
    if match is None:
        raise ValueFault("it is no ISO 8601 date")
    return _date(int(match[1]), int(match[2]), int(match[3]))


def timestamp_of_text(text: str, *, zoned: bool) -> str:
    """Return the time in ``2026-02-28T13:14:15.1Z`` or ``infinity``; ``zoned``: the result has its zone."""
    plain = text.removesuffix("Z")
    if plain in _INFINITE_TEXTS or plain in ("infinity", "-infinity"):
        return _INFINITE_TEXTS.get(plain, plain)
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueFault("it is no ISO 8601 time")
    day, era = _split_era(_date(int(match[1]), int(match[2]), int(match[3])))
    zone = _zone(match[7]) if zoned else ""
    return f"{day} {match[4]}{match[5] or ':00'}{_fraction((match[6] or '')[1:])}{zone}{era}"


def time_of_text(text: str, *, zoned: bool) -> str:
    """Return the time of day in ``13:14:15.123456Z``; ``zoned``: the result has its zone."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ValueFault("it is no ISO 8601 time of a day")
    zone = _zone(match[4]) if zoned else ""
    return f"{match[1]}{match[2] or ':00'}{_fraction((match[3] or '')[1:])}{zone}"


def interval_of_micros(micros: int) -> str:
    """Return an interval of so many microseconds, in hours: the connector has already lost months and
    days."""
    _refuse_beyond(micros, _LONGEST_MICROS)
    return _clock(micros) if micros else "00:00:00"


def interval_of_text(text: str) -> str:
    """Return ``P1Y2M3DT4H5M6.789S`` in PostgreSQL's own style (``IntervalStyle = postgres``)."""
    match = _INTERVAL.fullmatch(text)
    if match is None or text in ("P", "PT"):
        raise ValueFault("it is no ISO 8601 duration")
    years, months, days, hours, minutes, seconds = (int(each or 0) for each in match.groups()[:6])
    # PostgreSQL has six digits. The connector writes nine digits of a binary fraction, cut off.
    fraction = (int((match[7] or "").ljust(9, "0")) + 500) // 1000
    if (match[6] or "").startswith("-"):
        fraction = -fraction
    years, months = _carried(years * 12 + months)
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + fraction
    parts: list[str] = []
    negative = False
    for count, one, many in ((years, "year", "years"), (months, "mon", "mons"), (days, "day", "days")):
        if count:
            sign = "+" if negative and count > 0 else ""
            parts.append(f"{sign}{count} {one if count == 1 else many}")
            negative = count < 0
    if micros or not parts:
        sign = "+" if negative and micros > 0 else ""
        parts.append(sign + _clock(micros))
    return " ".join(parts)


def _refuse_beyond(value: int, longest: int) -> None:
    if abs(value) > longest:
        raise ValueFault("its number is beyond any time")


def _carried(months: int) -> tuple[int, int]:
    years = abs(months) // 12
    return (years, months - 12 * years) if months >= 0 else (-years, months + 12 * years)


def _clock(micros: int) -> str:
    seconds, fraction = divmod(abs(micros), 1_000_000)
    sign = "-" if micros < 0 else ""
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return sign + clock + _fraction(f"{fraction:06d}")


def _fraction(digits: str) -> str:
    digits = digits[:6].rstrip("0")
    return f".{digits}" if digits else ""


def _zone(text: str | None) -> str:
    """Return a zone as PostgreSQL writes it: with minutes only if there are some."""
    if text is None:
        raise ValueFault("it has no time zone")
    if text == "Z":
        return "+00"
    hours, minutes = text[:3], text[3:].lstrip(":")
    return hours if minutes in ("", "00") else f"{hours}:{minutes}"


def _date(year: int, month: int, day: int) -> str:
    return f"{year:04d}-{month:02d}-{day:02d}" if year > 0 else f"{1 - year:04d}-{month:02d}-{day:02d} BC"


def _split_era(date: str) -> tuple[str, str]:
    day, space, era = date.partition(" ")
    return day, space + era


def _civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day in the Gregorian calendar, extended to all years.

    By Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms", ``civil_from_days``.
    """
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return year + era * 400 + (month <= 2), month, of_year - (153 * shifted + 2) // 5 + 1
