"""Real changes of real tables, seen by capture: recorded once, with their place, and the policy applied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest import failpoints
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import ADDITIVE, BLOCK
from omnisupport_ingest.landing.schema_changes import SchemaChange, SchemaChanges
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog import schema_watch
from omnisupport_ingest.sources.postgres.catalog.schema_watch import SchemaWatch
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")
NAMES = ("tickets", "agents", "orders")


@pytest.fixture
def three(source: SourceUnderTest) -> SourceUnderTest:
    """Three captured tables: one pinned, one additive, one blocked by any change."""
    for name, evolution in zip(NAMES, ("pinned", ADDITIVE, BLOCK), strict=True):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two')")
        source.tables.append(replace(contract(name, COLUMNS), evolution=evolution))
    source.catch_up()
    return source


def changes(source: SourceUnderTest) -> dict[tuple[str, str], SchemaChange]:
    found = SchemaChanges(source.store.folder).all()
    assert [each.number for each in found] == list(range(1, len(found) + 1))
    return {(each.table, each.kind): each for each in found}


def test_changes_are_recorded_once_with_their_place(three: SourceUnderTest) -> None:
    assert changes(three) == {}, "what was there at the first start is no change"
    three.sql(
        "CREATE TYPE mood AS ENUM ('ok')",
        "ALTER TABLE tickets ADD m mood, ADD n int DEFAULT 7, ADD gone text",
        "INSERT INTO tickets VALUES (3, 'three', 'ok', 8)",
    )
    three.catch_up()
    three.sql(
        "ALTER TYPE mood ADD VALUE 'sad'",
        "ALTER TABLE tickets ALTER n TYPE bigint, ALTER n SET NOT NULL",
        "ALTER TABLE tickets RENAME gone TO kept",
        "UPDATE tickets SET kept = 'x' WHERE id = 3",
    )
    three.catch_up()
    three.catch_up()
    found = SchemaChanges(three.store.folder).all()
    assert [(each.table, each.kind, each.column) for each in found] == [
        ("tickets", "column_added", "m"),
        ("tickets", "column_added", "n"),
        ("tickets", "column_added", "gone"),
        ("tickets", "enum_value_added", "m"),
        ("tickets", "column_widened", "n"),
        ("tickets", "column_not_null", "n"),
        ("tickets", "column_renamed", "gone"),
    ]
    last = {each.source_table: each.commit_lsn for each in three.events()}["tickets"]
    assert all(each.above < each.below for each in found)
    in_rows = {each.kind: each.first_commit for each in found}
    assert in_rows["column_added"] is not None and in_rows["column_added"].value < last
    assert in_rows["column_renamed"] is not None and in_rows["column_renamed"].value == last
    assert in_rows["column_widened"] is not None and in_rows["column_widened"].value == last
    assert in_rows["enum_value_added"] is None, "no row shows it"


@pytest.mark.parametrize("reading", ["read_live_tables", "read_publication"])
def test_a_column_that_is_renamed_while_the_catalogs_are_read_is_no_dropped_one(
    three: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    """A dropped and an added column would lose the policy of the column, and what it held."""
    read = getattr(schema_watch, reading)
    renames = iter(["ALTER TABLE tickets RENAME v TO w"])

    def in_between(*arguments: Any) -> Any:
        three.sql(*renames)
        return read(*arguments)

    monkeypatch.setattr(schema_watch, reading, in_between)
    home, source = three.home.path, three.settings.source
    watch = SchemaWatch.of(home, source, three.store.folder, 1, three.tables, three.settings.publication)
    with three.connected() as connection:
        watch.look(connection)
        watch.look(connection)
    found = SchemaChanges(three.store.folder).all()
    assert [(each.kind, each.before, each.after) for each in found] == [("column_renamed", "v", "w")]


def test_each_policy_does_what_it_says(three: SourceUnderTest) -> None:
    three.sql(
        *(
            f"ALTER TABLE {name} ADD size int, ADD priority text DEFAULT 'low', ADD email text"
            for name in NAMES
        ),
        *(f"INSERT INTO {name} VALUES (3, 'three', 4, 'high', 'a@b.example')" for name in NAMES),
    )
    with pytest.raises(TableMissedChanges, match="column added: size integer"):
        three.catch_up()
    assert set(ParkedTables(three.store.folder, 1).all()) == {"orders"}
    keys = {each.source_table: each.key for each in three.events()}
    assert keys["orders"] is None, "it lands without a key from the first row with the new schema on"
    for name in ("tickets", "agents"):
        rows = folded([each for each in three.events() if each.source_table == name], name)
        assert rows.keys() == three.rows(name, COLUMNS).keys(), "the others go on"
        assert rows['["3"]']["priority"] == "high", "raw has every value"
    learned = LearnedColumns(three.home.path, three.settings.source)
    assert learned.of("tickets") == {} == learned.of("orders")
    lines = learned.of("agents")
    assert lines.keys() == {"size", "priority"}, "what seems to be personal data waits for a person"
    assert (lines["size"]["default"], lines["priority"]["default"]) == (None, "low")

    with pytest.raises(TableMissedChanges):
        three.catch_up()
    SnapshotRequests(three.store.folder).write("orders", "looked at")
    three.catch_up()
    assert set(ParkedTables(three.store.folder, 1).all()) == set()
    three.sql("INSERT INTO orders VALUES (4, 'four')", "ALTER TABLE orders DROP size")
    with pytest.raises(TableMissedChanges, match="column dropped"):
        three.catch_up()


def test_tables_that_are_renamed_made_anew_or_gone_are_changes_too(three: SourceUnderTest) -> None:
    three.sql("ALTER TABLE tickets RENAME TO elsewhere", "DROP TABLE agents")
    for _ in range(2):
        with pytest.raises((PreflightFailed, TableMissedChanges), match="tickets"):
            three.catch_up()
    three.sql("CREATE TABLE agents (v text, id int PRIMARY KEY)")
    with pytest.raises((PreflightFailed, TableMissedChanges), match="tickets"):
        three.catch_up()
    found = SchemaChanges(three.store.folder).all()
    assert [(each.table, each.kind) for each in found] == [
        ("agents", "table_gone"),
        ("tickets", "table_renamed"),
        ("agents", "table_made_anew"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_capture_killed_while_it_notes_a_change_notes_it_once(three: SourceUnderTest, moment: str) -> None:
    three.sql("ALTER TABLE tickets ADD size int", "INSERT INTO tickets VALUES (3, 'three', 4)")
    three.killed_at(f"landing.schema_changes.{moment}")
    three.catch_up()
    found = SchemaChanges(three.store.folder).all()
    assert [(each.table, each.kind, each.column) for each in found] == [("tickets", "column_added", "size")]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_column_is_learned_whole_or_not_at_all(tmp_path: Path, moment: str) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from omnisupport_ingest.contracts.learned import LearnedColumns; "
        "LearnedColumns(Path(sys.argv[1]), 'desk').learn('tickets', {sys.argv[2]: {'type': 'string'}})"
    )
    LearnedColumns(tmp_path, "desk").learn("tickets", {"first": {"type": "string"}})
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "second"],
        env=os.environ | {failpoints.VARIABLE: f"home.learned.{moment}"},
    )
    assert done.returncode == -signal.SIGKILL
    found = set(LearnedColumns(tmp_path, "desk").of("tickets"))
    assert found == {"first", "second"} if moment == "after" else found == {"first"}
