"""A table of a warehouse follows the current state: on a real server and real Delta tables."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.targets.columns import TargetRefused
from omnisupport_ingest.targets.sync import (
    NoTarget,
    TargetAhead,
    TargetSynced,
    TargetUnavailable,
    sync_target,
    target_lag,
)
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_layers import run
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("spark")

ENV = "TESTED_WAREHOUSE_DSN"
ODD = 'a\\tb\t"c",\n\\.\n\r{x}'
INSERT = Commit(
    10,
    1,
    [
        Change("c", number, {"title": f"t{number}", "body": ODD if number == 3 else "b"})
        for number in range(1, 41)
    ],
)
UPDATE = Commit(20, 61, [Change("u", 17, {"title": "new"}, unchanged=("body",)), Change("d", 18)])


class Warehouse:
    """The schema of one test in the embedded server."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.dsn, self.schema = dsn, schema

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(statement.replace("NOTES", f"{self.schema}.notes"))
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> dict[int, tuple[Any, ...]]:
        return {row[0]: row[1:] for row in self.ask("SELECT id, title, body, _cdc_is_deleted FROM NOTES")}


@pytest.fixture
def warehouse(
    postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Warehouse]:
    monkeypatch.setenv(ENV, postgres.dsn())
    found = Warehouse(postgres.dsn(), f"w{abs(hash(str(tmp_path)))}")
    yield found
    found.ask(f"DROP SCHEMA IF EXISTS {found.schema} CASCADE")


def told(story: Story, document: dict[str, Any]) -> None:
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)


def with_target(warehouse: Warehouse, **more: Any) -> dict[str, Any]:
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"]["target"] = {"connection": {"env": ENV}, "schema": warehouse.schema}
    document["properties"] |= more
    return document


@pytest.fixture
def story(
    tmp_path: Path, warehouse: Warehouse, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Story:
    """Forty rows in files of four to eight, not yet in the target."""
    monkeypatch.setattr(dimensions, "ROWS_PER_FILE", 4)
    story = Story(tmp_path)
    told(story, with_target(warehouse))
    story.land(INSERT)
    run(story, spark, FIRST)
    return story


def sync(story: Story, **how: bool) -> TargetSynced:
    return sync_target(story.workspace, story.contract, **how)


def counts(done: TargetSynced) -> tuple[int, int, int]:
    return done.written, done.taken_back, done.deleted


def same_as_the_lake(story: Story, warehouse: Warehouse, spark: SparkSession) -> None:
    snapshot = story.workspace.dimension(story.contract).open()
    names = ["id", "title", "body", "_cdc_key", "_cdc_is_deleted", "_cdc_epoch", "_cdc_commit_lsn"]
    names += ["_cdc_ordinal", "_cdc_row_hash"]
    lake = {tuple(row) for row in snapshot.read(spark, snapshot.all_files()).select(*names).collect()}
    assert set(warehouse.ask(f"SELECT {', '.join(names)} FROM NOTES")) == lake


@pytest.mark.quick
def test_rows_arrive_whole_and_a_repeated_sync_writes_nothing(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    assert counts(sync(story)) == (40, 0, 0)
    assert warehouse.rows()[3] == ("t3", ODD, False)
    same_as_the_lake(story, warehouse, spark)
    before = warehouse.ask("SELECT xmin, ctid FROM NOTES")
    for how in ({}, {"compare": True}, {"anew": True}):
        assert counts(sync(story, **how)) == (0, 0, 0)
    assert warehouse.ask("SELECT xmin, ctid FROM NOTES") == before


def test_an_update_sends_the_rows_that_changed_and_marks_what_was_deleted(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    story.land(UPDATE)
    run(story, spark, SECOND)
    lag = target_lag(story.workspace, story.contract)
    assert (lag.versions, lag.rows, lag.problem) == (1, 2, None)
    done = sync(story)
    assert counts(done) == (2, 0, 0) and not done.whole
    assert warehouse.rows()[17] == ("new", "b", False)
    assert warehouse.rows()[18] == ("t18", "b", True)
    same_as_the_lake(story, warehouse, spark)
    lag = target_lag(story.workspace, story.contract)
    assert (lag.versions, lag.rows, lag.seconds) == (0, 0, 0.0)


def test_a_replay_of_every_window_changes_nothing(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    story.land(UPDATE)
    run(story, spark, FIRST, SECOND)
    sync(story)
    before = warehouse.ask("SELECT xmin, ctid FROM NOTES")
    run(story, spark, FIRST, SECOND, replay=True)
    assert counts(sync(story)) == (0, 0, 0)
    assert warehouse.ask("SELECT xmin, ctid FROM NOTES") == before


def test_where_files_were_swept_all_rows_are_compared_with_the_same_end(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    before = story.workspace.dimension(story.contract).open().all_files()
    story.land(UPDATE)
    run(story, spark, SECOND)
    kept = {file.path for file in story.workspace.dimension(story.contract).open().all_files()}
    gone = [file for file in before if file.path not in kept]
    for file in gone:
        Path(file.uri).unlink()
    done = sync(story)
    assert gone and done.whole and counts(done) == (2, 0, 0)
    same_as_the_lake(story, warehouse, spark)


def test_a_lake_that_was_restored_never_overwrites_what_is_newer(
    story: Story, warehouse: Warehouse, spark: SparkSession, tmp_path: Path
) -> None:
    folder = story.workspace.dimension(story.contract).folder
    shutil.copytree(folder, tmp_path / "backup")
    story.land(UPDATE)
    run(story, spark, SECOND)
    sync(story)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with pytest.raises(TargetAhead, match="version"):
        sync(story)
    assert warehouse.rows()[17][0] == "new"
    # A person may say that the lake is right: then rows go back, and what the target alone has goes.
    assert counts(sync(story, anew=True)) == (2, 2, 0)
    same_as_the_lake(story, warehouse, spark)


def test_a_current_state_made_anew_from_less_is_refused_and_from_all_changes_nothing(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    story.land(UPDATE)
    run(story, spark, FIRST, SECOND)
    sync(story)
    before = warehouse.ask("SELECT xmin, ctid FROM NOTES")
    for table in (story.workspace.dimension(story.contract), story.workspace.net_changes(story.contract)):
        shutil.rmtree(table.folder)
    run(story, spark, FIRST)
    with pytest.raises(TargetAhead, match="made anew"):
        sync(story)
    run(story, spark, SECOND)
    done = sync(story)
    assert done.whole and counts(done) == (0, 0, 0)
    assert warehouse.ask("SELECT xmin, ctid FROM NOTES") == before


def test_the_target_of_another_table_is_refused(story: Story, warehouse: Warehouse) -> None:
    sync(story)
    before = warehouse.rows()
    warehouse.ask(f"UPDATE {warehouse.schema}._omnisupport_targets SET source = 'other_desk'")
    with pytest.raises(TargetRefused, match=r"is that of other_desk\.notes"):
        sync(story, anew=True)
    assert warehouse.rows() == before


def test_a_row_that_a_guarded_merge_would_make_older_stays(story: Story, warehouse: Warehouse) -> None:
    """Behind the versions stands the position of each row: what is above the lake's is kept."""
    sync(story)
    warehouse.ask("UPDATE NOTES SET _cdc_commit_lsn = 99, title = 'later' WHERE id = 5")
    warehouse.ask(f"UPDATE {warehouse.schema}._omnisupport_targets SET entry = 'x'")
    with pytest.raises(TargetAhead):
        sync(story)
    assert warehouse.rows()[5][0] == "later"


def test_rows_that_are_purged_leave_the_target(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    document = with_target(warehouse)
    document["x-cdc"]["events"] = {"soft_delete_column": None, "purge_deleted_after": "P8D"}
    told(story, document)
    story.land(UPDATE)
    run(story, spark, FIRST, SECOND)
    sync(story)
    assert 18 in warehouse.rows()
    late = Commit(30, 20 * 24 * 3600, [Change("u", 1, {"title": "on"}, unchanged=("body",))])
    story.clock = story.clock.replace(month=2)
    story.land(late)
    run(story, spark, "2026-01-21T1200")
    done = sync(story)
    assert done.deleted == 1 and 18 not in warehouse.rows()
    same_as_the_lake(story, warehouse, spark)


def test_a_column_that_the_contract_gains_is_added_with_its_values(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    number = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "A number."}
    told(story, with_target(warehouse, number=number))
    story.land(Commit(20, 61, [Change("u", 2, {"title": "two", "number": "7"}, unchanged=("body",))]))
    run(story, spark, FIRST, SECOND)
    done = sync(story)
    assert done.added == ("number",)
    assert dict(warehouse.ask("SELECT id, number FROM NOTES WHERE number IS NOT NULL")) == {2: 7}
    same_as_the_lake(story, warehouse, spark)
    assert counts(sync(story, compare=True)) == (0, 0, 0)


def test_a_column_of_another_type_is_refused_with_the_sql(story: Story, warehouse: Warehouse) -> None:
    sync(story)
    warehouse.ask("ALTER TABLE NOTES ALTER COLUMN title TYPE varchar(50)")
    with pytest.raises(TargetRefused) as refused:
        sync(story)
    assert 'ALTER COLUMN "title" TYPE text USING "title"::text' in refused.value.fix


def test_a_table_that_no_sync_made_is_left_alone(story: Story, warehouse: Warehouse) -> None:
    warehouse.ask(f"CREATE SCHEMA {warehouse.schema}")
    warehouse.ask("CREATE TABLE NOTES (id bigint)")
    with pytest.raises(TargetRefused, match="not made by a sync"):
        sync(story)


def test_a_value_that_the_target_refuses_is_named_without_the_value(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    warehouse.ask("ALTER TABLE NOTES ADD CHECK (title <> 'new')")
    story.land(UPDATE)
    run(story, spark, SECOND)
    with pytest.raises(TargetRefused, match="CheckViolation") as refused:
        sync(story)
    assert "'new'" not in str(refused.value)
    warehouse.ask("ALTER TABLE NOTES DROP CONSTRAINT notes_title_check")
    assert counts(sync(story)) == (2, 0, 0)


def test_a_wrong_connection_is_named_without_its_password(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dsn in ("postgresql://me:s3cret@127.0.0.1:1/none", "host=127.0.0.1 port=x password=s3cret"):
        monkeypatch.setenv(ENV, dsn)
        with pytest.raises(TargetUnavailable) as refused:
            sync(story)
        assert "s3cret" not in str(refused.value) and ENV in str(refused.value)
        lag = target_lag(story.workspace, story.contract)
        assert lag.problem == refused.value.problem
    told(story, CONTRACT)
    with pytest.raises(NoTarget):
        sync(story)


_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.targets.sync import sync_target
home, contracts = map(Path, sys.argv[1:])
workspace = Workspace.open(Settings(home=home, window="minutes:1", contracts_dir=contracts, _env_file=None))
sync_target(workspace, workspace.contracts.all[0])
"""


@pytest.mark.parametrize(
    ("point", "is_there"), [("target.commit.before", False), ("target.commit.after", True)]
)
@pytest.mark.parametrize("first", [True, False], ids=["the first sync", "a later one"])
def test_a_sync_that_is_killed_is_whole_or_not_there(
    story: Story, warehouse: Warehouse, spark: SparkSession, point: str, *, is_there: bool, first: bool
) -> None:
    if not first:
        sync(story)
        story.land(UPDATE)
        run(story, spark, SECOND)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    settings = story.workspace.settings
    ends = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(settings.home), str(settings.contracts_dir)],
        env={**inherited, VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr
    rows = 40 if first else 2
    assert counts(sync(story)) == ((0 if is_there else rows), 0, 0)
    same_as_the_lake(story, warehouse, spark)
    assert not [*story.workspace.home.run.glob("target-*")]


def test_a_policy_for_personal_data_that_comes_later_holds_in_the_target_too(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    assert warehouse.rows()[3] == ("t3", ODD, False)
    document = with_target(warehouse)
    document["x-cdc"]["pii"] = {
        "title": {"policy": "mask", "mask": "text", "note": "A test."},
        "body": {"policy": "drop", "note": "A test."},
    }
    told(story, document)
    run(story, spark, FIRST)
    sync(story)
    assert set(warehouse.rows().values()) == {("***", None, False)}
    story.land(UPDATE)
    run(story, spark, SECOND)
    sync(story)
    assert set(warehouse.rows().values()) == {("***", None, False), ("***", None, True)}
