"""What an update of a history reads and writes: files of the keys it touches, and no others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.checks.history_checks import open_rows_are_current_state, versions_do_not_overlap
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.contenthash import ContentHash, hash_of_files
from omnisupport_ingest.lake.key_files import SEALED, FileRange, KeyFile, KeyOrder
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers import type_changes
from omnisupport_ingest.layers.dimension import dimensions, keyed_update, net_changes, update_tasks
from omnisupport_ingest.layers.dimension.range_update import FilesToUpdate
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, SOURCE, Change, Commit, Story

KEYS = range(1, 41)
MANY = Commit(10, 1, [Change("c", number, {"title": f"t{number}", "body": "b"}) for number in KEYS])
Version = tuple[int, str | None, str | None, str, str | None]


@pytest.fixture(scope="module", autouse=True)
def small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "ROWS_PER_FILE", 4)
        yield


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Forty versions in files of four to eight."""
    story = Story(tmp_path_factory.mktemp("in_place") / "told")
    story.land(MANY)
    run(story, spark, FIRST)
    return story


@pytest.fixture
def story(told: Story, tmp_path: Path) -> Story:
    return told.copied(tmp_path / "told")


def run(story: Story, spark: SparkSession, *windows: str) -> Checkpoint:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run")
    return history.materialize(story.workspace, spark, story.contract, "run")


def files_of(story: Story) -> set[str]:
    return {file.path for file in story.workspace.history(story.contract).open().all_files()}


def versions(story: Story, spark: SparkSession) -> list[Version]:
    snapshot = story.workspace.history(story.contract).open()
    rows = snapshot.read(spark, snapshot.all_files()).orderBy("id", "_cdc_valid_from_position")
    return [
        (row["id"], row["title"], row["body"], row["_cdc_opened_by"], row["_cdc_closed_by"])
        for row in rows.collect()
    ]


def same_as_made_whole(story: Story, spark: SparkSession) -> bool:
    """Whether the checkpoint is of the rows in the files, and of those that the whole has if made again."""
    snapshot = story.workspace.history(story.contract).open()
    told = snapshot.state("").checkpoint.content_hash  # type: ignore[union-attr]
    in_files = str(hash_of_files([file.uri for file in snapshot.all_files()], "_cdc_row_hash"))
    again = history.materialize(story.workspace, spark, story.contract, "again", replay=True)
    return told == in_files == again.content_hash


def test_what_a_run_has_to_make_is_told_before_it_opens_a_session(story: Story, spark: SparkSession) -> None:
    def told(*, replay: bool = False) -> int:
        return history.rows_to_make(story.workspace, story.contract, replay=replay)

    assert (told(), told(replay=True)) == (0, 40)
    story.land(Commit(20, 2, [update(17, "new")]))
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    # The event, and the file of its key.
    assert told() == 1 + 4
    story.land(Commit(30, 3, [update(number, "newer") for number in KEYS]))
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    assert told() == 41 + 40


def test_a_history_that_waits_for_a_person_has_no_rows_to_make(story: Story) -> None:
    document: dict[str, Any] = copy.deepcopy(CONTRACT)
    document["properties"]["title"] = {
        "type": ["integer", "null"],
        "x-pg-type": "integer",
        "description": "T.",
    }
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    assert history.rows_to_make(story.workspace, story.contract, replay=False) == 0
    type_changes.ask_for(story.workspace, story.contract)
    assert history.rows_to_make(story.workspace, story.contract, replay=False) == 40


def update(number: int, title: str) -> Change:
    return Change("u", number, {"title": title}, unchanged=("body",))


def test_a_change_of_one_key_replaces_one_file_by_one_job_and_reads_no_event_of_before(
    story: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(story)
    assert len(before) == 10
    story.land(Commit(20, 2, [update(17, "new")]))
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")

    def no_events(*_: object) -> None:
        pytest.fail("the events of before are read")

    with monkeypatch.context() as patch:
        patch.setattr(EventFiles, "events_in", no_events)
        patch.setattr(EventFiles, "accepted", no_events)
        spark.sparkContext.setJobGroup("a history", "one run")
        history.materialize(story.workspace, spark, story.contract, "run")
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("a history")) == 1
    after = files_of(story)
    assert len(before - after) == len(after - before) == 1
    assert [row for row in versions(story, spark) if row[0] == 17] == [
        (17, "t17", "b", "c", "u"),
        (17, "new", "b", "u", None),
    ]
    assert same_as_made_whole(story, spark)


def test_the_checks_look_at_the_files_of_the_last_run_and_at_all_where_that_is_asked_for(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 2, [update(17, "new")]))
    run(story, spark, FIRST)
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    dimensions.update(story.workspace, spark, story.contract, "run")
    for check, what, of_run, of_all in (
        (open_rows_are_current_state, "open_versions", 4, 40),
        (versions_do_not_overlap, "versions", 5, 41),
    ):
        some = check(story.workspace, spark, story.contract)
        assert (some.passed, some.numbers[what]) == (True, of_run)
        every = check(story.workspace, spark, story.contract, whole=True)
        assert (every.passed, every.numbers[what]) == (True, of_all)
    # A dimension that lacks a row of the last run is not passed over.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSnapshot, "read", _without)
        wrong = open_rows_are_current_state(story.workspace, spark, story.contract)
    assert (wrong.passed, wrong.numbers["keys_different"]) == (False, 1)


_READ = TableSnapshot.read


def _without(table: TableSnapshot, spark: SparkSession, files: Iterable[LakeFile]) -> DataFrame:
    rows = _READ(table, spark, files)
    return rows.where("id <> 17") if "_cdc_is_deleted" in rows.columns and "_cdc_op" in rows.columns else rows


def test_a_hundred_changes_rewrite_the_files_of_their_keys_whatever_the_history_holds(
    story: Story, spark: SparkSession
) -> None:
    for second in range(2, 5):
        story.land(Commit(10 * second, second, [update(number, f"{second}") for number in KEYS]))
        run(story, spark, FIRST)
    before = files_of(story)
    story.land(Commit(90, 9, [update(7 + number % 2, f"n{number}") for number in range(100)]))
    run(story, spark, FIRST)
    assert len(before - files_of(story)) <= 2
    assert len(versions(story, spark)) == 40 * 4 + 100
    assert same_as_made_whole(story, spark)


@pytest.mark.slow
def test_what_a_key_has_had_for_long_is_sealed_and_no_update_touches_it(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 2, [update(9, f"a{number}") for number in range(30)]))
    run(story, spark, FIRST)
    sealed = {path for path in files_of(story) if SEALED in path}
    assert len(sealed) == 6
    story.land(Commit(30, 3, [update(9, "last"), update(10, "other")]))
    run(story, spark, FIRST)
    assert sealed < files_of(story)
    assert [row[1] for row in versions(story, spark) if row[0] == 9] == [
        "t9",
        *(f"a{number}" for number in range(30)),
        "last",
    ]
    # Below all of it: the key is made again, and with it what was sealed.
    story.land_again(Commit(15, 1.5, [update(9, "late")]))
    run(story, spark, FIRST)
    assert not sealed & files_of(story)
    assert [row[1] for row in versions(story, spark) if row[0] == 9][:3] == ["t9", "late", "a0"]
    assert same_as_made_whole(story, spark)


@pytest.mark.slow
def test_a_late_event_makes_its_key_again_and_rewrites_its_file_alone(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(30, 3, [update(17, "new"), update(33, "new")]))
    run(story, spark, FIRST)
    before = files_of(story)
    story.land_again(Commit(20, 2, [update(17, "late")]))
    run(story, spark, FIRST)
    assert len(before - files_of(story)) == 1
    assert [row[1] for row in versions(story, spark) if row[0] == 17] == ["t17", "late", "new"]
    assert same_as_made_whole(story, spark)


def test_a_truncate_closes_every_open_version_and_a_later_window_goes_on(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 61, [Change("t")]), Commit(30, 62, [Change("c", 5, {"title": "x", "body": None})]))
    run(story, spark, SECOND)
    found = versions(story, spark)
    assert [row for row in found if row[4] is None] == [(5, "x", None, "c", None)]
    assert sum(row[4] == "t" for row in found) == 40
    assert same_as_made_whole(story, spark)


@pytest.mark.slow
def test_a_key_change_takes_what_it_did_not_send_and_a_late_event_of_the_old_key_reaches_the_new_one(
    story: Story, spark: SparkSession
) -> None:
    moved = [Change("d", 3), Change("c", 99, {"title": "moved"}, unchanged=("body",), moved_from=3)]
    story.land(Commit(30, 61, moved))
    run(story, spark, SECOND)
    story.land(Commit(40, 62, [update(99, "after")]))
    run(story, spark, SECOND)
    assert [row[1:] for row in versions(story, spark) if row[0] == 99] == [
        ("moved", "b", "moved", "u"),
        ("after", "b", "u", None),
    ]
    assert [row[4] for row in versions(story, spark) if row[0] == 3] == ["moved"]
    story.land_again(Commit(20, 2, [Change("u", 3, {"title": "t3", "body": "late"})]))
    run(story, spark, FIRST)
    assert [row[2] for row in versions(story, spark) if row[0] == 99] == ["late", "late"]
    assert same_as_made_whole(story, spark)


@pytest.mark.slow
def test_an_event_in_quarantine_leaves_doubt_and_a_later_one_settles_it(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 2, [update(4, "x" * 21), update(5, "fine")]))
    run(story, spark, FIRST)
    held = [row for row in versions(story, spark) if row[0] == 4]
    assert [row[4] for row in held] == ["u", None]
    story.land(Commit(30, 3, [Change("u", 4, {"title": "whole", "body": "w"})]))
    run(story, spark, FIRST)
    assert [row[1] for row in versions(story, spark) if row[0] == 4][-1] == "whole"
    assert same_as_made_whole(story, spark)


def test_what_changes_no_event_writes_nothing_until_the_log_to_read_grows_long(
    story: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, before = story.workspace.history(story.contract), files_of(story)
    version = table.open().version
    # An event of a later window, which is not taken in, closes the first one.
    story.clock += timedelta(days=1)
    story.land(Commit(1000, 12 * 3600, [Change("c", 1000, {"title": "x", "body": None})]))
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "closes")
    assert story.workspace.deduped(SOURCE).open().version > version
    history.materialize(story.workspace, spark, story.contract, "run")
    assert table.open().version == version
    monkeypatch.setattr(keyed_update, "FAR_BEHIND", 1)
    told = history.materialize(story.workspace, spark, story.contract, "run")
    assert told.upstream_version == story.workspace.deduped(SOURCE).open().version
    assert (table.open().version, files_of(story)) == (version + 1, before)
    assert told.rows == 40


def test_many_changes_are_put_in_the_order_of_their_keys_first_and_leave_the_same_history(
    story: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [update(number, f"n{number}") for number in (3, 4, 21, 22, 40)]
    story.land(Commit(20, 2, [*changes, Change("d", 7), Change("c", 50, {"title": "x", "body": None})]))
    monkeypatch.setattr(history, "are_few", lambda files: False)
    monkeypatch.setattr(update_tasks, "are_few", lambda files: False)
    run(story, spark, FIRST)
    assert len(versions(story, spark)) == 46
    assert same_as_made_whole(story, spark)


def test_sealed_rows_that_are_written_again_with_another_range_of_their_file_leave_their_own(
    tmp_path: Path,
) -> None:
    """Where one range of a cut file changes, all are written, with what was read from sealed files."""
    file = KeyFile("part.parquet", "/table/part.parquet", 1, 8)
    none = str(ContentHash())
    outcome = {"removed": none, "added": none, "refold": "", "doubted": False, "sealed": [], "marks": []}
    written = [{"name": "new.parquet", "rows": 4, "bytes": 9, "stats": "{}"}]
    outcomes = [
        outcome | {"range": 0, "changed": True, "files": written},
        outcome | {"range": 1, "changed": False, "files": written, "sealed": ["sealed-1.parquet"]},
        outcome | {"range": 2, "changed": False, "files": [], "sealed": ["sealed-2.parquet"]},
    ]
    other = KeyFile("other.parquet", "/table/other.parquet", 9, 8)
    ranges = [FileRange(None, 5, (file,)), FileRange(5, 9, (file,)), FileRange(9, None, (other,))]
    order = KeyOrder("id", whole_numbers=True)
    target = FilesToUpdate([file, other], order, tmp_path, rules=None)  # type: ignore[arg-type]
    found = update_tasks._collected(outcomes, ranges, target)
    assert found.replaced == ("part.parquet", "sealed-1.parquet")
