"""The SQL of the support desk, one statement for any number of rows; each returns the rows changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import execute_values

from omnisupport_ingest.sources.postgres.support_desk.rows import COLUMNS

_ROWS_OF_A_STATEMENT = 1000

KEY_COLUMNS = {
    "organizations": (("id", "bigint"),),
    "customers": (("id", "uuid"),),
    "agents": (("handle", "text"),),
    "tickets": (("id", "bigint"),),
    "ticket_comments": (("ticket_id", "bigint"), ("comment_no", "integer")),
}
"""Primary key columns of each table with their types."""

Key = tuple[object, ...]
"""A primary key: one value for each key column."""


def insert(cursor: Cursor, table: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Insert ``rows``, which have the columns of ``rows.COLUMNS``."""
    columns = ", ".join(COLUMNS[table])
    statement = f"INSERT INTO support.{table} ({columns}) VALUES %s"
    for start in range(0, len(rows), _ROWS_OF_A_STATEMENT):
        part = rows[start : start + _ROWS_OF_A_STATEMENT]
        execute_values(cursor, statement, part, page_size=len(part))
    return len(rows)


def update(
    cursor: Cursor, table: str, assignments: str, rows: Sequence[tuple[Key, tuple[object, ...]]]
) -> int:
    """Set columns of the rows with the given keys to values of their own.

    ``assignments`` is the SET list over ``v1``, ``v2``, … for the values beside each key, with a
    cast where the column is not text: ``"priority = v1::smallint"``.
    """
    if not rows:
        return 0
    values = [f"v{number + 1}" for number in range(len(rows[0][1]))]
    names = ", ".join(_key_names(table) + values)
    statement = (
        f"UPDATE support.{table} AS t SET {assignments} "
        f"FROM (VALUES %s) AS v({names}) WHERE {_same_key(table)}"
    )
    execute_values(cursor, statement, [key + given for key, given in rows], page_size=len(rows))
    return int(cursor.rowcount)


def delete(cursor: Cursor, table: str, keys: Sequence[Key]) -> int:
    """Delete the rows with the given keys."""
    if not keys:
        return 0
    names = ", ".join(_key_names(table))
    statement = f"DELETE FROM support.{table} AS t USING (VALUES %s) AS v({names}) WHERE {_same_key(table)}"
    execute_values(cursor, statement, keys, page_size=len(keys))
    return int(cursor.rowcount)


def change_key(cursor: Cursor, table: str, old: Key, new: Key, at: datetime | None = None) -> int:
    """Give the row ``old`` the key ``new``, and nothing else but, where given, ``updated_at``."""
    columns = [column for column, _ in KEY_COLUMNS[table]]
    assignments = [f"{column} = %s" for column in columns] + (["updated_at = %s"] if at else [])
    statement = (
        f"UPDATE support.{table} SET {', '.join(assignments)} "
        f"WHERE {' AND '.join(f'{column} = %s' for column in columns)}"
    )
    cursor.execute(statement, (*new, *((at,) if at else ()), *old))
    return int(cursor.rowcount)


def _key_names(table: str) -> list[str]:
    return [f"k{number}" for number in range(len(KEY_COLUMNS[table]))]


def _same_key(table: str) -> str:
    columns = zip(_key_names(table), KEY_COLUMNS[table], strict=True)
    return " AND ".join(f"t.{column} = v.{name}::{kind}" for name, (column, kind) in columns)
