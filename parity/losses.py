"""What a value of the source is in the lake when it came by Debezium: ``docs/debezium.md``, "What Debezium
loses", as a function. Written from that page, not from the code that lands files."""

from __future__ import annotations

from parity.categories import INTERVAL, INTERVAL_CUT, NESTED_LIST, NOT_A_NUMBER, TRAILING_ZEROS
from parity.shapes import Shape
from parity.typed import without_trailing_zeros


def as_it_lands(text: str | None, name: str, shape: Shape) -> str | None:
    """PostgreSQL's ``text`` of the column ``name``, as it lands from Debezium's JSON."""
    if text is None:
        default = shape.defaults.get(name)
        return None if default is None else str(default)
    found = shape.typed(name, text)
    if found.loss is None:
        return text
    if found.loss == NOT_A_NUMBER:
        return None
    if found.loss == TRAILING_ZEROS:
        return without_trailing_zeros(text)
    if found.loss == INTERVAL_CUT and shape.modes.as_text:
        # What is cut off there lies beyond PostgreSQL's digits, and is rounded back.
        return text
    if found.loss in (INTERVAL, INTERVAL_CUT):
        return _hours(found.value)
    assert found.loss == NESTED_LIST, found.loss
    return "{NULL,NULL}"


def _hours(micros: int) -> str:
    seconds, fraction = divmod(abs(micros), 1_000_000)
    rest = f".{fraction:06d}".rstrip("0") if fraction else ""
    sign = "-" if micros < 0 else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{rest}"
