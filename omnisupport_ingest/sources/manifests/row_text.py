"""Converts a line of JSON to the texts that PostgreSQL would send for the same row.

So a row of a file is judged, typed and folded like a row from the WAL. Numbers keep every digit that they
were written with.
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
    """Return the row in one line of JSON: column → text. Raises ``RowFault`` if the line is no row.

    The result has every column of ``contract``, NULL if the line leaves it out, then the columns that only
    the line has. Key columns are never NULL.
    """
    return row_of(_parse(line), contract)


def row_of(values: Mapping[str, Any], contract: TableContract) -> dict[str, str | None]:
    """Return the row with ``values`` (parsed JSON), as ``read_row`` does. Raises ``RowFault``."""
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
