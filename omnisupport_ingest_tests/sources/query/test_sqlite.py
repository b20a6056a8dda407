"""The same reading of SQLite by SQLAlchemy: texts for times, no row values, its own order of keys."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from omnisupport_ingest.contracts.load import TableContract, contract_of
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.reader import KeyBounds
from omnisupport_ingest.sources.query.reflected import refusals
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import sync
from omnisupport_ingest_tests.sources.query.tickets import Desk, contract_document, lite_contract


class Lite:
    """A desk in a file of SQLite."""

    def __init__(self, folder: Path) -> None:
        (folder / "landing").mkdir()
        self.url = f"sqlite:///{folder / 'desk.db'}"
        self.base = sqlite3.connect(folder / "desk.db", isolation_level=None)
        self.base.execute(
            "CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT,"
            " updated_at DATETIME DEFAULT (datetime('now')), paid, done, raw)"
        )
        columns = {
            name: {"type": [kind, "null"], "x-pg-type": pg_type, "description": "Column."}
            for name, kind, pg_type in (
                ("paid", "number", "numeric(12,2)"),
                ("done", "boolean", "boolean"),
                ("raw", "string", "bytea"),
            )
        }
        self.desk = Desk(None, "", folder / "landing", lite_contract(**columns), 7)

    def sync(self):
        return self.desk.sync(reader=DialectReader(self.url)).tables[0]


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[Lite]:
    found = Lite(tmp_path)
    yield found
    found.base.close()


def test_rows_land_once_with_the_texts_that_postgresql_would_write(lite: Lite):
    lite.base.execute(
        "INSERT INTO tickets VALUES (1, 'Größe \"x\"', '2026-11-20 10:00:00.250000', 12.5, 1, x'00ff')"
    )
    assert lite.sync().landed == 1
    (event,) = (each for each in lite.desk.events() if each["op"] == "r")
    assert json.loads(event["after"]) == {
        "id": "1",
        "subject": 'Größe "x"',
        "updated_at": "2026-11-20 10:00:00.25+00",
        "paid": "12.5",
        "done": "t",
        "raw": "\\x00ff",
    }
    assert event["window"] == "2026-11-20T1000"


def test_a_second_reading_finds_what_is_new_and_lands_nothing_twice(lite: Lite):
    lite.base.executemany(
        "INSERT INTO tickets (id, subject, updated_at) VALUES (?, 's', ?)",
        [(number, f"2026-11-2{number % 3} 10:00:0{number % 7}") for number in range(1, 51)],
    )
    assert lite.sync().landed == 50
    lite.base.execute("INSERT INTO tickets (id, subject) VALUES (99, 'new')")
    again = lite.sync()
    assert (again.landed, again.again > 0) == (1, True)
    assert lite.sync().landed == 0


def test_a_time_with_a_fraction_is_not_below_the_bound_of_its_second(lite: Lite):
    lite.base.execute("INSERT INTO tickets (id, updated_at) VALUES (1, '2026-11-20 10:00:00')")
    lite.sync()
    for number, moment in enumerate(("10:00:00", "10:00:00.5", "10:00:00.000000"), 2):
        lite.base.execute(
            "INSERT INTO tickets (id, updated_at) VALUES (?, ?)", (number, f"2026-11-20 {moment}")
        )
    assert lite.sync().landed == 3


def test_all_of_a_sync_is_read_in_one_transaction(lite: Lite):
    lite.base.execute("PRAGMA journal_mode = WAL")
    lite.base.executemany(
        "INSERT INTO tickets (id, subject, updated_at) VALUES (?, 's', '2026-11-20 10:00:00')",
        [(number,) for number in range(1, 21)],
    )
    calls = []

    def between_pages() -> bool:
        # After the first page a row is changed that a later page has.
        calls.append(1)
        if len(calls) == 2:
            lite.base.execute("UPDATE tickets SET subject = 'changed' WHERE id = 20")
        return False

    lite.desk.sync(reader=DialectReader(lite.url), stopped=between_pages)
    assert lite.desk.subjects()[20] == "s"


def test_a_table_that_is_not_there_is_named(lite: Lite):
    lite.base.execute("DROP TABLE tickets")
    with pytest.raises(QueryRefused, match=r"main\.tickets"):
        lite.sync()


def test_keys_are_given_by_range(lite: Lite):
    lite.base.executemany("INSERT INTO tickets (id) VALUES (?)", [(number,) for number in range(1, 31)])
    reader = DialectReader(lite.url)
    reader.begin()
    found = [key for keys in reader.keys(lite.desk.table, KeyBounds(("9",), ("12",))) for key in keys]
    assert sorted(found) == ['["10"]', '["11"]', '["12"]']
    reader.close()


def test_a_row_that_is_read_again_is_no_contradiction_after_its_table_or_contract_has_changed(lite: Lite):
    lite.base.execute("INSERT INTO tickets (id, done) VALUES (1, 1)")
    assert lite.sync().landed == 1
    lite.base.execute("ALTER TABLE tickets ADD priority TEXT")
    assert lite.sync().landed == 1
    # Without a type in the contract the value has another text.
    lite.desk.table = lite_contract()
    assert lite.sync().landed == 1
    assert lite.sync().landed == 0
    rows = sorted((each["ordinal"], each["after"]) for each in lite.desk.events() if each["op"] == "r")
    assert [json.loads(after)["done"] for _, after in rows] == ["t", "t", "1"]
    assert len({ordinal for ordinal, _ in rows}) == 3


def test_what_changes_in_a_table_is_told_by_the_names_of_its_columns(lite: Lite):
    lite.base.execute("INSERT INTO tickets (id, subject) VALUES (1, 'one')")
    lite.sync()
    lite.base.execute("ALTER TABLE tickets ADD size BIGINT NOT NULL DEFAULT 0")
    lite.base.execute("ALTER TABLE tickets RENAME subject TO title")
    for _ in range(2):
        lite.sync()
    found = [(each.kind, each.column, each.after) for each in SchemaChanges(lite.desk.store.folder).all()]
    assert sorted(found, key=str) == [
        ("column_added", "size", "bigint NOT NULL"),
        ("column_added", "title", "text"),
        ("column_dropped", "subject", None),
    ]


@pytest.mark.parametrize("use", ["soft delete", "event time"])
def test_without_a_column_that_it_is_read_by_a_table_is_refused(lite: Lite, use: str):
    column = {"type": ["string", "null"], "x-pg-type": "timestamp with time zone", "description": "When."}
    document = contract_document(schema="main", moment=column)
    if use == "soft delete":
        document["x-cdc"]["events"]["soft_delete_column"] = "moment"
    else:
        document["x-cdc"]["cursor"]["event_time"] = "moment"
    lite.desk.table = contract_of(document, Path("tickets.json"))
    lite.base.execute("ALTER TABLE tickets ADD moment DATETIME")
    lite.base.execute("INSERT INTO tickets (id, moment) VALUES (1, '2026-11-20 10:00:00')")
    lite.sync()
    lite.base.execute("ALTER TABLE tickets DROP moment")
    with pytest.raises(QueryRefused, match="moment"):
        lite.sync()


def test_a_view_that_is_broken_keeps_no_other_table_from_landing(lite: Lite):
    lite.base.execute("INSERT INTO tickets (id, subject) VALUES (1, 'one')")
    lite.base.execute("CREATE VIEW broken AS SELECT id, subject, updated_at FROM nowhere")
    broken = replace(lite_contract(), name="broken", table="broken")
    inlet = replace(lite.desk.inlet(), tables=(lite.desk.table, broken))
    with QueryState(lite.desk.store.folder) as state:
        (fault,) = sync(inlet, DialectReader(lite.url), state).faults
    assert "broken" in fault.problem
    assert [each["key"] for each in lite.desk.events()] == ['["1"]']


def other_table(name: str) -> TableContract:
    return replace(lite_contract(), name=name, table=name)


def test_numbers_under_a_cursor_of_times_are_refused(lite: Lite):
    lite.base.execute("CREATE TABLE epoch (id INTEGER PRIMARY KEY, subject TEXT, updated_at INTEGER)")
    lite.desk.table = other_table("epoch")
    assert lite.sync().landed == 0, "a declared type says nothing of the values"
    lite.base.execute("INSERT INTO epoch VALUES (1, 'one', 1764320000)")
    with pytest.raises(QueryRefused, match=r"updated_at of main\.epoch") as refused:
        lite.sync()
    assert "tickets.json" in refused.value.problem
    assert "SELECT" in refused.value.fix and "bigint" in refused.value.fix


def with_numbers_as_cursor(lite: Lite, *, declared: str) -> None:
    """Read tickets by a number, whose column is ``declared`` so."""
    number = {"type": ["integer", "null"], "x-pg-type": "bigint", "description": "Version."}
    moment = {"type": "string", "x-pg-type": "timestamp with time zone", "description": "When."}
    cursor = {"field": "updated_at", "lookback": 5, "event_time": "moment"}
    document = contract_document(cursor, schema="main", updated_at=number, moment=moment)
    document["required"] = ["id", "moment"]
    lite.desk.table = contract_of(document, Path("tickets.json"))
    lite.base.execute("DROP TABLE tickets")
    lite.base.execute(
        f"CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject, updated_at {declared}, moment)"
    )


def test_times_under_a_cursor_of_numbers_are_refused(lite: Lite):
    with_numbers_as_cursor(lite, declared="")
    lite.base.execute("INSERT INTO tickets VALUES (1, 's', 7, '2026-11-20 10:00:00')")
    assert lite.sync().landed == 1
    for wrong in ("8.5", "'9'", "x'00'", str(1 << 60)):
        lite.base.execute(f"INSERT INTO tickets VALUES (2, 's', {wrong}, '2026-11-20 10:00:00')")
        assert keys_that_the_fix_finds(lite) == [(2,)]
        lite.base.execute("DELETE FROM tickets WHERE id = 2")
    assert lite.sync().landed == 0


def test_numbers_in_a_column_that_is_declared_a_time_are_read_as_the_contract_says(lite: Lite):
    with_numbers_as_cursor(lite, declared="TIMESTAMP")
    lite.base.execute("INSERT INTO tickets VALUES (1, 's', 1700000000, '2026-11-20 10:00:00')")
    assert lite.sync().landed == 1


def keys_that_the_fix_finds(lite: Lite) -> list[tuple[int]]:
    with pytest.raises(QueryRefused) as refused:
        lite.sync()
    found = re.search("SELECT .*?;", refused.value.fix)
    assert found is not None and "updated_at of main.tickets" in refused.value.problem
    return lite.base.execute(found[0]).fetchall()


@pytest.mark.parametrize(
    "wrong",
    ["1764316800", "1764316800.5", "x'00'", "'unknown'", "'28/11/2026 10:00'", "'1764316800'", "'08:00:00'"],
)
def test_a_cursor_that_is_no_time_is_refused_and_the_fix_finds_its_row(lite: Lite, wrong: str):
    lite.base.execute("INSERT INTO tickets (id, updated_at) VALUES (1, '2026-11-28T08:00:00Z'), (3, NULL)")
    assert lite.sync().landed == 2
    lite.base.execute(f"INSERT INTO tickets (id, updated_at) VALUES (2, {wrong})")
    assert keys_that_the_fix_finds(lite) == [(2,)]


def test_a_cursor_that_is_no_time_between_two_that_are_is_refused_when_it_is_read(lite: Lite):
    lite.base.execute(
        "INSERT INTO tickets (id, updated_at) VALUES (1, '2026-11-28 08:00:00'), (2, '2026-13-45 08:00:00'),"
        " (3, '2027-01-01 08:00:00')"
    )
    assert keys_that_the_fix_finds(lite) == [(2,)]
    assert lite.desk.events() == []


def test_a_table_that_is_refused_keeps_no_other_table_from_landing(lite: Lite):
    for name in ("before", "odd", "other"):
        lite.base.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
        lite.base.execute(f"INSERT INTO {name} (id, updated_at) VALUES (1, '2026-11-28 08:00:00')")
    inlet = replace(lite.desk.inlet(), tables=tuple(map(other_table, ("before", "odd", "other"))))
    with QueryState(lite.desk.store.folder) as state:
        assert sync(inlet, DialectReader(lite.url), state).finished
    for name in ("before", "odd", "other"):
        lite.base.execute(f"INSERT INTO {name} (id, updated_at) VALUES (2, '2026-11-28 09:00:00')")
    lite.base.execute("INSERT INTO odd (id, updated_at) VALUES (3, 'unknown')")
    with QueryState(lite.desk.store.folder) as state:
        report = sync(inlet, DialectReader(lite.url), state)
    (fault,) = report.faults
    assert "main.odd" in fault.problem and not report.finished
    assert [(each.landed, each.refused) for each in report.tables] == [(1, False), (0, True), (1, False)]
    # Where it is stays told: the sensor would otherwise have it read from the beginning.
    assert report.tables[1].cursor == "2026-11-28 08:00:00"


def test_a_file_that_is_not_there_is_told_and_not_made(lite: Lite, tmp_path: Path):
    nowhere = tmp_path / "nowhere.db"
    with pytest.raises(QueryRefused, match=f"no database file at {nowhere}"):
        lite.desk.sync(reader=DialectReader(f"sqlite:///{nowhere}"))
    assert not nowhere.exists()


def test_a_driver_that_is_missing_is_named_and_no_url():
    with pytest.raises(QueryRefused, match="oracledb") as refused:
        DialectReader("oracle+oracledb://me:s3cret@host/db")
    assert "s3cret" not in str(refused.value) and "host/db" not in str(refused.value)


def test_no_message_quotes_a_value_that_the_driver_cannot_read(lite: Lite):
    broken = b"ada\xe9milie@example.org".hex()
    lite.base.execute(f"INSERT INTO tickets (id, subject) VALUES (1, CAST(x'{broken}' AS TEXT))")
    try:
        with QueryState(lite.desk.store.folder) as state:
            faults = sync(lite.desk.inlet(), DialectReader(lite.url), state).faults
    except QueryRefused as refused:
        faults = (refused,)
    (fault,) = faults
    assert "OperationalError" in fault.problem and "ada" not in f"{fault.problem} {fault.fix}"


def test_the_code_of_a_driver_is_named_and_its_text_only_as_it_connects():
    class Refused(Exception):
        sqlstate = "22P02"

    error = sa.exc.DataError("SELECT", {}, Refused('invalid input syntax for type bigint: "+41 79 123"'))
    for connecting in (False, True):
        with pytest.raises(QueryRefused) as refused, refusals("public.people", connecting=connecting):
            raise error
        assert ("+41" in refused.value.problem) == connecting
        assert connecting or "DataError (22P02)" in refused.value.problem
