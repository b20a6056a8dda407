"""Writes the traffic of a demo database: its view of the database's state, its SQL, and counts of its
changes.

An actor knows which keys are alive and which are deleted. Each statement may change any number of rows and
returns how many it changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import cast

import psycopg2
from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import execute_values


@dataclass(frozen=True)
class WorkloadReport:
    """Committed row changes by kind; reports of parts add up with ``+``.

    ``changes``: the number that logical decoding sends: one for each row inserted, updated or deleted, and
    one for each TRUNCATE. The kinds marked *of which* count only rows that were changed for that purpose;
    ordinary traffic may add more of the same kind.
    """

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    # Of which:
    reinserts: int = 0
    """Inserts of a key that was deleted before."""
    key_changes: int = 0
    """Updates of a primary key, including those of a swap and those with an unsent body."""
    key_changes_with_unsent_body: int = 0
    key_swaps: int = 0
    """Pairs of rows that exchanged their keys, by three updates through a temporary key."""
    updates_with_unsent_body: int = 0
    """Updates that do not touch a long body, stored out of line; without key changes."""
    updates_of_long_body: int = 0
    """Updates that set a body which was or becomes long."""
    updates_to_null: int = 0
    soft_deletes: int = 0
    undeletes: int = 0
    awkward_texts: int = 0
    """Rows that were inserted for their quotes, backslashes, control characters, empty text and so on."""
    transactions: int = 0
    multi_table_transactions: int = 0
    largest_transaction: int = 0
    """Changes of the largest transaction; when reports are added, the larger of the two."""
    rolled_back_transactions: int = 0
    rolled_back_changes: int = 0
    """Row changes in transactions and savepoints that were rolled back; not part of ``changes``."""
    rolled_back_savepoints: int = 0

    @property
    def changes(self) -> int:
        return self.inserts + self.updates + self.deletes + self.truncates

    def __add__(self, other: WorkloadReport) -> WorkloadReport:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums["largest_transaction"] = max(self.largest_transaction, other.largest_transaction)
        return WorkloadReport(**sums)


_ROWS_OF_A_STATEMENT = 1000

Key = tuple[object, ...]
"""A primary key: one value for each key column."""


@dataclass(frozen=True)
class Table:
    """A table with traffic. ``name``: with its schema; plain names, as they stand in SQL.

    ``columns``: those that an insert gives, in order. ``key``: the primary key columns with their types.
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
        """Insert ``rows``, which have the columns of the table; return how many."""
        statement = f"INSERT INTO {self.name} ({', '.join(self.columns)}) VALUES %s"
        for start in range(0, len(rows), _ROWS_OF_A_STATEMENT):
            part = rows[start : start + _ROWS_OF_A_STATEMENT]
            execute_values(cursor, statement, part, page_size=len(part))
        return len(rows)

    def update(self, cursor: Cursor, assignments: str, rows: Sequence[tuple[Key, tuple[object, ...]]]) -> int:
        """Set columns of the rows with the given keys, each to its own values; return how many rows changed.

        ``assignments``: the SET list. ``v1``, ``v2``, … are the values beside each key, with a cast if the
        column is not text: ``"priority = v1::smallint"``.
        """
        if not rows:
            return 0
        values = [f"v{number + 1}" for number in range(len(rows[0][1]))]
        names = ", ".join(self._key_values + values)
        statement = (
            f"UPDATE {self.name} AS t SET {assignments} FROM (VALUES %s) AS v({names}) WHERE {self._same_key}"
        )
        execute_values(cursor, statement, [key + changed for key, changed in rows], page_size=len(rows))
        return int(cursor.rowcount)

    def delete(self, cursor: Cursor, keys: Sequence[Key]) -> int:
        """Delete the rows with the given keys; return how many."""
        if not keys:
            return 0
        names = ", ".join(self._key_values)
        statement = f"DELETE FROM {self.name} AS t USING (VALUES %s) AS v({names}) WHERE {self._same_key}"
        execute_values(cursor, statement, keys, page_size=len(keys))
        return int(cursor.rowcount)

    def change_key(self, cursor: Cursor, old: Key, new: Key, at: datetime | None = None) -> int:
        """Give the row ``old`` the key ``new``. Changes nothing else, except ``updated_at`` if ``at`` is
        given."""
        columns = [column for column, _ in self.key]
        assignments = [f"{column} = %s" for column in columns] + (["updated_at = %s"] if at else [])
        statement = (
            f"UPDATE {self.name} SET {', '.join(assignments)} "
            f"WHERE {' AND '.join(f'{column} = %s' for column in columns)}"
        )
        # No failpoint: the traffic of the demo.
        cursor.execute(statement, (*new, *((at,) if at else ()), *old))
        return int(cursor.rowcount)


SECONDS_BETWEEN_RUNS = 7 * 24 * 3600


class Keys:
    """The keys of one table: those of its rows, and those of rows deleted by this traffic."""

    def __init__(self, live: list[Key]) -> None:
        self.live = live
        self.gone: list[Key] = []
        self._live = set(live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def add(self, keys: Iterable[Key]) -> None:
        """Add the keys of inserted rows."""
        added = list(keys)
        self.live += added
        self._live |= set(added)

    def some(self, rng: random.Random, count: int) -> list[Key]:
        """Return up to ``count`` different live keys."""
        return rng.sample(self.live, min(count, len(self.live)))

    def kill(self, rng: random.Random, count: int) -> list[Key]:
        """Mark up to ``count`` live keys as deleted and return them."""
        chosen = []
        for _ in range(min(count, len(self.live))):
            at = rng.randrange(len(self.live))
            self.live[at], self.live[-1] = self.live[-1], self.live[at]
            chosen.append(self.live.pop())
        self.gone += chosen
        self._live -= set(chosen)
        return chosen

    def kill_those(self, keys: Iterable[Key]) -> None:
        """Mark ``keys``, which are live, as deleted."""
        dead = set(keys)
        self.gone += [key for key in self.live if key in dead]
        self.live = [key for key in self.live if key not in dead]
        self._live -= dead

    def revive(self, count: int) -> list[Key]:
        """Make up to ``count`` deleted keys live again, the oldest first, and return them."""
        waiting = [key for key in dict.fromkeys(self.gone) if key not in self._live]
        back, self.gone = waiting[:count], waiting[count:]
        self.add(back)
        return back

    def rename(self, old: Key, new: Key) -> None:
        self.live[self.live.index(old)] = new
        self._live.discard(old)
        self._live.add(new)

    def begin_anew(self, keys: list[Key]) -> None:
        """Replace all keys: ``keys`` are the live ones, and earlier ones are forgotten."""
        self.live, self._live = keys, set(keys)


class Actor:
    """A connection to a database, with what is needed to make sensible changes to it.

    The random numbers depend on ``seed`` and on ``counter``, a sequence of the database that every run
    advances. So the same seed on the same database gives the same changes, and a second run continues instead
    of repeating the keys of the first.
    """

    def __init__(
        self,
        connection: psycopg2.extensions.connection,
        seed: int,
        tables: Mapping[str, Table],
        counter: str,
    ) -> None:
        self._connection = connection
        self.tables = tables
        self.cursor = connection.cursor()
        self.cursor.execute(f"SELECT last_value FROM {counter}")
        run = cast(int, self.one()[0])
        self.rng = random.Random(f"workload {seed} {run}")  # noqa: S311 (repeatable, not secret)
        self.first_second = run * SECONDS_BETWEEN_RUNS
        self.keys = {name: Keys(self._load(table)) for name, table in tables.items()}
        connection.rollback()
        self.report = WorkloadReport()
        self._open = WorkloadReport()
        self._changed_tables: set[str] = set()

    def _load(self, table: Table) -> list[Key]:
        return self.rows_of(f"SELECT {table.key_columns} FROM {table.name} ORDER BY {table.key_columns}")

    def one(self) -> tuple[object, ...]:
        """Return the next row of the cursor."""
        return cast(tuple[object, ...], self.cursor.fetchone())

    def rows_of(self, query: str, parameters: Sequence[object] = ()) -> list[Key]:
        """Return every row that ``query`` finds."""
        # No failpoint: the traffic of the demo, a client of its source.
        self.cursor.execute(query, parameters)
        return [tuple(row) for row in self.cursor.fetchall()]

    # Transactions. A rollback does not restore the keys, so a block that is rolled back must not change them.

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of the block, and count them."""
        yield
        self._connection.commit()
        done = self._open
        several = len(self._changed_tables) > 1
        self.report += replace(
            done,
            transactions=1,
            multi_table_transactions=int(several),
            largest_transaction=done.changes,
        )
        self._open, self._changed_tables = WorkloadReport(), set()

    @contextmanager
    def rolled_back_transaction(self) -> Iterator[None]:
        """Roll back the changes of the block."""
        yield
        self._connection.rollback()
        self.report += WorkloadReport(rolled_back_transactions=1, rolled_back_changes=self._open.changes)
        self._open, self._changed_tables = WorkloadReport(), set()

    @contextmanager
    def rolled_back_savepoint(self) -> Iterator[None]:
        """Roll back the changes of the block, and continue the transaction around it."""
        before, tables = self._open, set(self._changed_tables)
        self.cursor.execute("SAVEPOINT regret")
        yield
        self.cursor.execute("ROLLBACK TO SAVEPOINT regret")
        undone = self._open.changes - before.changes
        self._open = before + WorkloadReport(rolled_back_savepoints=1, rolled_back_changes=undone)
        self._changed_tables = tables

    @property
    def done(self) -> int:
        """Number of changes so far, including those of the open transaction."""
        return self.report.changes + self._open.changes

    def record(self, report: WorkloadReport) -> None:
        """Count kinds of changes, in addition to the row counts that the methods below keep."""
        self._open += report

    # Changes, counted.

    def insert(self, table: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._changed(table, WorkloadReport(inserts=self.tables[table].insert(self.cursor, rows)))

    def update(self, table: str, assignments: str, rows: Sequence[tuple[Key, tuple[object, ...]]]) -> int:
        count = self.tables[table].update(self.cursor, assignments, rows)
        self._changed(table, WorkloadReport(updates=count))
        return count

    def delete(self, table: str, keys: Sequence[Key]) -> None:
        self._changed(table, WorkloadReport(deletes=self.tables[table].delete(self.cursor, keys)))

    def truncate(self, table: str) -> None:
        # No failpoint: the traffic of the demo, a client of its source.
        self.cursor.execute(f"TRUNCATE {self.tables[table].name}")
        self._changed(table, WorkloadReport(truncates=1))

    def change_key(self, table: str, old: Key, new: Key, at: datetime | None = None) -> None:
        """Give a row a new key. Changes nothing else, except ``updated_at`` if ``at`` is given."""
        count = self.tables[table].change_key(self.cursor, old, new, at)
        self._changed(table, WorkloadReport(updates=count, key_changes=count))

    def _changed(self, table: str, report: WorkloadReport) -> None:
        if report.changes:
            self._changed_tables.add(table)
        self._open += report
