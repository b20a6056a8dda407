"""Names and texts as SQL: the replication protocol takes no parameters, so they are quoted here."""

from __future__ import annotations


def identifier(name: str) -> str:
    """``name`` as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, table: str) -> str:
    """A table's name with its schema, both quoted."""
    return f"{identifier(schema)}.{identifier(table)}"


def literal(text: str) -> str:
    """``text`` as an SQL string (``standard_conforming_strings`` is on since PostgreSQL 9.1)."""
    return "'" + text.replace("'", "''") + "'"
