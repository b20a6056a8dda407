"""A table of a PostgreSQL that is changed by drawn ALTERs in the middle of a drawn workload.

What the server was told, and what it said each row was then, is kept as events of the oracle: so nothing here
knows what a contract, a stream or a lake makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position

KEY, CHANGED = "id", "changed"
"""The key, and the time of a row's change, which is its cursor: no change is about them."""

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MOODS = ("ok", "so")

INTEGER, BIGINT, SMALLINT, BOOLEAN, TEXT = "integer", "bigint", "smallint", "boolean", "text"
SHORT, LONG, MONEY, MORE_MONEY = "varchar(12)", "varchar(20)", "numeric(6,2)", "numeric(10,2)"

CHANGES = (
    "added",
    "added with a default",
    "added with a default by row",
    "dropped",
    "renamed",
    "dropped and added again",
    "nullable changed",
    "widened",
    "widened a text",
    "widened a number",
    "narrowed",
    "cut",
    "retyped",
    "retyped by words",
    "enum value added",
)
"""The kinds of ALTERs that are drawn."""

Run = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
"""Runs a statement in a transaction of its own, and returns its rows."""


@dataclass
class Column:
    """A column as the table has it.

    ``constant``: alone in a tuple, the text that rows have in it which are older than the column, or NULL;
    None: no constant says so, or the server has made other values of it.
    """

    kind: str
    nullable: bool = True
    constant: tuple[str | None] | None = None


@dataclass
class Altered:
    """A table, which ``run`` makes and changes.

    ``columns``: as they are now, without the key. ``moods``: the values of its enum. ``events``: what was
    written, each row as the server had it then. ``told``: each ALTER. ``with_cursor``: it has a column more,
    with the time of each change.
    """

    name: str
    rng: Random
    run: Run
    columns: dict[str, Column] = field(default_factory=dict)
    moods: list[str] = field(default_factory=lambda: [*MOODS])
    events: list[Event] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    with_cursor: bool = False
    _alive: list[int] = field(default_factory=list)
    _numbers: int = 0
    _values: int = 10

    @property
    def defaults(self) -> dict[str, str | None]:
        """By column, what a contract may say of rows that are older than it."""
        return {name: each.constant[0] for name, each in self.columns.items() if each.constant is not None}

    def make(self) -> None:
        """Make the table, with some rows of which no log tells."""
        mood = f"mood_of_{self.name}"
        self.columns = {
            "v": Column(TEXT, nullable=False),
            "n": Column(INTEGER),
            "m": Column(mood),
            "s": Column(SHORT),
            "p": Column(MONEY),
        }
        self.run(f"CREATE TYPE {mood} AS ENUM ('ok', 'so')", ())
        columns = ", ".join(
            f'"{name}" {each.kind}{"" if each.nullable else " NOT NULL"}'
            for name, each in self.columns.items()
        )
        self.run(f"CREATE TABLE {self.name} ({KEY} integer PRIMARY KEY, {columns})", ())
        if self.with_cursor:
            cursor = f"{CHANGED} timestamptz NOT NULL DEFAULT clock_timestamp()"
            self.run(f"ALTER TABLE {self.name} ADD {cursor}", ())
            self.run(f"CREATE INDEX ON {self.name} ({CHANGED}, {KEY})", ())
        for _ in range(3):
            self._insert()
        self.run(f"ANALYZE {self.name}", ())
        self.events = []

    def write(self, statements: int) -> None:
        """Insert, update and delete some rows."""
        for _ in range(statements):
            chance = self.rng.random()
            if chance < 0.45 or len(self._alive) < 2:
                self._insert()
            elif chance < 0.9:
                self._update(self.rng.choice(self._alive))
            else:
                number = self._alive.pop(self.rng.randrange(len(self._alive)))
                self.run(f"DELETE FROM {self.name} WHERE {KEY} = %s", (number,))
                self._keep("d", number, None)

    def read(self) -> None:
        """The whole table is read: what is older ends, and each row is there as it is now."""
        rows = self.rows()
        self._keep("b", None, None)
        for key, image in rows.items():
            self._keep("r", int(key[0]), image)

    def rows(self) -> dict[Key, Image]:
        """What the server holds."""
        found = self.run(f"SELECT {KEY}, {self._texts()} FROM {self.name} ORDER BY {KEY}", ())
        return {(str(number),): dict(zip(self.columns, texts, strict=True)) for number, *texts in found}

    def alter(self) -> str:
        """Change the table by lot, and write what only the changed table takes; the kind of the change."""
        kinds = [*self._kinds()]
        kind, change = self.rng.choice(kinds)
        change()
        return kind

    def _kinds(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "added", self._add
        yield "added with a default", self._add_with_default
        yield "added with a default by row", self._add_by_row
        if (name := self._any(lambda each: each.nullable and each.kind != TEXT)) is not None:
            yield "dropped", lambda: self._drop(name)
        if (other := self._any(lambda each: each.nullable)) is not None:
            yield "renamed", lambda: self._rename(other)
            yield "dropped and added again", lambda: self._add_again(other)
        yield "nullable changed", self._change_null
        if (whole := self._any(lambda each: each.kind == INTEGER)) is not None:
            yield "widened", lambda: self._retype(whole, BIGINT, then="5000000000")
            yield "narrowed", lambda: self._retype(whole, SMALLINT, then="7")
            yield "retyped by words", lambda: self._retype(whole, BOOLEAN, f'"{whole}" > 15', then="true")
            yield "retyped", lambda: self._retype(whole, TEXT, then="forty")
        if (short := self._any(lambda each: each.kind == SHORT)) is not None:
            yield "widened a text", lambda: self._retype(short, LONG, then="longer than before")
            yield "cut", lambda: self._retype(short, "varchar(2)", f'left("{short}", 2)', then="ab")
        if (money := self._any(lambda each: each.kind == MONEY)) is not None:
            yield "widened a number", lambda: self._retype(money, MORE_MONEY, then="77.70")
        if "m" in self.columns:
            yield "enum value added", self._add_mood

    def _any(self, fits: Callable[[Column], bool]) -> str | None:
        # ``v`` stays, so that a row always has something that no change is about.
        names = [name for name, each in self.columns.items() if fits(each) and name != "v"]
        return self.rng.choice(names) if names else None

    def _new_name(self) -> str:
        self._numbers += 1
        return f"c{self._numbers}"

    def _alter(self, change: str) -> None:
        self.told.append(change)
        self.run(f"ALTER TABLE {self.name} {change}", ())

    def _add(self) -> None:
        name, kind = self._new_name(), self.rng.choice((INTEGER, TEXT, SHORT))
        self._alter(f"ADD {name} {kind}")
        self.columns[name] = Column(kind, constant=(None,))

    def _add_with_default(self) -> None:
        name = self._new_name()
        kind, constant = self.rng.choice(((INTEGER, "7"), (TEXT, "low"), (SHORT, "none yet")))
        self._alter(f"ADD {name} {kind} DEFAULT '{constant}'")
        self.columns[name] = Column(kind, constant=(constant,))

    def _add_by_row(self) -> None:
        name = self._new_name()
        self._alter(f"ADD {name} text DEFAULT md5(random()::text)")
        self.columns[name] = Column(TEXT)

    def _drop(self, name: str) -> None:
        self._alter(f'DROP "{name}"')
        del self.columns[name]

    def _rename(self, name: str) -> None:
        new = self._new_name()
        self._alter(f'RENAME "{name}" TO {new}')
        # In the server's order of columns it stays where it was.
        self.columns = {
            new if each == name else each: replace(column, constant=None) if each == name else column
            for each, column in self.columns.items()
        }

    def _add_again(self, name: str) -> None:
        column = self.columns.pop(name)
        self._alter(f'DROP "{name}", ADD "{name}" {column.kind}')
        self.columns[name] = Column(column.kind)

    def _change_null(self) -> None:
        nullable = not self.columns["v"].nullable
        if nullable:
            self._alter("ALTER v DROP NOT NULL")
        else:
            for (number,) in self.run(f"DELETE FROM {self.name} WHERE v IS NULL RETURNING {KEY}", ()):
                self._alive.remove(number)
                self._keep("d", number, None)
            self._alter("ALTER v SET NOT NULL")
        self.columns["v"].nullable = nullable
        self._insert({"v": None} if nullable else None)

    def _retype(self, name: str, kind: str, using: str | None = None, *, then: str) -> None:
        # A default that the server cannot convert forbids the change.
        default = f'ALTER "{name}" DROP DEFAULT, ' if using else ""
        self._alter(f'{default}ALTER "{name}" TYPE {kind}' + (f" USING {using}" if using else ""))
        kept = self.columns[name].constant if kind in (BIGINT, SMALLINT, LONG, MORE_MONEY) else None
        self.columns[name] = replace(self.columns[name], kind=kind, constant=kept)
        self._insert({name: then})

    def _add_mood(self) -> None:
        mood = f"mood_{len(self.moods)}"
        self.told.append(f"TYPE ADD VALUE {mood}")
        self.run(f"ALTER TYPE mood_of_{self.name} ADD VALUE '{mood}'", ())
        self.moods.append(mood)
        self._insert({"m": mood})

    def _insert(self, given: Mapping[str, str | None] | None = None) -> None:
        number = 1 + max((int(each.key[0]) for each in self.events if each.key), default=0)
        number = max(number, 1 + max(self._alive, default=0))
        row = {name: self._value(name, each) for name, each in self.columns.items()} | dict(given or {})
        names = ", ".join(f'"{name}"' for name in row)
        values = ", ".join(f"CAST(%s AS {self.columns[name].kind})" for name in row)
        sql = f"INSERT INTO {self.name} ({KEY}, {names}) VALUES (%s, {values}) RETURNING {self._texts()}"
        ((*texts,),) = self.run(sql, (number, *row.values()))
        self._alive.append(number)
        self._keep("c", number, dict(zip(self.columns, texts, strict=True)))

    def _update(self, number: int) -> None:
        names = self.rng.sample([*self.columns], self.rng.randint(0, min(2, len(self.columns))))
        anew = [f'"{name}" = CAST(%s AS {self.columns[name].kind})' for name in names]
        anew += [f"{CHANGED} = clock_timestamp()"] if self.with_cursor else []
        # Without a name it changes nothing, and is an update all the same.
        sets = ", ".join(anew) or '"v" = "v"'
        values = tuple(self._value(name, self.columns[name]) for name in names)
        sql = f"UPDATE {self.name} SET {sets} WHERE {KEY} = %s RETURNING {self._texts()}"
        ((*texts,),) = self.run(sql, (*values, number))
        self._keep("u", number, dict(zip(self.columns, texts, strict=True)))

    def _value(self, name: str, column: Column) -> str | None:
        self._values += 1
        if column.nullable and self.rng.random() < 0.15:
            return None
        if column.kind.startswith("mood"):
            return self.rng.choice(self.moods)
        if column.kind == BOOLEAN:
            return self.rng.choice(("true", "false"))
        if column.kind.startswith("numeric"):
            return f"{self._values}.50"
        if column.kind in (INTEGER, BIGINT, SMALLINT):
            return str(self._values)
        return f"{name} {self._values}"[: 2 if column.kind == "varchar(2)" else 12]

    def _texts(self) -> str:
        """Each column as text. Of booleans the log has the first letter alone."""
        return ", ".join(f'"{name}"::text' for name in self.columns)

    def _keep(self, op: str, number: int | None, image: Image | None) -> None:
        at = Position(1, 10 + len(self.events), 0)
        key = None if number is None else (str(number),)
        self.events.append(Event(at, op, self.name, key, NOON, after=image))
