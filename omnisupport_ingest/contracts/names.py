"""Names in the lake for tables with arbitrary names at the source.

A name in the lake is part of a path and of an asset key, and file systems may ignore case. So it has plain
characters only, and differs from the others of its source in more than case.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Allowed as ``x-cdc.name`` and ``x-cdc.source``."""

COLUMN_NAME = re.compile(r"[^\s.`\"',;=(){}\[\]\x00-\x1f]+")
"""Allowed as the name of a column in the lake; the same as in the contract's schema."""

TableName = tuple[str, str]
"""Schema and table, as the source has them, unquoted."""


def lake_name(text: str) -> str:
    """Return a plain name similar to ``text``: ``Weird Name`` becomes ``Weird_Name``.

    Different texts may give the same name; ``lake_names`` keeps them apart.
    """
    if PLAIN_NAME.fullmatch(text):
        return text
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9]+", "_", ascii_only).strip("_")
    if not name:
        return f"table_{_digest(text)}"
    return name if PLAIN_NAME.fullmatch(name) else f"table_{name}"


def lake_names(tables: Collection[TableName], taken: Mapping[TableName, str]) -> dict[TableName, str]:
    """Return a distinct name for each of ``tables``; ``taken``: names that tables have already.

    A table keeps its name. Else it gets the first of these that no other has: the table's name, schema and
    table, the same with a digest. The order of ``tables`` does not matter.
    """
    found = {table: taken[table] for table in tables if table in taken}
    used = {name.lower() for name in taken.values()}
    left = sorted(set(tables) - set(found))
    for form in (_table_alone, _with_schema, _with_digest):
        counts = Counter(form(table).lower() for table in left)
        named = {
            table: form(table)
            for table in left
            if counts[form(table).lower()] == 1 and form(table).lower() not in used
        }
        found |= named
        used |= {name.lower() for name in named.values()}
        left = [table for table in left if table not in named]
    return found


def spellings(table: TableName) -> set[str]:
    """Return the ways to write ``table`` of the source: with its schema or alone, each part quoted or not."""
    schema, name = (_quoted_and_plain(part) for part in table)
    return name | {f"{one}.{other}" for one in schema for other in name}


def _quoted_and_plain(part: str) -> set[str]:
    return {part, '"' + part.replace('"', '""') + '"'}


def _table_alone(table: TableName) -> str:
    return lake_name(table[1])


def _with_schema(table: TableName) -> str:
    return lake_name(f"{table[0]}_{table[1]}")


def _with_digest(table: TableName) -> str:
    return f"{_with_schema(table)}_{_digest(repr(table))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def row_subject(table: str) -> str:
    """Return the kind of subject of those rows of ``table`` that name no subject: each of them is its own
    subject."""
    return f"row of {table}"
