"""Tables that change between two readings by a cursor: reading goes on, and each change is told."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import BLOCK, Column
from omnisupport_ingest.landing.schema_changes import SchemaChange, SchemaChanges
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog import schema_watch
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.compare import compare
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, sync
from omnisupport_ingest_tests.sources.query.tickets import Desk, contract, contract_document


def changes(desk: Desk) -> list[tuple[str, str | None, str | None, str | None]]:
    return [(each.kind, each.column, each.before, each.after) for each in recorded(desk)]


def recorded(desk: Desk) -> tuple[SchemaChange, ...]:
    return SchemaChanges(desk.store.folder).all()


def test_what_was_there_at_the_first_reading_is_no_change_and_each_change_is_told_once(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    assert changes(desk) == []
    desk.run(
        "ALTER TABLE tickets ADD priority int DEFAULT 3, ALTER id SET NOT NULL;"
        "INSERT INTO tickets (id, subject, priority) VALUES (2, 'two', 5)"
    )
    desk.sync()
    desk.sync()
    assert changes(desk) == [("column_added", "priority", None, "integer DEFAULT 3")]
    (change,) = recorded(desk)
    assert Lsn(0) < change.above < change.below and change.epoch == 1
    desk.run("ALTER TABLE tickets ALTER priority TYPE bigint; ALTER TABLE tickets RENAME subject TO title")
    desk.sync()
    assert changes(desk)[1:] == [
        ("column_renamed", "subject", "subject", "title"),
        ("column_widened", "priority", "integer", "bigint"),
    ]


def test_a_column_of_the_contract_that_is_gone_stops_no_reading(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP subject; INSERT INTO tickets (id) VALUES (2)")
    assert desk.sync().finished
    assert changes(desk) == [("column_dropped", "subject", "text", None)]
    (two,) = [each for each in desk.events() if each["key"] == '["2"]']
    assert "subject" not in json.loads(two["after"]), "what is not there is not sent, and no NULL"


def test_a_table_whose_contract_says_block_waits_alone_until_it_is_read_whole(desk: Desk):
    desk.run("CREATE TABLE notes (LIKE tickets INCLUDING ALL)")
    desk.table = replace(desk.table, evolution=BLOCK)
    notes = replace(contract(), name="notes", table="notes")

    def synced() -> SyncReport:
        inlet = replace(desk.inlet(), tables=(desk.table, notes))
        with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
            return sync(inlet, reader, state)

    def landed(table: str) -> list[str]:
        return [each["key"] for each in desk.events() if each["source_table"] == table and each["key"]]

    both = "INSERT INTO tickets (id) VALUES ({0}); INSERT INTO notes (id) VALUES ({0})"
    desk.run(both.format(1))
    synced()
    desk.run("ALTER TABLE tickets ADD priority int;" + both.format(2))
    for _ in range(2):
        report = synced()
        assert report.finished, "nothing waits for it"
        assert [(each.table, each.blocked) for each in report.tables] == [
            ("public.tickets", True),
            ("public.notes", False),
        ]
    assert (landed("tickets"), landed("notes")) == (['["1"]'], ['["1"]', '["2"]'])

    # A contract that follows has not been looked at by itself.
    priority = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "Priority."}
    desk.table = replace(contract(None, priority=priority), evolution=BLOCK)
    assert synced().tables[0].blocked
    desk.refresh("somebody has looked")
    assert [each.blocked for each in synced().tables] == [False, False]
    assert landed("tickets") == ['["1"]', '["1"]', '["2"]']
    desk.run("ALTER TABLE tickets DROP subject;" + both.format(3))
    assert [each.blocked for each in synced().tables] == [True, False]


def test_a_table_whose_personal_column_has_the_name_of_another_waits_until_that_has_a_policy(desk: Desk):
    desk.run("ALTER TABLE tickets ADD note text; INSERT INTO tickets VALUES (1, 'one')")
    columns = tuple(
        replace(each, pii="drop", personal=True) if each.name == "subject" else each
        for each in desk.table.columns
    )
    note = Column("note", "text")
    desk.table = replace(desk.table, columns=(*columns, note))
    desk.sync()
    desk.run(
        "ALTER TABLE tickets RENAME note TO other; ALTER TABLE tickets RENAME subject TO note;"
        "ALTER TABLE tickets RENAME other TO subject; INSERT INTO tickets (id, note) VALUES (2, 'two')"
    )
    assert desk.sync().tables[0].blocked
    with QueryState(desk.store.folder) as state:
        refresh(desk.inlet(), state, [desk.table], "nobody has looked")
    assert desk.sync().tables[0].blocked
    assert '["2"]' not in [each["key"] for each in desk.events()]
    desk.table = replace(desk.table, columns=(*columns, replace(note, pii="drop", personal=True)))
    assert not desk.sync().tables[0].blocked
    assert '["2"]' in [each["key"] for each in desk.events()]


def test_a_table_that_waits_in_the_middle_of_its_first_reading_is_not_answered_for_by_another_one(desk: Desk):
    desk.run("CREATE TABLE notes (LIKE tickets INCLUDING ALL)")
    desk.table = replace(desk.table, evolution=BLOCK)
    desk.page_rows = 1
    notes = replace(contract(), name="notes", table="notes")
    desk.run("INSERT INTO tickets (id) SELECT generate_series(1, 5)")
    stops = iter([False, True, True, True, True])
    assert not desk.sync(stopped=lambda: next(stops)).finished
    desk.run("ALTER TABLE tickets ADD priority int")
    assert desk.sync().tables[0].blocked
    inlet = replace(desk.inlet(), tables=(desk.table, notes))
    with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
        refresh(inlet, state, [notes], "another table")
        assert [each.blocked for each in sync(inlet, reader, state).tables] == [True, False]
    assert [each.kind for each in SchemaChanges(desk.store.folder).open_changes("tickets")] == [
        "column_added"
    ]
    desk.refresh("somebody has looked")
    assert desk.sync().finished
    assert (
        len({each["key"] for each in desk.events() if each["source_table"] == "tickets" and each["key"]}) == 5
    )


def test_a_table_that_waits_is_not_compared(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.table = replace(desk.table, evolution=BLOCK)
    desk.run("ALTER TABLE tickets ADD priority int; DELETE FROM tickets")
    with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
        assert compare(desk.inlet(), reader, state, {}).tables == []


@pytest.mark.parametrize("name", ["id", "updated_at"])
def test_without_its_key_or_cursor_a_table_cannot_be_read_and_the_change_is_told(desk: Desk, name: str):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run(f"ALTER TABLE tickets DROP {name}")
    with pytest.raises(QueryRefused, match=name):
        desk.sync()
    assert ("column_dropped", name) in [each[:2] for each in changes(desk)]


def test_without_its_soft_delete_column_no_row_is_read_as_alive(desk: Desk):
    gone = {"type": ["string", "null"], "x-pg-type": "timestamp with time zone", "description": "When."}
    document = contract_document(deleted_at=gone)
    document["x-cdc"]["events"]["soft_delete_column"] = "deleted_at"
    desk.table = contract_of(document, Path("tickets.json"))
    desk.run("ALTER TABLE tickets ADD deleted_at timestamptz; INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP deleted_at")
    with pytest.raises(QueryRefused, match="deleted_at"):
        desk.sync()


def test_without_the_column_of_its_subject_nothing_lands_under_another_key(desk: Desk):
    text = {"type": ["string", "null"], "x-pg-type": "text", "description": "Text."}
    document = contract_document(customer=text, email=text)
    document["x-cdc"] |= {
        "pii": {"email": {"policy": "tokenize", "note": "An address."}},
        "at_rest": {"pii": "encrypted", "subject": "customer", "subject_column": "customer"},
    }
    desk.table = contract_of(document, Path("tickets.json"))
    desk.run("ALTER TABLE tickets ADD customer text, ADD email text; INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets RENAME customer TO client")
    with pytest.raises(QueryRefused, match="customer"):
        desk.sync()


def test_a_column_that_the_table_never_had_is_refused_as_before(desk: Desk):
    desk.table = contract(nothing={"type": ["string", "null"], "x-pg-type": "text", "description": "No."})
    with pytest.raises(QueryRefused, match="has no column 'nothing'"):
        desk.sync()


def test_a_table_that_is_dropped_is_told_once_and_its_return_too(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run(
        "ALTER TABLE tickets RENAME TO elsewhere; CREATE TABLE kept AS SELECT * FROM elsewhere;"
        "DROP TABLE elsewhere"
    )
    for _ in range(2):
        with pytest.raises(QueryRefused):
            desk.sync()
    assert changes(desk) == [("table_gone", None, "public.tickets", None)]
    desk.run("CREATE TABLE tickets (id bigint PRIMARY KEY, subject text, updated_at timestamptz)")
    desk.sync()
    assert [each[0] for each in changes(desk)] == ["table_gone", "table_made_anew"]


def test_a_full_refresh_answers_for_the_changes_before_it_alone(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP subject, ADD note text; ALTER TABLE tickets ADD subject text")
    desk.sync()
    record = SchemaChanges(desk.store.folder)
    assert {each.kind for each in record.open_changes("tickets")} == {"column_added_again", "column_added"}
    desk.refresh()
    desk.run("ALTER TABLE tickets ADD later text")
    desk.sync()
    assert SchemaChanges(desk.store.folder).open_changes("tickets") == ()
    desk.run("ALTER TABLE tickets ADD last text")
    desk.sync()
    open_ones = SchemaChanges(desk.store.folder).open_changes("tickets")
    assert [each.column for each in open_ones] == ["last"]


def test_a_view_that_is_made_again_with_a_column_more_is_one_change(desk: Desk):
    desk.run(
        "ALTER TABLE tickets RENAME TO stored; INSERT INTO stored VALUES (1, 'one');"
        "CREATE VIEW tickets AS SELECT id, subject, updated_at FROM stored"
    )
    desk.sync()
    desk.run(
        "DROP VIEW tickets; ALTER TABLE stored ADD size int;"
        "CREATE VIEW tickets AS SELECT size, id, subject, updated_at FROM stored"
    )
    desk.sync()
    desk.sync()
    assert changes(desk) == [("column_added", "size", None, "integer")]


def test_a_sync_that_ends_in_the_middle_tells_a_change_once(desk: Desk):
    desk.run("INSERT INTO tickets SELECT n, 'x' FROM generate_series(1, 10) n")
    desk.sync()
    desk.run("ALTER TABLE tickets ADD size int; UPDATE tickets SET subject = 'y', updated_at = now()")
    desk.page_rows = 3
    pages = iter([False, True, True, True])
    assert not desk.sync(stopped=lambda: next(pages)).finished
    assert desk.sync().finished
    assert changes(desk) == [("column_added", "size", None, "integer")]


def test_a_database_whose_catalogs_cannot_be_read_is_read_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    before = SchemaChanges(desk.store.folder).read()
    desk.run("INSERT INTO tickets VALUES (2, 'two')")
    desk.run("ALTER TABLE tickets ADD size int")
    # A server of an old version has no such catalog column.
    monkeypatch.setattr(
        schema_watch, "_COLUMNS", schema_watch._COLUMNS.replace("attmissingval", "attmissing")
    )
    assert desk.sync(reader=PostgresReader(desk.dsn)).finished
    assert replace(SchemaChanges(desk.store.folder).read(), certain=before.certain) == before
    assert 2 in desk.subjects()
