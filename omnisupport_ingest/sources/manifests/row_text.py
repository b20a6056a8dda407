"""Converts a line of JSON to the texts that PostgreSQL would send for the same row.

So a row of a file is judged, typed and folded like a row from the WAL. Numbers keep every digit that they
were written with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import orjson

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind
from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.sources.value_text import plain_number


class RowFault(ValueError):
    """Raised for a line that is not a row of its contract. The message gives the reason without any value."""


def read_row(line: bytes, contract: TableContract) -> dict[str, str | None]:
    """Return the row in one line of JSON: column → text. Raises ``RowFault`` if the line is no row.

    The result has every column of ``contract``, NULL if the line leaves it out, then the columns that only
    the line has. Key columns are never NULL.
    """
    return row_of(_parse(line), contract)


def row_of(
    values: Mapping[str, Any], contract: TableContract, *, declared: bool = False
) -> dict[str, str | None]:
    """Return the row with ``values`` (parsed JSON), as ``read_row`` does. Raises ``RowFault``.

    ``declared``: the file names its columns for all of its rows. A column that it does not have is then
    unknown, not NULL, and the row does not have it either.
    """
    row: dict[str, str | None] = {}
    for column in contract.source_columns:
        if column.name in values:
            row[column.name] = _text_of(values[column.name], column)
        elif not declared:
            row[column.name] = None
    row |= {name: text(value) for name, value in values.items() if name not in row}
    if any(value is not None and "\0" in value for value in row.values()):
        raise RowFault("it holds a NUL character, which no text of PostgreSQL does")
    for name in contract.key:
        if row.get(name) is None:
            raise RowFault(f"the key column {name!r} has no value")
    return row


def _text_of(value: Any, column: Column) -> str | None:
    """Return the value of ``column`` as PostgreSQL's text."""
    kind = column.type.kind
    if value is None:
        return None
    if kind in ARRAYS and isinstance(value, list):
        return array_literal(value)
    if column.pg_type in _JSON_TYPES:
        return value if isinstance(value, str) and _is_json(value) else _json(value)
    found = text(value)
    if found is not None and kind is Kind.BOOLEAN:
        return _BOOLEANS.get(found.lower(), found)
    if found is not None and kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        return _canonical_time(found, zoned=kind is Kind.TIMESTAMPTZ)
    return found


def _canonical_time(written: str, *, zoned: bool) -> str:
    """Return ``written`` as PostgreSQL writes the time in UTC, so that all formats have one text for it.

    A text that PostgreSQL may read in several ways stays: one without a zone for a column with one, and the
    reverse.
    """
    match = _TIME.fullmatch(written)
    if match is None or (match["zone"] is not None) is not zoned:
        return written
    fraction = (match["fraction"] or "").rstrip("0")
    if len(fraction) > 6:
        return written
    try:
        clock = f"{match['clock']}:{match['seconds'] or '00'}"
        moment = datetime.fromisoformat(f"{match['day']} {clock}{match['zone'] or '+00:00'}")
        plain = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S").rjust(19, "0")
    except (ValueError, OverflowError):
        return written
    return plain + (f".{fraction}" if fraction else "") + ("+00" if zoned else "")


_TIME = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d)(?::(?P<seconds>\d\d)(?:\.(?P<fraction>\d+))?)?"
    r"(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?",
    re.ASCII,
)
_BOOLEANS = dict.fromkeys(("t", "true", "y", "yes", "on", "1"), "t") | dict.fromkeys(
    ("f", "false", "n", "no", "off", "0"), "f"
)
_JSON_TYPES = frozenset({"json", "jsonb"})


def _is_json(written: str) -> bool:
    try:
        orjson.loads(written)
    except orjson.JSONDecodeError:
        return _is_unusual_json(written)
    return True


def _is_unusual_json(written: str) -> bool:
    """Whether ``written`` is JSON that ``orjson`` refuses, as numbers of many digits or half a surrogate
    pair."""
    try:
        json.loads(written, parse_constant=_refuse, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(_: str) -> None:
    raise ValueError


def text(value: Any) -> str | None:
    """Return a parsed JSON value as PostgreSQL's text; objects and arrays as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, Decimal):
        return plain_number(value)
    return str(value) if isinstance(value, int) else _json(value)


def array_literal(values: list[Any]) -> str:
    r"""Return a JSON array as a PostgreSQL array literal, ``{a,"b \"c\"",NULL}``.

    Every string is quoted, which is always allowed (PostgreSQL manual, 8.15.6).
    """
    elements = []
    for value in values:
        element = array_literal(value) if isinstance(value, list) else text(value)
        if element is None:
            element = "NULL"
        elif not isinstance(value, list | int | Decimal):
            escaped = element.replace("\\", r"\\").replace('"', r"\"")
            element = f'"{escaped}"'
        elements.append(element)
    return "{" + ",".join(elements) + "}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = parse_row(line)
    except Unreadable as why:
        raise RowFault(f"it is not valid JSON in UTF-8 that can be read: {why}") from None
    if not isinstance(values, dict):
        raise RowFault("it is not a JSON object")
    return values


def _json(value: Any) -> str:
    """Return ``value`` as compact JSON; ``json.dumps`` cannot write a decimal with all its digits."""
    if isinstance(value, dict):
        members = (f"{json.dumps(name, ensure_ascii=False)}:{_json(item)}" for name, item in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json(item) for item in value) + "]"
    return plain_number(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)
