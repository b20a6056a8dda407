"""A seeded random workload: sessions whose transactions overlap, over every table.

What is done follows from the seed alone; the sessions take turns in one thread, and no two of them ever
touch the same row, so none waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from parity.random_tables import ALONE, KEYS, TABLES, Drawn
from parity.server import Server
from parity.tables import SCHEMA

SESSIONS = 2
TRANSACTIONS = 14
"""Transactions that each session of a seed begins."""

Rows = dict[str, set[int]]
"""Table → the numbers of the keys that live."""


@dataclass
class _Session:
    """One connection, and what it knows of its own rows."""

    connection: Connection
    lane: int
    tables: tuple[Drawn, ...]
    random: Random
    alone: bool
    live: Rows = field(default_factory=dict)

    def transactions(self) -> Iterator[None]:
        """Does its work, and gives way after every statement."""
        for _ in range(TRANSACTIONS):
            yield from self._transaction()

    def _transaction(self) -> Iterator[None]:
        before, explicit = deepcopy(self.live), self.random.random() < 0.75
        if not explicit:
            self._change()
            yield
            return
        self._run("BEGIN")
        saved: Rows | None = None
        for _ in range(self.random.choice((0, 1, 2, 3, 5, 8, 20))):
            what = self.random.random()
            if what < 0.06:
                self._run("SAVEPOINT a")
                saved = deepcopy(self.live)
            elif what < 0.10 and saved is not None:
                self._run("ROLLBACK TO a")
                self.live = deepcopy(saved)
            elif what < 0.13:
                self._run(
                    "SELECT pg_logical_emit_message(%s, 'app', %s)",
                    self.random.random() < 0.8,
                    str(self.random.random()),
                )
            else:
                self._change()
            yield
        if self.random.random() < 0.12:
            self._run("ROLLBACK")
            self.live = before
        else:
            self._run("COMMIT")
        yield

    def _change(self) -> None:
        if self.alone and self.random.random() < 0.05:
            self._alter_or_empty()
            return
        table = self.random.choice(self.tables)
        live = self.live.setdefault(table.name, set())
        absent = sorted(set(range(KEYS)) - live)
        what = self.random.random()
        if not live or (absent and what < 0.35):
            self._insert(table, self.random.choice(absent))
        elif what < 0.75:
            self._update(table, self.random.choice(sorted(live)))
        elif what < 0.87 and absent:
            self._move(table, self.random.choice(sorted(live)), self.random.choice(absent))
        else:
            self._delete(table, self.random.choice(sorted(live)))

    def _insert(self, table: Drawn, number: int) -> None:
        names = [*table.key, *table.columns]
        values = [*table.key_of(self.lane, number), *(self._value(table, each) for each in table.columns)]
        self._run(
            sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                _name(table), _names(names), sql.SQL(", ").join([sql.Placeholder()] * len(names))
            ),
            *values,
        )
        self.live[table.name].add(number)

    def _update(self, table: Drawn, number: int) -> None:
        chosen = [name for name in table.columns if self.random.random() < 0.5] or [next(iter(table.columns))]
        # Now and then nothing changes, which is an event all the same.
        if self.random.random() < 0.1:
            same = sql.SQL("{0} = {0}").format(sql.Identifier(chosen[0]))
            self._run(
                _where(table, sql.SQL("UPDATE {} SET {}").format(_name(table), same)),
                *self._key(table, number),
            )
            return
        values = [self._value(table, name) for name in chosen]
        self._run(_where(table, _update_of(table, chosen)), *values, *self._key(table, number))

    def _move(self, table: Drawn, number: int, to: int) -> None:
        names = [*table.key, *(name for name in table.columns if self.random.random() < 0.2)]
        new = [*table.key_of(self.lane, to), *(self._value(table, name) for name in names[len(table.key) :])]
        self._run(_where(table, _update_of(table, names)), *new, *self._key(table, number))
        self.live[table.name] = self.live[table.name] - {number} | {to}

    def _delete(self, table: Drawn, number: int) -> None:
        self._run(_where(table, sql.SQL("DELETE FROM {}").format(_name(table))), *self._key(table, number))
        self.live[table.name].discard(number)

    def _alter_or_empty(self) -> None:
        if self.random.random() < 0.5:
            self._run("TRUNCATE emptied")
            self.live["emptied"] = set()
        elif self.random.random() < 0.5:
            self._run("ALTER TABLE evolving ADD COLUMN IF NOT EXISTS extra text DEFAULT 'x'")
        else:
            self._run("ALTER TABLE evolving DROP COLUMN IF EXISTS extra")

    def _value(self, table: Drawn, column: str) -> str | None:
        if column not in table.never_null and self.random.random() < 0.2:
            return None
        return table.columns[column](self.random)

    def _key(self, table: Drawn, number: int) -> tuple[str, ...]:
        return table.key_of(self.lane, number)

    def _run(self, statement: str | sql.Composable, *values: object) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)


def run(server: Server, seed: int) -> None:
    """Do what ``seed`` says."""
    random = Random(seed)  # noqa: S311
    with ExitStack() as stack:
        turns = []
        for number in range(SESSIONS):
            connection = stack.enter_context(closing(server.connect()))
            with connection.cursor() as cursor:
                cursor.execute(f"SET search_path = {SCHEMA}")
            alone = number == 0
            session = _Session(
                connection,
                seed * SESSIONS + number,
                TABLES + (ALONE if alone else ()),
                Random(random.getrandbits(64)),  # noqa: S311
                alone,
            )
            turns.append(session.transactions())
        while turns:
            turn = random.choice(turns)
            if next(turn, turns) is turns:
                turns.remove(turn)


def _name(table: Drawn) -> sql.Identifier:
    return sql.Identifier(table.name)


def _names(names: list[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _update_of(table: Drawn, columns: list[str]) -> sql.Composed:
    return sql.SQL("UPDATE {} SET {}").format(
        _name(table), sql.SQL(", ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in columns)
    )


def _where(table: Drawn, statement: sql.Composable) -> sql.Composed:
    wanted = sql.SQL(" AND ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in table.key)
    return sql.Composed([statement, sql.SQL(" WHERE "), wanted])
