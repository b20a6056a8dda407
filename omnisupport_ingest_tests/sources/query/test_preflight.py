"""What a source lacks is told with its SQL; which columns could be a cursor is told with the reason."""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn

from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.sources.postgres.catalog.cursor_candidates import cursor_candidates
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query.cursor import CursorColumn
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.preflight import preflight
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk, contract, lite_contract


def definition(**given: object) -> SourceDefinition:
    return SourceDefinition(SOURCE, SourceKind.QUERY, "A desk.", connection_env="DESK_DSN", **given)


@pytest.fixture(autouse=True)
def dsn(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK_DSN", desk.dsn)


def test_a_missing_index_is_told_with_the_sql_that_adds_it(desk: Desk):
    daily = definition(compare_every=timedelta(days=1))
    assert {each.check for each in preflight(daily, [desk.table])} == {"cursor_null"}
    desk.run("DROP INDEX tickets_cursor")
    (found,) = (each for each in preflight(daily, [desk.table]) if each.check == "cursor_index")
    desk.run(found.fix)
    assert {each.check for each in preflight(daily, [desk.table])} == {"cursor_null"}
    (null,) = preflight(daily, [desk.table])
    desk.run(null.fix.partition(";")[0])


def test_that_nothing_finds_deletes_is_told(desk: Desk):
    assert "deletes" in {each.check for each in preflight(definition(), [desk.table])}


def test_a_table_that_is_not_there_blocks(desk: Desk):
    desk.run("DROP TABLE tickets")
    (found,) = preflight(definition(), [desk.table])
    assert (found.check, found.severity.value) == ("table", "blocks")


def test_a_database_that_does_not_answer_is_the_only_finding(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DESK_DSN", "host=127.0.0.1 port=1 dbname=none connect_timeout=2")
    (found,) = preflight(definition(), [desk.table])
    assert found.check == "connection"
    assert "correct host and port in DESK_DSN" in found.fix
    assert "OMNISUPPORT_SOURCE_DSN" not in found.problem + found.fix


def test_a_connection_string_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    table = contract()
    for text in ("postgresql://me:s3cret@word@host/db", "postgresql+psycopg2://me:s3cret/@host/db"):
        monkeypatch.setenv("DESK_DSN", text)
        (found,) = preflight(definition(), [table])
        assert "(DESK_DSN) cannot be read" in found.problem and "s3cret" not in found.problem + found.fix
    file = tmp_path / "desk.dsn"
    file.write_text("host=127.0.0.1 port=1 dbname=none connect_timeout=2")
    file.chmod(0o600)
    by_file = SourceDefinition(SOURCE, SourceKind.QUERY, "A desk.", connection_file=str(file))
    (found,) = preflight(by_file, [table])
    assert f"correct host and port in the file {file}" in found.fix


def test_columns_are_proposed_with_who_sets_them(desk: Desk):
    desk.run(
        """
        CREATE TABLE orders (
            id bigint PRIMARY KEY, created_at timestamptz DEFAULT now(), touched timestamptz NOT NULL,
            updated_at timestamptz DEFAULT now(), due date, amount bigint
        );
        CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN NEW.touched := clock_timestamp(); RETURN NEW; END $$;
        CREATE TRIGGER touch BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION touch();
        CREATE INDEX ON orders (touched, id);
        INSERT INTO orders (id) SELECT n FROM generate_series(1, 200) AS n;
        ANALYZE orders;
        """
    )
    with closing(connect(desk.dsn)) as connection:
        found = cursor_candidates(connection)[("public", "orders")]
        live = read_live_tables(connection)[("public", "orders")]
    usable = {each.column: each.usable for each in found}
    assert usable == {
        "touched": True,
        "updated_at": True,
        "id": False,
        "created_at": False,
        "due": False,
        "amount": False,
    }
    why = {each.column: each.why for each in found}
    assert "the trigger touch sets it" in why["touched"]
    assert "an index begins with it; NOT NULL; rises" in why["touched"]
    assert "which the application has to do" in why["updated_at"]
    assert "at the insert alone" in why["created_at"]
    cursor = draft(live, source="shop", name="orders", owner="team:shop", candidates=found).document["x-cdc"][
        "cursor"
    ]
    assert cursor["field"] == "touched"
    assert len(cursor["candidates"]) == 6


def test_the_sql_is_that_of_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SQLite knows neither CONCURRENTLY nor a column that refuses NULL later on."""
    base = sqlite3.connect(tmp_path / "desk.db", isolation_level=None)
    base.execute('CREATE TABLE "my tickets" (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)')
    monkeypatch.setenv("DESK_DSN", f"sqlite:///{tmp_path / 'desk.db'}")
    table = replace(lite_contract(), table="my tickets")
    daily = definition(compare_every=timedelta(days=1))
    found = {each.check: each.fix for each in preflight(daily, [table])}
    assert "Make updated_at of main.my tickets NOT NULL;" in found["cursor_null"]
    base.execute(found["cursor_index"])
    assert "cursor_index" not in {each.check for each in preflight(daily, [table])}
    base.close()


def test_a_cursor_of_another_kind_is_told_with_the_sql_that_finds_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = sqlite3.connect(tmp_path / "desk.db", isolation_level=None)
    base.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
    base.execute("INSERT INTO tickets (id, updated_at) VALUES (1, '2026-11-28T08:00:00Z'), (2, 'Ms Smith')")
    monkeypatch.setenv("DESK_DSN", f"sqlite:///{tmp_path / 'desk.db'}")
    (found,) = preflight(definition(), [lite_contract()])
    assert (found.check, found.severity.value) == ("table", "blocks")
    assert "updated_at of main.tickets" in found.problem and "SELECT id FROM main.tickets" in found.fix
    assert "Smith" not in found.problem + found.fix
    base.close()


@pytest.mark.parametrize("lacks", ["subject", "id"])
def test_a_column_that_sqlite_lacks_is_told(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = sqlite3.connect(tmp_path / "desk.db", isolation_level=None)
    base.execute("CREATE TABLE tickets (id INTEGER, subject TEXT, updated_at DATETIME)")
    base.execute(f"ALTER TABLE tickets DROP {lacks}")
    monkeypatch.setenv("DESK_DSN", f"sqlite:///{tmp_path / 'desk.db'}")
    (found,) = (each for each in preflight(definition(), [lite_contract()]) if each.check == "columns")
    assert f"has no column {lacks}" in found.problem and "contracts propose desk.tickets" in found.fix
    assert found.severity.value == ("blocks" if lacks == "id" else "warns")
    base.close()


def test_every_column_that_postgresql_lacks_is_told_and_what_else_there_is(desk: Desk):
    desk.run("ALTER TABLE tickets DROP subject")
    text = {"type": ["string", "null"], "x-pg-type": "text", "description": "More."}
    found = {each.check: each for each in preflight(definition(), [contract(more=text)])}
    assert "has no columns subject, more" in found["columns"].problem
    assert found["columns"].severity.value == "blocks"
    assert "deletes" in found


def test_a_table_that_is_not_there_hides_no_finding_of_the_next(desk: Desk):
    nowhere = replace(desk.table, name="nowhere", table="nowhere")
    found = [(each.check, each.table) for each in preflight(definition(), [nowhere, desk.table])]
    assert ("table", "nowhere") in found and ("deletes", "tickets") in found


def test_an_index_of_a_partitioned_table_can_be_added_as_it_is_told(desk: Desk):
    desk.run("DROP TABLE tickets")
    desk.run(
        "CREATE TABLE tickets (id bigint PRIMARY KEY, subject text, updated_at timestamptz)"
        " PARTITION BY RANGE (id); CREATE TABLE low PARTITION OF tickets FOR VALUES FROM (0) TO (100)"
    )
    (found,) = (each for each in preflight(definition(), [desk.table]) if each.check == "cursor_index")
    assert "CONCURRENTLY" not in found.fix.partition("--")[0]
    desk.run(found.fix)
    assert "cursor_index" not in {each.check for each in preflight(definition(), [desk.table])}


def test_a_view_is_told_to_get_its_index_elsewhere(desk: Desk):
    desk.run("ALTER TABLE tickets RENAME TO stored; CREATE VIEW tickets AS SELECT * FROM stored")
    (found,) = (each for each in preflight(definition(), [desk.table]) if each.check == "cursor_index")
    assert "is a view" in found.fix and "CREATE INDEX" not in found.fix


def test_a_cursor_that_is_part_of_the_key_is_named_once_in_the_index(desk: Desk):
    desk.run("DROP INDEX tickets_cursor; ALTER TABLE tickets DROP CONSTRAINT tickets_pkey")
    desk.run("ALTER TABLE tickets ADD PRIMARY KEY (id, updated_at)")
    columns = tuple(replace(each, nullable=each.name == "subject") for each in desk.table.columns)
    table = replace(desk.table, key=("id", "updated_at"), columns=columns)
    (found,) = (each for each in preflight(definition(), [table]) if each.check == "cursor_index")
    desk.run(found.fix)
    assert "cursor_index" not in {each.check for each in preflight(definition(), [table])}


@pytest.mark.parametrize("enters", [True, False])
def test_a_role_that_may_not_read_is_told_the_statements_that_let_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, enters: bool
):
    desk.run('CREATE ROLE "Read Only" LOGIN; CREATE SCHEMA "Legacy CRM"')
    desk.run('ALTER TABLE tickets SET SCHEMA "Legacy CRM"')
    if enters:
        desk.run('GRANT USAGE ON SCHEMA "Legacy CRM" TO "Read Only"')
    try:
        monkeypatch.setenv("DESK_DSN", make_dsn(desk.dsn, user="Read Only"))
        table = replace(desk.table, schema="Legacy CRM")
        (found,) = preflight(definition(), [table])
        assert ("GRANT USAGE" in found.fix) is not enters
        desk.run(found.fix)
        assert "table" not in {each.check for each in preflight(definition(), [table])}
    finally:
        desk.run('DROP OWNED BY "Read Only"; DROP ROLE "Read Only"')


def test_another_type_of_the_cursor_is_told_as_a_sync_tells_it_and_ends_with_what_it_advises(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets ALTER updated_at TYPE timestamp USING updated_at AT TIME ZONE 'UTC'")
    (found,) = (
        each
        for each in preflight(definition(), [desk.table], desk.store.folder)
        if each.severity.value == "blocks"
    )
    with pytest.raises(QueryRefused) as refused:
        desk.sync()
    assert (found.problem, found.fix) == (refused.value.problem, refused.value.fix)
    assert "sync desk --table tickets --full-refresh" in found.fix and "propose desk.tickets" in found.fix
    desk.refresh("type of the cursor changed")
    desk.sync()
    told = preflight(definition(), [desk.table], desk.store.folder)
    assert "cursor_type" not in {each.check for each in told}


def test_names_in_advised_commands_are_quoted_for_a_shell():
    table = replace(contract(), schema="Legacy CRM", table="Kunden Liste", cursor=None)
    with pytest.raises(QueryRefused) as refused:
        CursorColumn.of(table)
    command = refused.value.fix.partition(": ")[2]
    words = shlex.split(command)
    assert words[words.index("--table") + 1] == "Legacy CRM.Kunden Liste"
    assert words[words.index("--source") + 1] == SOURCE
