"""Reads any database that SQLAlchemy supports by a cursor; values become the text that PostgreSQL would
write.

The statements use no row values and no functions, so every dialect supports them. SQLite is tested; for other
databases we rely on SQLAlchemy. Rows are handled one by one, so this is slower than ``postgres``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.named_secrets import NamedSecret
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.landing.schema_changes import SeenTable
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.query.cursor import (
    HIGHEST,
    CursorColumn,
    CursorKind,
    KeysetPosition,
    micros_of,
)
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.reader import KeyBounds, Moment, Rows, Span
from omnisupport_ingest.sources.query.reflected import is_loose, pg_type_of, refusals, unique_keys
from omnisupport_ingest.sources.shown_columns import NOT_INSPECTED, ShownColumn, live_schema, schema_by_name
from omnisupport_ingest.sources.value_text import value_text

_BLOCK_ROWS = 10_000
_KEYS_AT_ONCE = 500
_OVERHEAD = 100


class DialectReader:
    """A ``Reader`` of the database at a SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        """Connects at the first reading. Raises ``QueryRefused`` for a URL that names no installed
        dialect."""
        self._named = f"the connection string ({url.place})" if isinstance(url, NamedSecret) else "the URL"
        try:
            self._engine = sa.create_engine(url, poolclass=sa.NullPool, hide_parameters=True)
        except ModuleNotFoundError as error:
            raise QueryRefused(
                f"The driver of {self._named} is not installed: Python has no module {error.name}.",
                fix="Install the package that has it, in the environment of this program.",
            ) from None
        except sa.exc.ArgumentError as error:
            # The text of the error may repeat the URL, which may contain a password.
            raise QueryRefused(
                f"The text of {self._named} is no URL that SQLAlchemy can open: {type(error).__name__}.",
                fix="Write it as dialect+driver://user@host/database, of a dialect that is installed.",
            ) from None
        self.lite = self._engine.dialect.name == "sqlite"
        """Whether the database is SQLite."""
        if self.lite:
            # Otherwise the driver begins a transaction only before a change (SQLAlchemy manual, "pysqlite").
            sa.event.listen(self._engine, "connect", _driver_begins_nothing)
            sa.event.listen(self._engine, "begin", _begin)
        self._connection: sa.Connection | None = None

    def inspect(self) -> sa.Inspector:
        """Return the inspector of the database's tables, in the open transaction."""
        return sa.inspect(self._open)

    def begin(self) -> Moment:
        clock = datetime.now(UTC)
        file = self._engine.url.database
        if self.lite and file and not file.startswith((":memory:", "file:")) and not Path(file).exists():
            # The driver would create an empty database.
            raise QueryRefused(
                f"There is no database file at {Path(file).absolute()}.",
                fix=f"Correct the path after sqlite:/// in {self._named}.",
            )
        with refusals(f"the database of {self._named}", connecting=True):
            self._connection = self._engine.connect()
            if not self.lite:
                self._connection = self._connection.execution_options(isolation_level="REPEATABLE READ")
            self._connection.begin()
        return Moment(clock, None)

    def cursor_type(self, table: TableContract, cursor: CursorColumn, /) -> str:
        with refusals(table.full_name):
            columns = sa.inspect(self._open).get_columns(table.table, schema=table.schema)
        for column in columns:
            if column["name"] == cursor.name:
                self._require_kind(table, cursor, column["type"])
                return str(column["type"])
        raise QueryRefused(
            f"{table.full_name} has no column {cursor.name!r}, which {table.path} names as its cursor.",
            fix="Correct the contract, or give the column back.",
        )

    def schemas(
        self, tables: Sequence[TableContract], known: Mapping[str, SeenTable], /
    ) -> dict[str, LiveSchema] | None:
        found = {}
        inspector = sa.inspect(self._open)
        for table in tables:
            was = known.get(table.name)
            try:
                with refusals(table.full_name), suppress(sa.exc.NoSuchTableError):
                    columns = [
                        ShownColumn(each["name"], pg_type_of(each["type"]), not each.get("nullable", True))
                        for each in inspector.get_columns(table.table, schema=table.schema)
                    ]
                    shown = schema_by_name(table, columns, was)
                    keys = unique_keys(inspector, (table.table, table.schema))
                    shown.seen = replace(shown.seen, key=keys[0].columns if keys else ())
                    shown.live = replace(shown.live, unique=keys)
                    found[table.name] = shown
            except QueryRefused:
                # A table that cannot be inspected is refused when it is read; the tables before it are still
                # read.
                if was is not None:
                    shown = live_schema(table, was)
                    shown.live = replace(shown.live, kind=NOT_INSPECTED)
                    found[table.name] = shown
        return found

    def go_on_without(self, _table: TableContract, _columns: frozenset[str], /) -> None:
        # A row has the columns that the table has.
        pass

    def loose_columns(self, table: TableContract, /) -> frozenset[str]:
        if not self.lite:
            return frozenset()
        with refusals(table.full_name):
            columns = sa.inspect(self._open).get_columns(table.table, schema=table.schema)
        return frozenset(each["name"] for each in columns if is_loose(each["type"]))

    def columns(self, table: TableContract, /) -> str:
        with refusals(table.full_name):
            columns = sa.inspect(self._open).get_columns(table.table, schema=table.schema)
        # The contract's type decides in which form a value is written.
        kinds = {each.name: each.type.kind.name for each in table.source_columns}
        found = [(each["name"], repr(each["type"]), kinds.get(each["name"])) for each in columns]
        return json.dumps(found, ensure_ascii=False)

    def indexes(self, table: TableContract, /) -> tuple[tuple[str, ...], ...]:
        with refusals(table.full_name):
            found = sa.inspect(self._open).get_indexes(table.table, schema=table.schema)
        return tuple(tuple(str(name) for name in each["column_names"]) for each in found)

    def index_sql(self, table: TableContract, name: str, columns: Sequence[str], /) -> str:
        listed: list[sa.Column[Any]] = [sa.Column(each) for each in columns]
        of = sa.Table(table.table, sa.MetaData(), *listed, schema=table.schema)
        index = sa.Index(name, *of.columns)
        return f"{sa.schema.CreateIndex(index).compile(dialect=self._engine.dialect)};"

    def not_null_fix(self, table: TableContract, column: str, /) -> str:
        return f"Make {column} of {table.full_name} NOT NULL;"

    def newest(self, table: TableContract, cursor: CursorColumn, /) -> str | None:
        column: sa.ColumnClause[Any] = sa.column(cursor.name)
        with refusals(table.full_name):
            found = self._open.execute(sa.select(sa.func.max(column)).select_from(_table(table))).scalar()
        return None if found is None else self._raw(found)

    def rows(
        self, table: TableContract, cursor: CursorColumn, span: Span, take: Callable[[Rows], None], /
    ) -> int:
        return self._take(table, cursor, self._page(table, cursor, span), take)

    def _take(
        self, table: TableContract, cursor: CursorColumn, query: sa.Select[Any], take: Callable[[Rows], None]
    ) -> int:
        count = 0
        with refusals(table.full_name):
            # No failpoint: a SELECT, put together elsewhere.
            found = self._open.execution_options(yield_per=_BLOCK_ROWS).execute(query)
            names = list(found.keys())
            for missing in sorted(cursor.needs(table).difference(names)):
                raise QueryRefused(
                    f"{table.full_name} has no column {missing!r}, by which {table.path} has it read.",
                    fix="Correct the contract, or give the column back.",
                )
            writes = [_writer(table, name) for name in names]
            for block in found.partitions(_BLOCK_ROWS):
                take(self._rows(table, cursor, names, writes, block))
                count += len(block)
        return count

    def key_checksum(self, _table: TableContract, _bounds: KeyBounds, /) -> RowChecksum | None:
        # Standard SQL has no hash function, so the keys are read.
        return None

    def keys(self, table: TableContract, bounds: KeyBounds, /) -> Iterator[list[str]]:
        order = [self._in_order(table, name) for name in table.key]
        columns: list[sa.ColumnClause[Any]] = [sa.column(name) for name in table.key]
        query: sa.Select[Any] = sa.select(*columns).select_from(_table(table))
        for bound, after in ((bounds.start, True), (bounds.end, False)):
            if bound is not None:
                places = zip(table.key, bound, strict=True)
                behind = _behind(order, [_key_value(table, name, text) for name, text in places])
                query = query.where(behind if after else sa.not_(behind))
        writes = [_writer(table, name) for name in table.key]
        with refusals(table.full_name):
            # No failpoint: a SELECT, put together elsewhere.
            found = self._open.execution_options(yield_per=_BLOCK_ROWS).execute(query)
            for block in found.partitions(_BLOCK_ROWS):
                rows = ([write(value) for write, value in zip(writes, row, strict=True)] for row in block)
                yield [row_key(row) for row in rows]

    def rows_of(
        self, table: TableContract, cursor: CursorColumn, keys: Sequence[str], take: Callable[[Rows], None], /
    ) -> None:
        columns: list[sa.ColumnClause[Any]] = [sa.column(name) for name in table.key]
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            conditions = []
            for key in keys[start : start + _KEYS_AT_ONCE]:
                parts = zip(columns, table.key, json.loads(key), strict=True)
                equal = (column == _key_value(table, name, text) for column, name, text in parts)
                conditions.append(sa.and_(*equal))
            query = sa.select(sa.text("*")).select_from(_table(table)).where(sa.or_(*conditions))
            self._take(table, cursor, query, take)

    def step_over(self) -> None:
        # The table is refused because of its own schema or values, and the transaction continues.
        pass

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.end()
        self._engine.dispose()

    @property
    def _open(self) -> sa.Connection:
        assert self._connection is not None, "begin was not called"
        return self._connection

    def _page(self, table: TableContract, cursor: CursorColumn, span: Span) -> sa.Select[Any]:
        column: sa.ColumnClause[Any] = sa.column(cursor.name)
        key: list[sa.ColumnClause[Any]] = [sa.column(name) for name in table.key]
        order = key if span.nulls else [column, *key]
        query = sa.select(sa.text("*")).select_from(_table(table))
        query = query.where(column.is_(None) if span.nulls else column.is_not(None))
        if not span.nulls and span.low is not None:
            query = query.where(column >= self._value(cursor, self._low(cursor, span.low)))
        if not span.nulls and span.high is not None:
            query = query.where(column <= self._value(cursor, span.high))
        if span.after is not None:
            values = [
                _key_value(table, name, text) for name, text in zip(table.key, span.after.key, strict=True)
            ]
            if not span.nulls:
                values.insert(0, self._value(cursor, span.after.cursor or ""))
                query = query.where(column >= values[0])
            query = query.where(_behind(order, values))
        return query.order_by(*order).limit(span.limit)

    def _rows(
        self,
        table: TableContract,
        cursor: CursorColumn,
        names: list[str],
        writes: list[Callable[[Any], str | None]],
        block: Sequence[Sequence[Any]],
    ) -> Rows:
        texts = [[write(value) for write, value in zip(writes, row, strict=True)] for row in block]
        key = [names.index(name) for name in table.key]
        at = names.index(cursor.name)
        images = [row_image(tuple(names), row) for row in texts]
        cursors = self._numbers(table, cursor, [row[at] for row in block], [row[at] for row in texts])
        times = pa.nulls(len(texts), pa.int64())
        if cursor.event_time is not None:
            event_time = names.index(cursor.event_time)
            times = micros_of(pa.array([row[event_time] for row in texts], pa.string()))
        last = block[-1]
        return Rows(
            pa.array([row_key([row[each] for each in key]) for row in texts], pa.string()),
            pa.array(images, pa.string()),
            cursors,
            times,
            KeysetPosition(
                None if last[at] is None else self._raw(last[at]),
                tuple(str(texts[-1][each]) for each in key),
            ),
            sum(map(len, images)) + _OVERHEAD * len(texts),
        )

    def _require_kind(
        self, table: TableContract, cursor: CursorColumn, declared: sa.types.TypeEngine[Any]
    ) -> None:
        """Raise ``QueryRefused`` if the cursor column, whose declared type is ``declared``, has another kind
        than in the contract.

        SQLite allows any value in any column, ordered as NULL, numbers, texts, other bytes. So if the lowest
        and the highest value are of one class, all values between them are.
        """
        kind = None if self.lite else _declared_kind(declared)
        if kind is not None and kind is not cursor.kind:
            raise QueryRefused(
                f"The cursor column {cursor.name} of {table.full_name} is declared as {declared}, and "
                f"{table.path} says {cursor.pg_type}: its values have another order.",
                fix=_AS_NUMBER.format(cursor.name)
                if kind is CursorKind.NUMBER
                else _AS_TIME.format(cursor.name),
            )
        if not self.lite:
            return
        column: sa.ColumnClause[Any] = sa.column(cursor.name)
        # Each query alone reads the first or last entry of an index.
        ends = (sa.select(of(column)).select_from(_table(table)) for of in (sa.func.min, sa.func.max))
        with refusals(table.full_name):
            # No failpoint: SELECTs, put together above.
            found = [self._open.execute(query).scalar() for query in ends]
        values = [each for each in found if each is not None]
        self._numbers(table, cursor, values, [str(each) for each in values])

    def _numbers(
        self, table: TableContract, cursor: CursorColumn, values: Sequence[Any], texts: list[str | None]
    ) -> pa.Int64Array:
        """Return the cursors in ``values`` as numbers. ``texts``: as PostgreSQL would write them.

        Raises ``QueryRefused`` if one is of another kind than the contract says.
        """
        numbers = None
        with suppress(QueryRefused):
            numbers = cursor.numbers(pa.array(texts, pa.string()))
        fits = numbers is not None and numbers.null_count == sum(each is None for each in texts)
        if fits and self.lite:
            fits = all(each is None or _is_stored_as(cursor.kind, each) for each in values)
        if fits:
            return numbers
        what = "whole number of at most 57 bits"
        if cursor.kind is CursorKind.TIME:
            what = "ISO text of a time" if self.lite else "time"
        counts = cursor.kind is CursorKind.TIME and any(isinstance(each, int) for each in values)
        hint = f" {_AS_NUMBER.format(cursor.name)}" if counts else ""
        raise QueryRefused(
            f"The cursor column {cursor.name} of {table.full_name} has a value that is no {what}, and "
            f"{table.path} says {cursor.pg_type}: in the order of such values rows would be missed.",
            fix=f"{self._find(table, cursor)} Then correct these rows at the source, or name another column "
            f"as x-cdc.cursor.field of the contract.{hint}",
        )

    def _find(self, table: TableContract, cursor: CursorColumn) -> str:
        """Return how to find rows whose cursor is of another kind."""
        names = self._engine.dialect.identifier_preparer
        name, key = names.quote(cursor.name), ", ".join(map(names.quote, table.key))
        of = f"{names.quote(table.schema)}.{names.quote(table.table)}"
        if not self.lite:
            return f"Look at the values: SELECT {key}, {name} FROM {of} ORDER BY {name};"
        wrong = f"typeof({name}) <> 'integer' OR abs({name}) > {HIGHEST}"
        if cursor.kind is CursorKind.TIME:
            day = f"substr({name}, 1, 10)"
            wrong = f"typeof({name}) <> 'text' OR datetime({name}) IS NULL OR date({day}) IS NOT {day}"
        return f"Find the rows: SELECT {key} FROM {of} WHERE {name} IS NOT NULL AND ({wrong});"

    def _in_order(self, table: TableContract, name: str) -> sa.ColumnElement[Any]:
        """Return a key column for comparison in the order of ``KeyBounds``. Raises ``QueryRefused`` if that
        is impossible."""
        column: sa.ColumnClause[Any] = sa.column(name)
        if table.column(name).type.kind in INTEGERS:
            return column
        if not self.lite:
            raise QueryRefused(
                f"The keys of {table.full_name} are no whole numbers, and in which order this database has "
                "its texts is not known.",
                fix="Let the source mark deleted rows (x-cdc.events.soft_delete_column).",
            )
        return sa.collate(column, "BINARY")

    def _raw(self, value: Any) -> str:
        """Return a cursor as the state stores it: SQLite compares texts, so a text stays unchanged."""
        return value if isinstance(value, str) else str(value)

    def _low(self, cursor: CursorColumn, text: str) -> str:
        """Return a lower bound that is not above any text of the same second, whatever its precision."""
        return text[:19] if self.lite and cursor.kind is CursorKind.TIME else text

    def _value(self, cursor: CursorColumn, text: str) -> Any:
        if cursor.kind is CursorKind.NUMBER:
            return int(text)
        return text if self.lite else datetime.fromisoformat(text)


_AS_NUMBER = (
    'If it counts seconds since 1970, give {} "type": "integer" and "x-pg-type": "bigint" in the contract, '
    "and name a column of times as x-cdc.cursor.event_time. Else name another column as x-cdc.cursor.field."
)
_AS_TIME = "Correct x-pg-type of {} in the contract, or name another column as x-cdc.cursor.field."

_DAY = re.compile(r"\d{4}-\d\d-\d\d")


def _declared_kind(declared: sa.types.TypeEngine[Any]) -> CursorKind | None:
    """Return the kind of values of a column with the declared type ``declared``; None if it may have any."""
    if isinstance(declared, sa.DateTime | sa.Date):
        return CursorKind.TIME
    if isinstance(declared, sa.Integer | sa.Float | sa.Numeric):
        return CursorKind.NUMBER
    return None


def _is_stored_as(kind: CursorKind, value: Any) -> bool:
    """Whether SQLite stores ``value`` in the class and form that the order of cursors needs."""
    if kind is CursorKind.NUMBER:
        return isinstance(value, int)
    return isinstance(value, str) and _DAY.match(value) is not None


def _behind(order: Sequence[sa.ColumnElement[Any]], values: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a row comes after ``values`` in ``order``, column by column."""
    value = values[0]
    first: sa.ColumnElement[Any] = order[0]
    found: sa.ColumnElement[bool] = first > value
    if len(order) == 1:
        return found
    return sa.or_(found, sa.and_(first == value, _behind(order[1:], values[1:])))


def _table(table: TableContract) -> sa.TableClause:
    return sa.table(table.table, schema=table.schema)


def _key_value(table: TableContract, name: str, text: str) -> Any:
    return int(text) if table.column(name).type.kind in INTEGERS else text


def _writer(table: TableContract, name: str) -> Callable[[Any], str | None]:
    """Return a function that writes a value of the column as PostgreSQL's text of the contract's type."""
    column: Column | None = next((each for each in table.source_columns if each.name == name), None)
    kind = column.type.kind if column is not None else None

    def write(value: Any) -> str | None:
        return None if value is None else value_text(value, kind)

    return write


def _driver_begins_nothing(connection: Any, _record: Any) -> None:
    connection.isolation_level = None


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN")
