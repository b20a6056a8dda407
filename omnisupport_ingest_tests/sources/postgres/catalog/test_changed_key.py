"""A table gets a key of other columns, with values that its former key had too, through to its history."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.contracts_changes import propose, write
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.as_of import TableIncomplete, open_reading
from omnisupport_ingest.read.explain import NothingToExplain, explain
from omnisupport_ingest.review.erasing import erase
from omnisupport_ingest.sources.postgres.capture.added_tables import AddedTables
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.preflight.findings import PreflightFailed
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered
from omnisupport_ingest.sources.postgres.snapshot.landed_key import begin_keys
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.sources.postgres.catalog.test_every_schema_change import BESIDE, Case, Desk
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import following
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest
from omnisupport_ingest_tests.waiting import until

TABLE = "swapped"


class Story:
    """The table in three stretches: by its key ``id``, left out, and by its key ``n``. ``others``: tables
    beside it."""

    def __init__(self, source: SourceUnderTest, folder: Path, spark: SparkSession, *others: str) -> None:
        self.source, self.spark = source, spark
        self.desk = Desk(source, folder, spark, {name: Case([], [], []) for name in (TABLE, *others)})
        self._beside = 100

    def sql(self, *statements: str) -> None:
        self.desk.sql(TABLE, statements)

    def landed(self) -> None:
        """Wait until everything that has committed has landed."""
        self._beside += 1
        self.desk.sql(BESIDE, [f"INSERT INTO {{t}} VALUES ({self._beside}, 'landed?', 0, 'ok')"])
        mine = f'["{self._beside}"]'
        until(
            lambda: any((each.source_table, each.key) == (BESIDE, mine) for each in self.source.events("c"))
        )

    def by_id(self) -> None:
        """Rows whose ``n`` is the ``id`` of another row."""
        self.sql("UPDATE {t} SET n = 3 - id", "INSERT INTO {t} VALUES (3, 'three', 3, 'ok')")
        self.sql("INSERT INTO {t} VALUES (4, 'gone', 5, 'ok')", "DELETE FROM {t} WHERE id = 4")
        self.landed()

    def key_changes(self) -> None:
        self.sql("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (n)")
        self.sql("UPDATE {t} SET v = 'unseen' WHERE n = 1", "DELETE FROM {t} WHERE n = 3")
        self.landed()
        until(lambda: TABLE in ParkedTables(self.source.store.folder, 1).all())

    def contract_follows(self) -> None:
        proposal = propose(self.source.settings, self.desk.workspace, self.desk.contract(TABLE), every=False)
        assert [(step.at, step.compatibility) for step in proposal.steps] == [("x-cdc.key", "breaking")]
        write(self.desk.workspace.home.path, self.desk.contract(TABLE), proposal)

    def contract_is_edited(self) -> None:
        """By hand, before anything has changed at the source."""
        path = Path(self.desk.contract(TABLE).path)
        document = json.loads(path.read_text())
        document["x-cdc"]["key"], document["required"] = ["n"], [*document["required"], "n"]
        document["properties"]["n"]["type"] = "integer"
        path.write_text(json.dumps(document))
        self.source.tables[:] = [each.as_captured for each in contracts_in_force(self.source.settings)]

    def left_out(self) -> None:
        """Until the table is left out, and its contract has followed."""
        self.desk.captured()
        with following(self.source):
            self.by_id()
            self.desk.taken_in()
            self.key_changes()
        self.contract_follows()
        self.source.tables[:] = [each.as_captured for each in contracts_in_force(self.source.settings)]

    def by_n(self) -> None:
        self.sql("INSERT INTO {t} VALUES (9, 'nine', 9, 'ok')", "UPDATE {t} SET n = 12 WHERE n = 9")
        self.sql("UPDATE {t} SET v = 'seen' WHERE n = 2")
        self.sql("INSERT INTO {t} VALUES (5, 'five', 5, 'ok')", "DELETE FROM {t} WHERE n = 5")
        self.landed()

    @property
    def in_force(self) -> tuple[str, ...] | None:
        keys = LandedKeys(self.source.store.folder).of(f"public.{TABLE}")
        return None if keys is None else keys.eras[keys.in_force].key

    def everything(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Dimension and history without what names a run."""

        def content(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            kept = [{name: each for name, each in row.items() if name != "_cdc_state"} for row in rows]
            return sorted(kept, key=lambda row: repr(sorted(row.items())))

        return content(self.desk.rows(TABLE)), content(self.desk.rows(TABLE, past=True))


@pytest.mark.slow
def test_the_lake_shows_the_table_by_its_former_key_until_it_is_read_by_the_new_one(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    story = Story(source, tmp_path, spark)
    desk = story.desk
    desk.captured()
    source.tables[:] = [each.as_captured for each in source.tables]
    with following(source):
        story.by_id()
        desk.taken_in()
        before = desk.at_source(TABLE)
        assert desk.current(TABLE) == before
        story.key_changes()
        desk.taken_in()
        assert desk.current(TABLE) == before, "its changes land without a key"
        story.contract_follows()
        desk.taken_in()
        contract = desk.contract(TABLE)
        assert (contract.key, contract.as_captured.key) == (("id",), ("n",))
        assert desk.current(TABLE) == before
        source.tables[:] = [each.as_captured for each in desk.workspace.contracts]
        SnapshotRequests(source.store.folder).write(TABLE, "another key")
        until(lambda: story.in_force == ("n",))
        story.by_n()
    desk.taken_in()
    assert desk.contract(TABLE).key == ("n",)
    assert desk.current(TABLE) == desk.at_source(TABLE)
    rows = {row["_cdc_key"]: row for row in desk.rows(TABLE)}
    assert {json.loads(key)[0]: row["_cdc_is_deleted"] for key, row in rows.items()} == {
        **dict.fromkeys(("1", "2", "12"), False),
        **dict.fromkeys(("5", "9"), True),
    }
    assert all(row["n"] == int(json.loads(key)[0]) for key, row in rows.items())
    opened = [(row["n"], row["v"], row["_cdc_opened_by"]) for row in desk.rows(TABLE, past=True)]
    assert sorted(opened) == [
        (1, "unseen", "r"),
        (2, "one", "r"),
        (2, "seen", "u"),
        (5, "five", "c"),
        (9, "nine", "c"),
        (12, "nine", "moved"),
    ]

    # What is made from raw alone is the same.
    made = story.everything()
    shutil.rmtree(desk.workspace.home.lake / SOURCE)
    desk.taken_in()
    assert story.everything() == made

    since = desk.contract(TABLE).key_since
    assert since is not None
    with pytest.raises(TableIncomplete, match="had another key"):
        open_reading(desk.workspace, [desk.contract(TABLE)], Lsn(since.commit_lsn.value - 2))
    now = max(
        (each for each in source.manifests() if each.stream is not None), key=lambda each: each.batch_id
    )
    assert now.stream is not None
    reached = Lsn(now.stream.end_lsn.value - 1)
    reading = open_reading(desk.workspace, [desk.contract(TABLE)], reached)
    assert {row["n"] for row in reading.table(spark, desk.contract(TABLE)).collect()} >= {1, 2, 12}

    explained = explain(desk.workspace, desk.contract(TABLE), '["2"]')
    assert {each.op for each in explained.events if each.key is not None} == {"r", "u"}
    with pytest.raises(NothingToExplain):
        explain(Workspace.open(source.settings), desk.contract(TABLE), '["4"]')

    # An erasure takes along what the row landed with its former key; that key's text was another row's then.
    story.sql("DELETE FROM {t} WHERE n = 1")
    desk.captured()
    desk.taken_in()
    erased = erase(desk.workspace, desk.contract(TABLE), '["1"]', erased_by="tests", why="asked for")
    assert (erased.keys, erased.events) == (2, 4), "id 2: read and updated; n 1: read and deleted"
    desk.taken_in()
    assert {row["v"] for row in desk.rows(TABLE) if row["n"] == 1} == {None}
    deduped = desk.workspace.deduped(SOURCE).open()
    events = deduped.read(spark, deduped.all_files()).where(
        "source_table = 'swapped' AND op IN ('r', 'c', 'u')"
    )
    held = {(row["key"], json.loads(row["after"] or "{}").get("v")) for row in events.collect()}
    assert {('["1"]', "one"), ('["2"]', None), ('["3"]', "three")} <= held
    assert {('["2"]', "two"), ('["1"]', "unseen")}.isdisjoint(held)


@pytest.mark.slow
def test_a_contract_that_is_edited_while_capture_runs_counts_when_its_table_is_read_and_not_before(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running capture has the contract that it was started with. It takes the edited one when it prepares
    again, here for the fault of another table, and finds that somebody wants this one read."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    # The other way, in which a table that is left out is added while nothing else happens, would be faster.
    monkeypatch.setattr(AddedTables, "add_requested", lambda *_: None)
    story = Story(source, tmp_path, spark, "third")
    desk = story.desk
    desk.captured()
    source.tables[:] = [each.as_captured for each in source.tables]
    with following(source):
        story.by_id()
        desk.taken_in()
        story.contract_is_edited()
        story.sql("INSERT INTO {t} VALUES (6, 'six', 60, 'ok')", "UPDATE {t} SET n = 61 WHERE id = 6")
        story.landed()
        mine = [each for each in source.events("c", "u", "d") if each.source_table == TABLE]
        assert {each.key for each in mine if each.after is not None and "six" in each.after} == {'["6"]'}
        assert all(each.moved_from_key is None for each in mine), "an update of n is no key change"
        desk.taken_in()
        assert (desk.contract(TABLE).key, desk.contract(TABLE).as_captured.key) == (("id",), ("n",))
        assert desk.current(TABLE) == desk.at_source(TABLE), "the lake goes by what has landed, too"

        story.key_changes()
        SnapshotRequests(source.store.folder).write(TABLE, "another key")
        desk.sql("third", ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (n)"])
        desk.sql("third", ["UPDATE {t} SET v = 'unseen'"])
        until(lambda: "third" in ParkedTables(source.store.folder, 1).all())
        until(lambda: story.in_force == ("n",))
        assert ParkedTables(source.store.folder, 1).all().keys() == {"third"}
        story.by_n()
        since = [each for each in source.events("c", "u", "d") if each.source_table == TABLE][-5:]
        assert [each.key for each in since][-2:] == ['["5"]', '["5"]']
    desk.taken_in()
    assert desk.contract(TABLE).key == ("n",)
    assert desk.current(TABLE) == desk.at_source(TABLE)
    assert desk.current(BESIDE) == desk.at_source(BESIDE)


@pytest.mark.slow
def test_a_recovery_leaves_a_table_with_another_key_to_its_reading(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    story = Story(source, tmp_path, spark)
    desk = story.desk
    story.left_out()
    recovered: list[Recovered] = []
    lake = FoldedLake(source, tmp_path)
    _, done = source.capture().recover("a test", lake, threading.Event(), recovered.append)
    assert done and [each.table for each in recovered] == [BESIDE]
    desk.sql(BESIDE, ["INSERT INTO {t} VALUES (900, 'late', 9, 'ok')"])
    with pytest.raises(PreflightFailed, match=r"swapped the key \(n\), and what has landed"):
        desk.captured()
    assert story.in_force in (None, ("id",)), "nothing has read it by its new key yet"
    desk.taken_in()
    assert desk.current(BESIDE) == desk.at_source(BESIDE), "the others go on"
    SnapshotRequests(source.store.folder).write(TABLE, "another key")
    desk.captured()
    assert story.in_force == ("n",)
    desk.taken_in()
    assert desk.current(TABLE) == desk.at_source(TABLE)
    assert desk.current(BESIDE) == desk.at_source(BESIDE)


@pytest.mark.slow
def test_a_recovery_reads_a_table_whole_whose_reading_by_its_new_key_had_begun(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    story = Story(source, tmp_path, spark)
    desk = story.desk
    story.left_out()
    epoch = source.store.current_epoch()
    assert epoch is not None
    begin_keys(source.store, epoch, source.tables)
    assert story.in_force == ("id",)
    recovered: list[Recovered] = []
    source.capture().recover("a test", FoldedLake(source, tmp_path), threading.Event(), recovered.append)
    assert [each.table for each in recovered] == [BESIDE], "the lake has the other's rows by its former key"
    desk.captured()
    assert story.in_force == ("n",)
    desk.taken_in()
    assert desk.current(TABLE) == desk.at_source(TABLE)
