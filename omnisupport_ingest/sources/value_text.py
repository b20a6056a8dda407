"""A value of a driver, a columnar file or a document as the text that PostgreSQL would write."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from omnisupport_ingest.contracts.pg_types import FLOATS, Kind

_MAX_EXPONENT = 400
"""Numbers with larger exponents keep them: written out they could fill the memory."""

_TIMES = frozenset({Kind.TIMESTAMP, Kind.TIMESTAMPTZ})


def value_text(value: Any, kind: Kind | None) -> str:
    """Return ``value``, which is not None, as the text of a column of ``kind`` (None: the column has no
    contract)."""
    if kind is Kind.BOOLEAN and isinstance(value, bool | int):
        return "t" if value else "f"
    if kind in _TIMES and isinstance(value, str | datetime):
        return _time_text(value, zoned=kind is Kind.TIMESTAMPTZ)
    if isinstance(value, bytes | bytearray | memoryview):
        return "\\x" + bytes(value).hex()
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, datetime):
        return _time_text(value, zoned=value.tzinfo is not None)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and kind not in FLOATS:
        # SQLite returns a decimal as a binary float.
        return format(Decimal(repr(value)), "f")
    if isinstance(value, Decimal) and value.is_finite():
        # The text of a Python decimal may have an exponent; PostgreSQL's never has.
        return format(value, "f")
    return str(value)


def plain_number(value: Decimal) -> str:
    """All digits, without an exponent."""
    exponent = value.as_tuple().exponent
    plain = isinstance(exponent, int) and abs(exponent) <= _MAX_EXPONENT
    return format(value, "f") if plain else str(value)


def _time_text(value: str | datetime, *, zoned: bool) -> str:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        # Not a time. The contract's rule for the type will report it.
        return str(value)
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    text = moment.isoformat(sep=" ")
    # PostgreSQL leaves out trailing zeros of a fraction.
    text = text.rstrip("0") if "." in text else text
    return f"{text}+00" if zoned else text
