"""The SQL that MySQL is sent: written by its dialect, as no server of MySQL is part of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from omnisupport_ingest.contracts.load import TableContract, contract_of
from omnisupport_ingest.sources.query.cursor import CursorColumn, KeysetPosition
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.reader import KeyBounds, Span
from omnisupport_ingest_tests.sources.query.tickets import contract_document

DIALECT = mysql.dialect()
LOW, HIGH, AT = "2026-11-20 10:00:00", "2026-11-20 11:00:00", "2026-11-20 10:30:00"
BEHIND = "(`order` > 4 OR `order` = 4 AND `group` > 7)"


class Driver:
    """A driver of MySQL that keeps the statements it is given, and finds no row."""

    paramstyle, Error, apilevel = "format", Exception, "2.0"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def execution_options(self, **_: Any) -> Driver:
        return self

    def execute(self, query: sa.Select[Any]) -> Driver:
        self.sent.append(text_of(query))
        return self

    def keys(self) -> list[str]:
        return ["order", "group", "updated_at"]

    def partitions(self, _size: int) -> Iterator[Any]:
        return iter(())


class MySQL(DialectReader):
    """A reader whose engine has the dialect of MySQL, and whose driver is not installed."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self._engine.dispose()
        self._engine.dialect = DIALECT
        self.lite, self.driver = False, Driver()
        self._connection = self.driver  # type: ignore[assignment]

    def page(self, span: Span) -> str:
        self.rows(TABLE, CURSOR, span, lambda _rows: None)
        return self.driver.sent.pop()


def text_of(query: sa.Select[Any]) -> str:
    text = str(query.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True}))
    return " ".join(text.split())


def _table() -> TableContract:
    """A table whose key has words that MySQL reserves."""
    document = contract_document(schema="desk")
    for name in ("order", "group"):
        document["properties"][name] = {"type": "integer", "x-pg-type": "bigint", "description": "Key."}
    document["x-cdc"]["key"], document["required"] = ["order", "group"], ["id", "order", "group"]
    return contract_of(document, Path("tickets.json"))


TABLE = _table()
CURSOR = CursorColumn.of(TABLE)


@pytest.fixture
def reader() -> MySQL:
    return MySQL()


def test_the_first_page_is_read_from_the_lookback_in_the_order_of_cursor_and_key(reader: MySQL) -> None:
    assert reader.page(Span(False, LOW, HIGH, None, 500)) == (
        "SELECT * FROM desk.tickets WHERE updated_at IS NOT NULL"
        f" AND updated_at >= '{LOW}' AND updated_at <= '{HIGH}'"
        " ORDER BY updated_at, `order`, `group` LIMIT 500"
    )


def test_the_next_page_begins_behind_the_last_row_without_comparing_rows(reader: MySQL) -> None:
    after = KeysetPosition(AT, ("4", "7"))
    assert reader.page(Span(False, None, None, after, 500)) == (
        "SELECT * FROM desk.tickets WHERE updated_at IS NOT NULL"
        f" AND updated_at >= '{AT}' AND (updated_at > '{AT}' OR updated_at = '{AT}' AND {BEHIND})"
        " ORDER BY updated_at, `order`, `group` LIMIT 500"
    )


def test_rows_without_a_cursor_are_read_in_the_order_of_their_key(reader: MySQL) -> None:
    after = KeysetPosition(None, ("4", "7"))
    assert reader.page(Span(True, None, None, after, 500)) == (
        f"SELECT * FROM desk.tickets WHERE updated_at IS NULL AND {BEHIND}"
        " ORDER BY `order`, `group` LIMIT 500"
    )


def test_keys_are_read_by_range(reader: MySQL) -> None:
    assert list(reader.keys(TABLE, KeyBounds(("4", "7"), None))) == []
    assert list(reader.keys(TABLE, KeyBounds(None, ("4", "7")))) == []
    assert reader.driver.sent == [
        f"SELECT `order`, `group` FROM desk.tickets WHERE {BEHIND.strip('()')}",
        f"SELECT `order`, `group` FROM desk.tickets WHERE NOT {BEHIND}",
    ]


def test_rows_are_read_by_their_keys(reader: MySQL) -> None:
    reader.rows_of(TABLE, CURSOR, ['["4","7"]', '["5","8"]'], lambda _rows: None)
    assert reader.driver.sent == [
        "SELECT * FROM desk.tickets WHERE `order` = 4 AND `group` = 7 OR `order` = 5 AND `group` = 8"
    ]


def test_the_index_that_preflight_advises_is_one_of_mysql(reader: MySQL) -> None:
    assert reader.index_sql(TABLE, "tickets_cursor", ["updated_at", "order", "group"]) == (
        "CREATE INDEX tickets_cursor ON desk.tickets (updated_at, `order`, `group`);"
    )
