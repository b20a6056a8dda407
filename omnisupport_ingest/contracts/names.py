"""Names in the lake for tables that may be called anything at the source.

A name in the lake is part of a folder and of an asset key, and file systems may ignore case: it is
plain, and differs from the others of its source in more than case.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What may stand in ``x-cdc.name`` (and ``x-cdc.source``)."""

COLUMN_NAME = re.compile(r"[^\s.`\"',;=(){}\[\]\x00-\x1f]+")
"""What a column may be called in the lake; the contract's schema says the same."""

TableName = tuple[str, str]
"""Schema and table, as the source has them, unquoted."""


def lake_name(text: str) -> str:
    """A plain name that reads like ``text``: ``Weird Name`` becomes ``Weird_Name``.

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
    """A name for each of ``tables``, none in use twice; ``taken``: the names that tables have already.

    A table keeps the name it has. Else it gets the first of these that is its own: its table's name,
    schema and table, and that with a digest. The order of ``tables`` does not matter.
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
    """How a person may write ``table`` of the source: with its schema or alone, each part quoted or not."""
    schema, name = (_quoted_or_not(part) for part in table)
    return name | {f"{one}.{other}" for one in schema for other in name}


def _quoted_or_not(part: str) -> set[str]:
    return {part, '"' + part.replace('"', '""') + '"'}


def _table_alone(table: TableName) -> str:
    return lake_name(table[1])


def _with_schema(table: TableName) -> str:
    return lake_name(f"{table[0]}_{table[1]}")


def _with_digest(table: TableName) -> str:
    return f"{_with_schema(table)}_{_digest(repr(table))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
