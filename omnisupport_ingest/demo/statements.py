"""The SQL of a workload, one statement for any number of rows; each returns the rows changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import execute_values

_ROWS_OF_A_STATEMENT = 1000

Key = tuple[object, ...]
"""A primary key: one value for each key column."""


@dataclass(frozen=True)
class Table:
    """A table that traffic changes. ``name``: with its schema; plain names, as they stand in SQL.

    ``columns``: those that an insert gives, in order. ``key``: primary key columns with their types.
    """

    name: str
    columns: tuple[str, ...]
    key: tuple[tuple[str, str], ...]

    @property
    def key_columns(self) -> str:
        """The key's columns, for a SELECT."""
        return ", ".join(column for column, _ in self.key)

    @property
    def _key_values(self) -> list[str]:
        return [f"k{number}" for number in range(len(self.key))]

    @property
    def _same_key(self) -> str:
        columns = zip(self._key_values, self.key, strict=True)
        return " AND ".join(f"t.{column} = v.{name}::{kind}" for name, (column, kind) in columns)

    def insert(self, cursor: Cursor, rows: Sequence[tuple[object, ...]]) -> int:
        """Insert ``rows``, which have the columns of the table."""
        statement = f"INSERT INTO {self.name} ({', '.join(self.columns)}) VALUES %s"
        for start in range(0, len(rows), _ROWS_OF_A_STATEMENT):
            part = rows[start : start + _ROWS_OF_A_STATEMENT]
            execute_values(cursor, statement, part, page_size=len(part))
        return len(rows)

    def update(self, cursor: Cursor, assignments: str, rows: Sequence[tuple[Key, tuple[object, ...]]]) -> int:
        """Set columns of the rows with the given keys to values of their own.

        ``assignments`` is the SET list over ``v1``, ``v2``, … for the values beside each key, with a
        cast where the column is not text: ``"priority = v1::smallint"``.
        """
        if not rows:
            return 0
        values = [f"v{number + 1}" for number in range(len(rows[0][1]))]
        names = ", ".join(self._key_values + values)
        statement = (
            f"UPDATE {self.name} AS t SET {assignments} FROM (VALUES %s) AS v({names}) WHERE {self._same_key}"
        )
        execute_values(cursor, statement, [key + given for key, given in rows], page_size=len(rows))
        return int(cursor.rowcount)

    def delete(self, cursor: Cursor, keys: Sequence[Key]) -> int:
        """Delete the rows with the given keys."""
        if not keys:
            return 0
        names = ", ".join(self._key_values)
        statement = f"DELETE FROM {self.name} AS t USING (VALUES %s) AS v({names}) WHERE {self._same_key}"
        execute_values(cursor, statement, keys, page_size=len(keys))
        return int(cursor.rowcount)

    def change_key(self, cursor: Cursor, old: Key, new: Key, at: datetime | None = None) -> int:
        """Give the row ``old`` the key ``new``, and nothing else but, where given, ``updated_at``."""
        columns = [column for column, _ in self.key]
        assignments = [f"{column} = %s" for column in columns] + (["updated_at = %s"] if at else [])
        statement = (
            f"UPDATE {self.name} SET {', '.join(assignments)} "
            f"WHERE {' AND '.join(f'{column} = %s' for column in columns)}"
        )
        cursor.execute(statement, (*new, *((at,) if at else ()), *old))
        return int(cursor.rowcount)
