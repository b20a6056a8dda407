"""A table read by a cursor that gets another key: it waits, alone, until it is read whole by that key."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.landed_keys import KeysOfTable, LandedKeys
from omnisupport_ingest.contracts.model import BLOCK, RetentionPolicy
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.query import run
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.compare import compare
from omnisupport_ingest.sources.query.cursor import END_ORDINAL
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.landed_key import ReadingKeys, is_unique
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.reader import Moment
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, TableSync, sync
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.sources.query.platform_of_desk import Platform
from omnisupport_ingest_tests.sources.query.test_sqlite import Lite, lite  # noqa: F401 (a fixture)
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk, contract

WIDER = (
    "ALTER TABLE tickets ALTER subject SET NOT NULL, DROP CONSTRAINT tickets_pkey,"
    " ADD PRIMARY KEY (id, subject)"
)
TICKETS = "public.tickets"


def keys(desk: Desk) -> KeysOfTable:
    found = LandedKeys(desk.store.folder).of(desk.table.full_name)
    assert found is not None
    return found


def by_id_and_subject(desk: Desk) -> None:
    """Give the contract the key (id, subject)."""
    columns = tuple(replace(each, nullable=False) for each in desk.table.columns)
    desk.table = replace(desk.table, key=("id", "subject"), columns=columns)


def test_a_table_whose_key_no_longer_tells_its_rows_apart_is_not_read_and_others_are(desk: Desk) -> None:
    desk.run("CREATE TABLE notes (LIKE tickets INCLUDING ALL)")
    notes = replace(contract(), name="notes", table="notes")

    def synced() -> dict[str, TableSync]:
        inlet = replace(desk.inlet(), tables=(desk.table, notes))
        with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
            return {each.table: each for each in sync(inlet, reader, state).tables}

    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    synced()
    desk.run(f"{WIDER}; INSERT INTO tickets VALUES (1, 'uno'); INSERT INTO notes VALUES (1, 'a note')")
    found = synced()
    assert found[TICKETS].blocked and not found[TICKETS].landed
    assert found["public.notes"].finished and found["public.notes"].landed == 1
    assert [each.kind for each in SchemaChanges(desk.store.folder).all()][-1] == "key_changed"
    # Taken back, nothing is left to decide.
    desk.run(
        "DELETE FROM tickets WHERE subject = 'uno';"
        "ALTER TABLE tickets DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id)"
    )
    assert synced()[TICKETS].finished


@pytest.mark.parametrize(
    "alter",
    [
        "DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id, subject)",
        "DROP CONSTRAINT tickets_pkey",
    ],
)
def test_a_reading_of_the_whole_table_settles_no_key_that_tells_nothing_apart(desk: Desk, alter: str) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run(f"ALTER TABLE tickets ALTER subject SET NOT NULL, {alter}")
    desk.sync()
    desk.refresh("restored from a backup")
    # Where nothing at all is unique, a person may say that the contract's key is.
    assert desk.sync().tables[0].blocked == ("PRIMARY KEY" in alter)


@pytest.mark.parametrize("another_key", [False, True])
def test_one_full_refresh_is_enough_for_a_primary_key_that_went_before_anything_looked_again(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_key: bool
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch)
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    home.sync()
    desk.run("ALTER TABLE tickets ALTER subject SET NOT NULL, DROP CONSTRAINT tickets_pkey")
    desk.run("INSERT INTO tickets VALUES (2, 'two')")
    if another_key:
        home.edit_contract(_by_id_and_subject)
    assert [each.landed for each in home.report(reason="its key is still right").tables] == [2]
    desk.run("INSERT INTO tickets VALUES (3, 'three')")
    assert [each.landed for each in home.report().tables] == [1]


def test_a_contract_that_blocks_is_not_answered_for_by_a_refresh_before_anybody_could_look(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch, evolution=BLOCK)
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    home.sync()
    desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_pkey; INSERT INTO tickets VALUES (2, 'two')")
    assert [each.blocked for each in home.report(reason="restored from a backup").tables] == [True]
    assert [each.landed for each in home.report(reason="its key is still right").tables] == [2]


def _by_id_and_subject(contract: dict[str, Any]) -> None:
    contract["x-cdc"]["key"], contract["required"] = ["id", "subject"], ["id", "subject"]
    contract["properties"]["subject"]["type"] = "string"


def test_one_full_refresh_says_nothing_for_a_primary_key_of_other_columns_that_nothing_has_seen(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch)
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    home.sync()
    desk.run(f"{WIDER}; INSERT INTO tickets VALUES (1, 'uno')")
    assert [each.blocked for each in home.report(reason="restored from a backup").tables] == [True]
    # Nor for one that goes between the request and the reading.
    desk.run("DELETE FROM tickets WHERE subject = 'uno'")
    desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id)")
    assert home.report(reason="its key is back").finished
    _going_after_the_request(desk, monkeypatch)
    assert [each.blocked for each in home.report(reason="restored from a backup").tables] == [True]


def _going_after_the_request(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*given: Any) -> int:
        epoch = refresh(*given)
        desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_pkey")
        return epoch

    monkeypatch.setattr(run, "refresh", begun)


def test_an_index_that_the_contract_s_key_rests_on_is_missed_whatever_the_primary_key_is(desk: Desk) -> None:
    desk.run("ALTER TABLE tickets ADD number int NOT NULL UNIQUE")
    number = replace(desk.table.columns[0], name="number", pg_type="integer")
    desk.table = replace(desk.table, key=("number",), columns=(*desk.table.columns, number))
    desk.run("INSERT INTO tickets VALUES (1, 'one', now(), 1)")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_number_key")
    desk.run("INSERT INTO tickets VALUES (2, 'two', now(), 1)")
    assert desk.sync().tables[0].blocked
    desk.run("UPDATE tickets SET number = id; ALTER TABLE tickets ADD UNIQUE (number)")
    assert desk.sync().finished


def test_a_key_that_nothing_ever_declared_at_the_source_goes_on(desk: Desk) -> None:
    desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_pkey; INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets ADD row_number serial PRIMARY KEY; INSERT INTO tickets VALUES (2, 'two')")
    assert desk.sync().finished and '["2"]' in {each["key"] for each in desk.events()}


@pytest.mark.parametrize("moved", [True, False])
def test_a_key_column_under_whose_name_another_one_stands_is_another_key(desk: Desk, moved: bool) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    primary = ", DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id)" if moved else ""
    desk.run("ALTER TABLE tickets RENAME id TO legacy")
    desk.run(f"ALTER TABLE tickets ADD id bigint NOT NULL DEFAULT 7{primary}")
    assert desk.sync().tables[0].blocked
    desk.refresh()
    assert desk.sync().tables[0].blocked == (not moved), "nothing makes the new column unique"


def test_a_key_column_that_is_dropped_and_later_added_again_is_another_one(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP id")
    with pytest.raises(QueryRefused, match="id"):
        desk.sync()
    desk.run("ALTER TABLE tickets ADD id bigint PRIMARY KEY DEFAULT 7")
    assert desk.sync().tables[0].blocked
    desk.refresh()
    assert desk.sync().finished


def test_a_key_column_that_is_renamed_and_back_is_the_same_one(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets RENAME id TO number")
    with pytest.raises(QueryRefused, match="id"):
        desk.sync()
    desk.run("ALTER TABLE tickets RENAME number TO id; INSERT INTO tickets VALUES (2, 'two')")
    assert desk.sync().tables[0].landed == 1


def test_another_contract_key_that_tells_nothing_apart_either_settles_nothing(desk: Desk) -> None:
    desk.run("ALTER TABLE tickets ALTER subject SET NOT NULL, DROP CONSTRAINT tickets_pkey")
    desk.run("ALTER TABLE tickets ADD number serial PRIMARY KEY, ADD UNIQUE (id, subject)")
    by_id_and_subject(desk)
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets DROP CONSTRAINT tickets_id_subject_key")
    assert desk.sync().tables[0].blocked
    desk.table = replace(desk.table, key=("subject", "id"))
    desk.refresh()
    assert desk.sync().tables[0].blocked
    desk.run("ALTER TABLE tickets ADD UNIQUE (id, subject)")
    assert desk.sync().finished


def test_of_a_view_in_the_place_of_its_table_only_the_contract_s_key_is_watched(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets RENAME TO kept; CREATE VIEW tickets AS SELECT * FROM kept")
    desk.run("INSERT INTO kept VALUES (2, 'two')")
    desk.sync()
    assert '["2"]' in {each["key"] for each in desk.events()}


def test_a_contract_that_is_corrected_before_anything_has_landed_needs_no_reading_anew(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    right = desk.table
    unknown = replace(right.columns[0], name="number")
    desk.table = replace(right, key=("number",), columns=(*right.columns, unknown))
    with pytest.raises(QueryRefused):
        desk.sync()
    desk.table = right
    assert desk.sync().tables[0].landed == 1


def test_a_table_that_waited_until_its_windows_may_be_sealed_is_read_whole(desk: Desk) -> None:
    desk.table = replace(desk.table, retention=RetentionPolicy(raw=timedelta(hours=2)))
    notes = replace(desk.table, name="notes", table="notes")
    desk.run("CREATE TABLE notes (LIKE tickets INCLUDING ALL); INSERT INTO tickets VALUES (1, 'one')")
    desk.run("INSERT INTO notes VALUES (1, 'a note')")

    def synced(*, later: timedelta = timedelta(0)) -> SyncReport:
        inlet = replace(desk.inlet(), tables=(desk.table, notes), clock=lambda: datetime.now(UTC) + later)
        with closing(_Later(desk.dsn, later)) as reader, QueryState(desk.store.folder) as state:
            return sync(inlet, reader, state)

    synced()
    former = desk.table
    by_id_and_subject(desk)
    assert [each.blocked for each in synced(later=timedelta(hours=5)).tables] == [True, False]
    desk.table = former
    found = synced(later=timedelta(hours=5))
    assert [(each.blocked, each.full) for each in found.tables] == [(False, True), (False, False)]
    assert desk.store.current_epoch().rows_from is not None  # type: ignore[union-attr]


class _Later(PostgresReader):
    """Reads a server whose clock is ``later`` than it is."""

    def __init__(self, dsn: str, later: timedelta) -> None:
        super().__init__(dsn)
        self._later = later

    def begin(self) -> Moment:
        moment = super().begin()
        return replace(moment, clock=moment.clock + self._later)


@pytest.mark.parametrize(
    "alter",
    [
        "DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id, subject), ADD UNIQUE (id)",
        "DROP CONSTRAINT tickets_pkey, ADD UNIQUE (id)",
    ],
)
def test_a_table_goes_on_while_something_unique_tells_its_rows_apart(desk: Desk, alter: str) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run(f"ALTER TABLE tickets ALTER subject SET NOT NULL, {alter}")
    desk.run("INSERT INTO tickets VALUES (2, 'two')")
    assert desk.sync().tables[0].landed == 1


def test_a_contract_with_another_key_is_not_read_by_until_the_table_is_read_whole(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    by_id_and_subject(desk)
    desk.run("INSERT INTO tickets VALUES (2, 'two')")
    assert desk.sync().tables[0].blocked
    assert [each["key"] for each in desk.events()] == ['["1"]']
    assert (keys(desk).newest, keys(desk).waits) == (("id",), False)

    epoch = desk.refresh()
    assert keys(desk).waits and (keys(desk).eras[-1].epoch, keys(desk).eras[-1].ordinal) == (
        epoch,
        END_ORDINAL,
    )
    assert desk.sync().finished
    assert {each["key"] for each in desk.events() if each["epoch"] == epoch} == {
        None, '["1","one"]', '["2","two"]'
    }  # fmt: skip
    assert (keys(desk).newest, keys(desk).in_force) == (("id", "subject"), 1)
    assert all(contract_key_at(desk, each) for each in desk.events() if each["epoch"] == epoch)
    # From now on as usual.
    desk.run("INSERT INTO tickets VALUES (3, 'three')")
    assert desk.sync().tables[0].landed == 1


def contract_key_at(desk: Desk, event: dict[str, int]) -> bool:
    held = replace(desk.table, key_eras=keys(desk).eras, key_era=keys(desk).in_force)
    return held.has_key_at((event["epoch"], event["commit_lsn"], event["ordinal"]))


def test_keys_are_not_compared_before_the_reading_by_the_new_one_has_ended(desk: Desk) -> None:
    desk.run("INSERT INTO tickets SELECT g, 't' || g FROM generate_series(1, 5) g")
    desk.sync()
    by_id_and_subject(desk)
    desk.refresh()
    desk.page_rows, pages = 2, iter([False, True])
    assert not desk.sync(stopped=lambda: next(pages, True)).finished
    with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
        assert compare(desk.inlet(), reader, state, {}).tables == []
    assert keys(desk).waits
    assert desk.sync().finished
    assert not keys(desk).waits


class _Died(Exception):
    pass


def _dies(*_: object) -> None:
    raise _Died


@pytest.mark.parametrize("step", ["begin", "settle"])
def test_a_reading_that_dies_beside_the_record_is_ended_by_the_next_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two')")
    desk.sync()
    by_id_and_subject(desk)
    with monkeypatch.context() as patched:
        patched.setattr(ReadingKeys, step, _dies)
        with pytest.raises(_Died):
            desk.refresh()
            desk.sync()
    assert keys(desk).in_force == 0
    if step == "begin":
        assert desk.sync().tables[0].blocked, "no row lands by a key that nothing records"
        desk.refresh()
    assert desk.sync().finished
    assert (keys(desk).in_force, len(keys(desk).eras)) == (1, 2)
    rows = {each["key"] for each in desk.events() if contract_key_at(desk, each) and each["key"]}
    assert rows == {'["1","one"]', '["2","two"]'}


def test_a_key_column_that_is_renamed_is_the_same_column(desk: Desk) -> None:
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets RENAME id TO number; INSERT INTO tickets VALUES (2, 'two')")
    renamed = tuple(
        replace(each, name="number") if each.name == "id" else each for each in desk.table.columns
    )
    desk.table = replace(desk.table, key=("number",), columns=renamed)
    assert desk.sync().finished
    assert (keys(desk).newest, len(keys(desk).eras)) == (("number",), 1)
    assert [each["key"] for each in desk.events()][-1] == '["2"]'


def test_another_database_tells_its_key_too(lite: Lite) -> None:  # noqa: F811
    lite.base.execute("INSERT INTO tickets (id, subject) VALUES (1, 'one')")
    lite.sync()
    lite.base.executescript(
        "ALTER TABLE tickets RENAME TO was;"
        "CREATE TABLE tickets (id INTEGER NOT NULL, subject TEXT NOT NULL,"
        " updated_at DATETIME DEFAULT (datetime('now')), paid, done, raw, PRIMARY KEY (id, subject));"
        "INSERT INTO tickets SELECT * FROM was; DROP TABLE was;"
        "INSERT INTO tickets (id, subject) VALUES (1, 'uno')"
    )
    assert lite.sync().blocked
    desk = lite.desk
    (change,) = [each for each in SchemaChanges(desk.store.folder).all() if each.kind == "key_changed"]
    assert (change.before, change.after) == ("id", "id, subject")
    by_id_and_subject(desk)
    assert lite.sync().blocked
    with QueryState(desk.store.folder) as state:
        epoch = refresh(desk.inlet(), state, [desk.table], "another key")
    assert lite.sync().finished
    assert {each["key"] for each in desk.events() if each["epoch"] == epoch and each["key"]} == {
        '["1","one"]', '["1","uno"]'
    }  # fmt: skip


def test_a_unique_index_of_another_database_is_key_enough(lite: Lite) -> None:  # noqa: F811
    lite.base.executescript(
        "DROP TABLE tickets; CREATE TABLE tickets (id INTEGER NOT NULL UNIQUE, subject TEXT PRIMARY KEY,"
        " updated_at DATETIME DEFAULT (datetime('now')), paid, done, raw);"
        "INSERT INTO tickets (id, subject) VALUES (1, 'one')"
    )
    assert lite.sync().finished
    with closing(DialectReader(lite.url)) as reader:
        reader.begin()
        found = reader.schemas([lite.desk.table], {})
    assert found is not None and is_unique(lite.desk.table, found["tickets"])


@pytest.mark.slow
def test_a_real_change_of_the_key_goes_through_to_dimension_and_history(
    desk: Desk, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch)
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    home.sync()
    home.take_in(spark)
    desk.run(f"DELETE FROM tickets WHERE id = 3; {WIDER}; INSERT INTO tickets VALUES (2, 'due'), (4, 'four')")

    def shown(wait: Callable[[], None] = lambda: None) -> list[tuple[object, ...]]:
        home.take_in(spark)
        wait()
        return sorted((row["id"], row["subject"]) for row in home.rows(spark) if not row["_cdc_is_deleted"])

    home.sync()
    (asked,) = [each for each in home.asked() if each[0] == "key_changed"]
    assert asked[2].endswith("x-cdc.key says id")
    found = command("preflight", SOURCE)
    assert found.code == 1 and "within the key (id) of public.tickets any more" in found.out
    assert shown() == [(1, "one"), (2, "two"), (3, "three")]
    done = json.loads(command("contracts", "propose", "tickets", "--write", "--json").out)
    assert [each["at"] for each in done["steps"] if each["at"] == "x-cdc.key"] == ["x-cdc.key"]
    assert home.contract.key == ("id",) and home.contract.next_key == ("id", "subject")
    ((*_, edit),) = [each for each in home.asked() if each[0] == "key_changed"]
    assert edit.startswith(f"omnisupport-ingest sync {SOURCE} --table tickets --full-refresh")
    home.sync()
    assert shown() == [(1, "one"), (2, "two"), (3, "three")], "until the read, the former key"
    found = command("preflight", SOURCE)
    assert found.code == 1 and "has the key (id). So it is not read." in found.out

    home.sync(reason="its key changed")
    rows = [(1, "one"), (2, "due"), (2, "two"), (4, "four")]
    assert shown() == rows
    versions = [(row["id"], row["subject"], row["_cdc_closed_by"]) for row in home.rows(spark, past=True)]
    assert sorted(versions) == [(*each, None) for each in rows], "the history begins with that reading"
    assert [each for each in home.asked() if each[0] == "key_changed"] == []
    desk.run("UPDATE tickets SET updated_at = clock_timestamp() WHERE subject = 'due'")
    desk.run("INSERT INTO tickets VALUES (4, 'quattro')")
    home.sync()
    assert shown() == sorted([*rows, (4, "quattro")])
    assert command("preflight", SOURCE).code == 0
