"""Real changes of real tables, seen by capture: recorded once, with their place, and the policy applied."""

from __future__ import annotations

import json
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
from omnisupport_ingest.contracts.model import ADDITIVE, BLOCK, Column
from omnisupport_ingest.landing.schema_changes import FILE, SchemaChange, SchemaChanges
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog import schema_watch
from omnisupport_ingest.sources.postgres.catalog.schema_watch import SchemaWatch
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import following
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

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
    watch = SchemaWatch.of(
        home, source, SchemaChanges(three.store.folder), 1, three.tables, three.settings.publication
    )
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


ADDED = {
    "plain": (["ADD c text"], {"default": None}),
    "constant": (["ADD c text DEFAULT 'low'", "ALTER c DROP DEFAULT"], {"default": "low"}),
    "default given later": (["ADD c text", "ALTER c SET DEFAULT 'low'"], {"default": None}),
    "by row": (["ADD c uuid DEFAULT gen_random_uuid()", "ALTER c DROP DEFAULT"], {}),
    "of the domain, by row": (["ADD c by_row"], {}),
    "rows written anew": (["ADD c int DEFAULT 5", "ALTER v TYPE varchar(9)", "ALTER c DROP DEFAULT"], {}),
    "identity": (
        ["ADD c int GENERATED ALWAYS AS IDENTITY", "ALTER c DROP IDENTITY", "ALTER c DROP NOT NULL"],
        {},
    ),
    "other delimiter": (["ADD c box DEFAULT '(1,1),(0,0)'"], {}),
}
"""Ways to add a column, and what is known then of the rows from before."""


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("how", ADDED)
def test_what_older_rows_have_in_a_new_column_is_said_only_if_proven(
    source: SourceUnderTest, how: str, partitioned: bool
) -> None:
    if how == "identity" and partitioned and source.server_version() < 170000:
        pytest.skip("partitioned tables have identity columns since PostgreSQL 17")
    source.sql("CREATE DOMAIN by_row AS text DEFAULT md5(random()::text)")
    if partitioned:
        source.sql(
            "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (2)",
            "CREATE TABLE t_2 PARTITION OF t DEFAULT",
        )
    else:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    source.tables.append(replace(contract("t", COLUMNS), evolution=ADDITIVE))
    source.catch_up()
    alters, known = ADDED[how]
    source.sql(*(f"ALTER TABLE t {each}" for each in alters))
    source.catch_up()
    line = LearnedColumns(source.home.path, source.settings.source).of("t")["c"]
    assert {name: line[name] for name in line if name == "default"} == known


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("varchar(9)", "varchar(12)"),
        ("varchar(9)", "text"),
        ("text", "varchar"),
        ("numeric(9,2)", "numeric(12,2)"),
        ("numeric(9,2)", "numeric"),
        ("timestamp(3)", "timestamp"),
        ("varbit(8)", "varbit(9)"),
    ],
)
def test_an_expression_that_converts_a_widened_column_is_a_change_of_its_own(
    source: SourceUnderTest, before: str, after: str
) -> None:
    source.sql(f"CREATE TABLE t (id int PRIMARY KEY, plain {before}, v {before})")
    source.tables.append(contract("t", ("id", "plain", "v")))
    source.catch_up()
    source.sql(f"ALTER TABLE t ALTER plain TYPE {after}")
    source.catch_up()
    source.sql(f"ALTER TABLE t ALTER v TYPE {after} USING nullif(v, v)")
    source.catch_up()
    found = [(each.column, each.kind) for each in SchemaChanges(source.store.folder).all()]
    assert [name for name, _ in found] == ["plain", "v", "v"]
    assert [kind == "column_converted" for _, kind in found] == [False, False, True]


def test_what_was_proven_of_older_rows_is_kept_when_they_are_written_anew(source: SourceUnderTest) -> None:
    """A contract that learns nothing by itself follows weeks later."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
    source.tables.append(contract("t", COLUMNS))
    source.catch_up()
    for added in ("w int DEFAULT 5", "u uuid DEFAULT gen_random_uuid()"):
        source.sql(f"ALTER TABLE t ADD {added}")
        source.catch_up()
    source.sql("ALTER TABLE t ALTER w DROP DEFAULT, ALTER u DROP DEFAULT", "VACUUM FULL t")
    source.catch_up()
    known = SchemaChanges(source.store.folder).tables()
    with source.connected() as connection:
        now = schema_watch.read_seen(connection, source.tables, known)["t"]
    assert now.line("w")["default"] == "5"
    assert "default" not in now.line("u")


@pytest.mark.parametrize(
    ("added", "then", "name"),
    [
        ("numeric DEFAULT 5.6", "ALTER TABLE t ALTER n TYPE integer", "n"),
        ("numeric DEFAULT 5.6", "ALTER TABLE t RENAME n TO m", "m"),
        ("mood DEFAULT 'ok'", "ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'", "n"),
        ("varchar(3) DEFAULT 'low'", "ALTER TABLE t ALTER n TYPE varchar(9) USING upper(n)", "n"),
    ],
    ids=["retyped", "renamed", "value renamed", "converted"],
)
def test_what_older_rows_carried_otherwise_is_not_proven_any_more(
    source: SourceUnderTest, added: str, then: str, name: str
) -> None:
    """The server has rounded it or has another text, or rows that were written since carry it under the
    former name."""
    source.sql(
        "CREATE TYPE mood AS ENUM ('ok')",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (1, 'one')",
    )
    source.tables.append(contract("t", COLUMNS))
    source.catch_up()
    for alter in (f"ALTER TABLE t ADD n {added}", then, "ALTER TABLE t ADD later text"):
        source.sql(alter)
        source.catch_up()
    known = SchemaChanges(source.store.folder).tables()
    with source.connected() as connection:
        now = schema_watch.read_seen(connection, source.tables, known)["t"]
    assert "default" not in now.line(name)
    assert now.line("later")["default"] is None


@pytest.mark.parametrize("evolution", ["pinned", ADDITIVE])
@pytest.mark.parametrize("filled", [True, False])
def test_a_column_that_was_filled_under_a_name_that_no_look_saw_is_not_proven(
    source: SourceUnderTest, filled: bool, evolution: str
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
    source.tables.append(replace(contract("t", COLUMNS), evolution=evolution))
    source.catch_up()
    source.sql("ALTER TABLE t ADD tmp text")
    if filled:
        source.sql("UPDATE t SET tmp = 'filled'")
    source.sql("ALTER TABLE t RENAME tmp TO w", "INSERT INTO t VALUES (2, 'two', 'new')")
    source.catch_up()
    known = SchemaChanges(source.store.folder).tables()
    with source.connected() as connection:
        now = schema_watch.read_seen(connection, source.tables, known)["t"]
    assert ("default" in now.line("w")) == (not filled)
    learned = LearnedColumns(source.home.path, source.settings.source).of("t")
    assert learned.keys() == ({"w"} if evolution == ADDITIVE else set())
    assert all(("default" in line) == (not filled) for line in learned.values())


def test_a_personal_column_that_takes_the_name_of_another_leaves_the_table_out_until_that_has_a_policy(
    three: SourceUnderTest,
) -> None:
    three.sql("ALTER TABLE agents ADD contact text, ADD email text")
    columns = tuple(
        Column(name, "text", pii="drop" if name == "email" else "keep", personal=name == "email")
        for name in ("id", "v", "contact", "email")
    )
    place = next(n for n, each in enumerate(three.tables) if each.name == "agents")
    three.tables[place] = replace(three.tables[place], columns=columns)
    three.catch_up()
    three.sql(
        "ALTER TABLE agents RENAME contact TO c",
        "ALTER TABLE agents RENAME email TO contact",
        "ALTER TABLE agents RENAME c TO email",
        "INSERT INTO agents VALUES (3, 'three', 'a@b.example', 'by phone')",
    )
    with pytest.raises(TableMissedChanges, match="email is called contact now"):
        three.catch_up()
    assert set(ParkedTables(three.store.folder, 1).all()) == {"agents"}
    assert [each.key for each in three.events("c") if each.source_table == "agents"] == [None]
    SnapshotRequests(three.store.folder).write("agents", "nobody has looked")
    with pytest.raises(TableMissedChanges, match="email is called contact now"):
        three.catch_up()
    contact = replace(columns[2], pii="drop", personal=True)
    three.tables[place] = replace(three.tables[place], columns=(*columns[:2], contact, columns[3]))
    three.catch_up()
    assert ParkedTables(three.store.folder, 1).all() == {}


def test_a_record_of_an_earlier_version_proves_no_null(tmp_path: Path) -> None:
    """It has only what the catalog said of older rows, not whether these were written anew."""
    columns = [
        {"number": 1, "name": "id", "pg_type": "integer", "not_null": True, "default": None, "before": None},
        {"number": 2, "name": "w", "pg_type": "integer", "not_null": False, "default": None, "before": "5"},
    ]
    table = {"relation": 7, "name": "public.t", "key": ["id"], "rows": 2, "at": None}
    table["columns"] = [each | {"labels": []} for each in columns]
    record = {"tables": {"t": table}, "certain": "0/1", "changes": [], "accepted": {}, "format_version": 2}
    (tmp_path / FILE).write_text(json.dumps(record))
    read = SchemaChanges(tmp_path).tables()["t"]
    assert [each.before_known for each in read.columns] == [False, True]
    assert (read.storage, read.last_number) == (None, 0)


def test_a_column_that_is_published_later_is_not_older_than_its_rows(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text, w text)",
        "INSERT INTO t VALUES (1, 'one', 'two')",
        f"CREATE PUBLICATION {source.slot} FOR TABLE t (id, v)",
    )
    source.tables.append(contract("t", COLUMNS))
    source.catch_up()
    source.sql(f"ALTER PUBLICATION {source.slot} SET TABLE t")
    SnapshotRequests(source.store.folder).write("t", "all columns")
    source.catch_up()
    ((added,),) = [[each] for each in SchemaChanges(source.store.folder).all()]
    assert (added.kind, added.column) == ("column_added", "w")
    assert not SchemaChanges(source.store.folder).tables()["t"].columns[-1].before_known


def test_a_read_of_what_does_not_fit_leaves_its_changes_open_and_the_next_start_follows_it(
    three: SourceUnderTest,
) -> None:
    """As before the read; with its changes accepted, the table would be left out."""
    with following(three):
        three.sql("ALTER TABLE tickets RENAME v TO w", "INSERT INTO tickets VALUES (3, 'three')")
        until(lambda: SchemaChanges(three.store.folder).all())
        SnapshotRequests(three.store.folder).write("tickets", "too early")
        until(lambda: sum(each.source_table == "tickets" for each in three.events("b")) == 2)
    three.wait_for_free_slot()
    three.catch_up()
    assert ParkedTables(three.store.folder, 1).all() == {}
    assert [each.kind for each in SchemaChanges(three.store.folder).open_changes("tickets")] == [
        "column_renamed"
    ]


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
