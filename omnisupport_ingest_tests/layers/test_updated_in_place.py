"""What an update of a dimension reads and writes: files of the keys it touches, and no others."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_layers import run, state

KEYS = range(1, 41)
MANY = Commit(10, 1, [Change("c", number, {"title": f"t{number}", "body": "b"}) for number in KEYS])


@pytest.fixture
def story(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Forty rows in files of four to eight."""
    monkeypatch.setattr(dimensions, "ROWS_PER_FILE", 4)
    story = Story(tmp_path)
    story.land(MANY)
    run(story, spark, FIRST)
    return story


def files_of(story: Story) -> set[str]:
    return {file.path for file in story.workspace.dimension(story.contract).open().all_files()}


@pytest.mark.quick
def test_an_update_of_one_key_replaces_one_file(story: Story, spark: SparkSession) -> None:
    before = files_of(story)
    assert len(before) == 10
    story.land(Commit(20, 2, [Change("u", 17, {"title": "new"}, unchanged=("body",))]))
    run(story, spark, FIRST)
    after = files_of(story)
    assert len(before - after) == len(after - before) == 1
    assert state(story, spark)[17] == ("new", "b", False, [])
    assert len(state(story, spark)) == 40


def test_new_keys_at_the_end_touch_the_last_file_alone_which_is_split(
    story: Story, spark: SparkSession
) -> None:
    before = files_of(story)
    rows = [Change("c", number, {"title": "n", "body": None}) for number in range(41, 51)]
    story.land(Commit(20, 2, rows))
    run(story, spark, FIRST)
    after = files_of(story)
    assert (len(before - after), len(after - before)) == (1, 4)
    assert sorted(state(story, spark)) == list(range(1, 51))


def test_a_run_adds_to_its_window_and_rewrites_nothing_there(story: Story, spark: SparkSession) -> None:
    held = story.workspace.net_changes(story.contract)
    before = {file.path for file in held.open().files(FIRST)}
    story.land(Commit(20, 2, [Change("u", 3, {"title": "new"}, unchanged=("body",))]))
    run(story, spark, FIRST)
    added = [file for file in held.open().files(FIRST) if file.path not in before]
    assert [file.rows for file in added] == [1]
    assert before <= {file.path for file in held.open().files(FIRST)}


def test_what_changes_no_row_replaces_no_file(story: Story, spark: SparkSession) -> None:
    before = files_of(story)
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "again", replay=True)
    dimensions.update(story.workspace, spark, story.contract, "again")
    assert files_of(story) == before


def test_a_replay_of_one_window_of_two_changes_nothing_in_the_dimension_and_one_of_both_makes_it_again(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 61, [Change("u", 3, {"title": "new"}, unchanged=("body",))]))
    run(story, spark, SECOND)
    before = files_of(story)
    workspace, contract = story.workspace, story.contract
    (done,) = dimensions.materialize(workspace, spark, contract, [SECOND], "again", replay=True)
    assert (done.window, done.replaced_hash) == (SECOND, done.content_hash)
    assert files_of(story) == before
    dimensions.materialize(workspace, spark, contract, [FIRST, SECOND], "again", replay=True)
    assert not before & files_of(story)
    assert state(story, spark)[3] == ("new", "b", False, [])


def test_a_run_that_died_between_its_two_commits_is_pending_and_the_next_one_merges_what_it_left(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(20, 61, [Change("u", 3, {"title": "new"}, unchanged=("body",))]))
    workspace, contract = story.workspace, story.contract
    raw.materialize(workspace, spark, SOURCE, [SECOND], "died")
    deduped.materialize(workspace, spark, SOURCE, [SECOND], "died")
    net_changes.materialize(workspace, spark, contract, [SECOND], "died")
    assert state(story, spark)[3] == ("t3", "b", False, [])
    assert pending_windows(workspace, SOURCE).windows == (SECOND,)
    with dg.DagsterInstance.ephemeral() as instance:
        rebuild_materializations(instance, workspace)
        told = instance.get_materialized_partitions(keys.dimension_key(contract))
        assert told == {FIRST}, "a window that is not in the dimension is not materialized"
    dimensions.materialize(workspace, spark, contract, [FIRST], "next")
    assert state(story, spark)[3] == ("new", "b", False, [])
    assert pending_windows(workspace, SOURCE).windows == ()


def test_a_truncate_reaches_every_file_and_a_later_window_goes_on(story: Story, spark: SparkSession) -> None:
    before = files_of(story)
    story.land(Commit(20, 61, [Change("t")]), Commit(30, 62, [Change("c", 5, {"title": "x", "body": None})]))
    run(story, spark, SECOND)
    assert not before & files_of(story)
    rows = state(story, spark)
    assert [number for number in KEYS if not rows[number][2]] == [5]


def test_updates_and_one_rebuild_give_the_same_content(story: Story, spark: SparkSession) -> None:
    for second in range(2, 6):
        changes = [Change("u", number, {"title": f"{second}"}, unchanged=("body",)) for number in (3, 11, 29)]
        story.land(Commit(10 * second, second, [*changes, Change("d", 30 + second)]))
        run(story, spark, FIRST)
    table = story.workspace.dimension(story.contract)
    content = table.open().state("").checkpoint.content_hash
    assert content == str(hash_of_files([file.uri for file in table.open().all_files()], "_cdc_row_hash"))
    again = dimensions.update(story.workspace, spark, story.contract, "rebuild", whole=True)
    assert again.content_hash == content
