"""A line of JSON as the texts that PostgreSQL would send for the same row.

So a row that comes in a file is judged, typed and folded like one that comes from the WAL.
Numbers keep every digit they were written with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS
from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.sources.value_text import plain_number


class RowFault(ValueError):
    """Raised for a line that is not a row of its contract. The message gives the reason without any value."""


def read_row(line: bytes, contract: TableContract) -> dict[str, str | None]:
    """The row in one line of JSON: column → text. ``RowFault`` if it is no row.

    Every column of ``contract`` is in the result, NULL if the line leaves it out, and after them
    those that only the line has. The key's columns are not NULL.
    """
    return row_of(_parse(line), contract)


def row_of(values: Mapping[str, Any], contract: TableContract) -> dict[str, str | None]:
    """The row with ``values`` (as of JSON), as ``read_row`` gives it; ``RowFault``."""
    arrays = {column.name for column in contract.source_columns if column.type.kind in ARRAYS}
    row: dict[str, str | None] = dict.fromkeys(column.name for column in contract.source_columns)
    for name, value in values.items():
        row[name] = array_literal(value) if name in arrays and isinstance(value, list) else text(value)
    if any(value is not None and "\0" in value for value in row.values()):
        raise RowFault("it holds a NUL character, which no text of PostgreSQL does")
    for name in contract.key:
        if row[name] is None:
            raise RowFault(f"the key column {name!r} has no value")
    return row


def text(value: Any) -> str | None:
    """A parsed JSON value as PostgreSQL's text of it; objects and arrays as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, Decimal):
        return plain_number(value)
    return str(value) if isinstance(value, int) else _json(value)


def array_literal(values: list[Any]) -> str:
    r"""A JSON array as a PostgreSQL array literal, ``{a,"b \"c\"",NULL}``.

    Every string is quoted: that is always allowed (PostgreSQL manual, 8.15.6).
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
    """Compact JSON; ``json.dumps`` has no way to write a decimal with all its digits."""
    if isinstance(value, dict):
        members = (f"{json.dumps(name, ensure_ascii=False)}:{_json(item)}" for name, item in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json(item) for item in value) + "]"
    return plain_number(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)
