"""What a value of the source is in the lake when it came by Debezium: ``docs/debezium.md``, "What Debezium
loses", as a function. Written from that page, not from the code that lands files."""

from __future__ import annotations

from typing import Any

from parity.categories import INTERVAL, INTERVAL_CUT, NESTED_LIST, NOT_A_NUMBER, TRAILING_ZEROS
from parity.typed import typed, without_trailing_zeros


def as_it_lands(text: str | None, pg_type: str, default: Any) -> str | None:
    """PostgreSQL's ``text`` of a column with ``default`` (null: none), as it lands from Debezium's JSON."""
    if text is None:
        return None if default is None else str(default)
    found = typed(text, pg_type)
    if found.loss is None:
        return text
    if found.loss == NOT_A_NUMBER:
        return None
    if found.loss == TRAILING_ZEROS:
        return without_trailing_zeros(text)
    if found.loss in (INTERVAL, INTERVAL_CUT):
        return _hours(found.value)
    assert found.loss == NESTED_LIST, found.loss
    return "{NULL,NULL}"


def _hours(micros: int) -> str:
    seconds, fraction = divmod(abs(micros), 1_000_000)
    rest = f".{fraction:06d}".rstrip("0") if fraction else ""
    sign = "-" if micros < 0 else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{rest}"
