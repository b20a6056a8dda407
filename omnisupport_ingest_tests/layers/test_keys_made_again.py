"""Keys made again: a few are looked up in the files, many are read by Spark, and both give the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.stored import stored_type, with_hashes
from omnisupport_ingest.cdc.table_ends import TableEnds
from omnisupport_ingest.cdc.updating import UpdateRules, update_rows
from omnisupport_ingest.lake import wanted_rows
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.wanted_rows import keys_frame
from omnisupport_ingest.layers.dimension import (
    dimensions,
    net_changes,
    refold_by_tasks,
    replay_changes,
    tied_keys,
)
from omnisupport_ingest.layers.dimension.refold_by_tasks import KeysToMake, made_again
from omnisupport_ingest.layers.dimension.tied_keys import keyless_in
from omnisupport_ingest.layers.events import deduped, event_files, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, THIRD, Change, Commit, Story, key
from omnisupport_ingest_tests.layers.test_many_windows import Jobs, in_each_window, windows

NAMED = {"title": "t", "body": "b"}
KEYS = [[2], [99], [5, 6, 7, 8, 9, 12, 77]]


def update(id: int, title: str) -> Change:
    return Change("u", id, {"title": title}, unchanged=("body",))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Keys of three windows that were moved on twice, deleted, or in doubt, and one from before a truncate.

    At the place of an event another one of key 2 was delivered, which stays in quarantine.
    """
    story = Story(tmp_path_factory.mktemp("again") / "told")
    story.land(
        Commit(5, 0, [Change("c", 12, NAMED)]),
        Commit(6, 0.5, [Change("t")]),
        Commit(10, 1, [Change("c", number, NAMED) for number in range(1, 12)]),
        Commit(11, 2, [update(5, "x" * 21)]),
    )
    story.land(
        Commit(20, 61, [Change("d", 3), Change("c", 99, {"title": "m"}, ("body",), moved_from=3)]),
        Commit(21, 62, [Change("d", 8), update(9, "nine"), update(6, "x" * 21)]),
    )
    right = story.land(
        Commit(30, 121, [Change("d", 99), Change("c", 100, {"title": "n"}, ("body",), moved_from=99)]),
        Commit(31, 122, [update(1, "one"), Change("c", 3, NAMED), Change("d", 7), update(6, "six")]),
    )
    story.land_again(Commit(31, 122, [update(2, "other")]))
    run(story, spark, FIRST, SECOND, THIRD)
    waiting = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    events = [each.event for each in waiting if each.batch_id == right.batch_id]
    assert len(events) == 1
    decide(story.workspace, SOURCE, "release", events, reviewer="ana", why="the source has it")
    story.workspace = Workspace.open(story.workspace.settings)
    run(story, spark, FIRST, SECOND, THIRD)
    return story


def run(story: Story, spark: SparkSession, *of: str) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, of, "run")
    dimensions.materialize(story.workspace, spark, story.contract, of, "run")
    history.materialize(story.workspace, spark, story.contract, "run")


def both_ways(
    make: Callable[[ExitStack], DataFrame], patch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """The rows of ``make`` where keys are few, and where no number of keys is."""
    with patch.context() as patched, ExitStack() as kept:
        patched.setattr(tied_keys, "_of_many", never)
        patched.setattr(history._Update, "_events_of_many", never)
        few = rows_of(make(kept))
    with patch.context() as patched, ExitStack() as kept:
        patched.setattr(wanted_rows, "MOST_KEYS", -1)
        for module in (tied_keys, event_files):
            patched.setattr(module, "reading_wanted", never)
        return few, rows_of(make(kept))


def never(*_: object) -> NoReturn:
    raise AssertionError("the other way was taken")


def rows_of(frame: DataFrame) -> list[str]:
    return sorted(json.dumps(row.asDict(recursive=True), default=str) for row in frame.collect())


@pytest.mark.parametrize("ids", KEYS, ids=str)
def test_the_rows_of_a_dimension_are_the_same(
    told: Story, spark: SparkSession, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = keys_frame(spark, [key(id) or "" for id in ids])
    held = told.workspace.net_changes(told.contract).open()
    few, many = both_ways(
        lambda kept: kept.enter_context(
            tied_keys.refolded(spark, held, told.contract, wanted, deleted_since=None, doubted=False)
        ),
        monkeypatch,
    )
    assert few == many
    assert len(few) >= len(ids)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Keys of three windows that nothing ties together: updated, deleted, with columns unsent, truncated."""
    story = Story(tmp_path_factory.mktemp("again") / "untied")
    story.land(
        Commit(5, 0, [Change("c", 12, NAMED)]),
        Commit(6, 0.5, [Change("t")]),
        Commit(10, 1, [Change("c", number, NAMED) for number in range(1, 12)]),
        Commit(11, 2, [update(5, "x" * 21), update(50, "never made")]),
    )
    story.land(
        Commit(20, 61, [Change("d", 8), update(9, "nine"), update(6, "x" * 21), update(50, "and again")])
    )
    story.land(Commit(30, 121, [Change("c", 8, NAMED), Change("d", 7), update(6, "six"), update(50, "last")]))
    run(story, spark, FIRST, SECOND, THIRD)
    return story


def made_by_an_update(story: Story, sent: pa.Table) -> list[dict[str, Any]]:
    """The rows of a dimension that has other rows of the keys, once it was told what is ``sent``."""
    contract, net_changes = story.contract, story.workspace.net_changes(story.contract).open()
    rules = UpdateRules(
        table_columns=table_columns_of(contract),
        schema=arrow_schema(stored_type(contract), without=()),
        ends=TableEnds.collect(keyless_in(net_changes.all_files())),
    )
    held = [file.uri for file in story.workspace.dimension(contract).open().all_files()]
    rows = pa.concat_tables(pq.read_table(each, partitioning=None) for each in held).cast(rules.schema)
    place = rows.schema.get_field_index("title")
    rows = with_hashes(rows.set_column(place, "title", pa.repeat(pa.scalar("of before"), len(rows))))
    updated = update_rows(rows, sent.cast(rules.sent), rules)
    assert not len(updated.refold)
    mine = pc.is_in(updated.rows["_cdc_key"], pc.unique(sent["_cdc_key"]))
    return updated.rows.filter(mine).sort_by("_cdc_key").to_pylist()


@pytest.mark.parametrize("window", [FIRST, SECOND, THIRD])
def test_rows_that_the_update_folds_are_those_that_joins_make(
    untied: Story, spark: SparkSession, window: str
) -> None:
    contract = untied.contract
    net_changes, dimension = (
        table.open()
        for table in (untied.workspace.net_changes(contract), untied.workspace.dimension(contract))
    )
    files = net_changes.files(window)
    with made_again(
        spark, dimension.table, KeysToMake(contract, tuple(files)), net_changes.all_files()
    ) as again:
        assert again
        sent = pa.concat_tables(pq.read_table(each.uri, partitioning=None) for each in again)
    keys = tied_keys.keys_in(net_changes, spark, files)
    with tied_keys.refolded(spark, net_changes, contract, keys, deleted_since=None, doubted=False) as frame:
        by_joins = frame.toArrow()
    rows = made_by_an_update(untied, sent)
    assert rows == made_by_an_update(untied, by_joins)
    assert len(rows) >= 4
    assert "of before" not in {row["title"] for row in rows}


def test_keys_that_net_changes_have_no_more_are_forgotten(untied: Story, spark: SparkSession) -> None:
    contract = untied.contract
    net_changes, dimension = (
        table.open()
        for table in (untied.workspace.net_changes(contract), untied.workspace.dimension(contract))
    )
    gone = KeysToMake(contract, tuple(net_changes.files(FIRST)))
    for left in ([], net_changes.files(SECOND)):
        with made_again(spark, dimension.table, gone, left) as again:
            assert again is not None
            sent = pa.concat_tables(pq.read_table(each.uri, partitioning=None) for each in again)
        assert len(made_by_an_update(untied, sent)) == (4 if left else 0)


def test_what_is_too_much_to_be_sent_is_left_to_joins(
    untied: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    net_changes, dimension = (
        table.open()
        for table in (
            untied.workspace.net_changes(untied.contract),
            untied.workspace.dimension(untied.contract),
        )
    )
    keys = KeysToMake(untied.contract, tuple(net_changes.files(FIRST)))
    monkeypatch.setattr(refold_by_tasks, "_MOST_BYTES", 100)
    with made_again(spark, dimension.table, keys, net_changes.all_files()) as again:
        assert again is None


@pytest.mark.parametrize("window", [FIRST, SECOND, THIRD])
def test_keys_that_are_tied_to_others_are_left_to_joins(
    told: Story, spark: SparkSession, window: str
) -> None:
    net_changes, dimension = (
        table.open()
        for table in (told.workspace.net_changes(told.contract), told.workspace.dimension(told.contract))
    )
    tied = KeysToMake(told.contract, tuple(net_changes.files(window)))
    with made_again(spark, dimension.table, tied, net_changes.all_files()) as again:
        assert again is None


@pytest.mark.parametrize("ids", KEYS, ids=str)
def test_the_versions_of_a_history_are_the_same(
    told: Story, spark: SparkSession, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = keys_frame(spark, [key(id) or "" for id in ids])
    snapshot = told.workspace.history(told.contract).open()
    files = history.EventFiles.opened(told.workspace, SOURCE)
    update = history._Update(spark, told.contract, snapshot, files, whole=False, ended_before=None)
    few, many = both_ways(lambda kept: update._made_again(wanted, kept), monkeypatch)
    assert few == many
    assert len(few) >= len(ids)


@pytest.mark.parametrize("few", [True, False], ids=["by a task", "by joins"])
def test_changed_keys_are_counted_once_each(
    tmp_path: Path, spark: SparkSession, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path / "counted")
    story.land(Commit(10, 1, [Change("c", number, NAMED) for number in range(1, 6)]))
    story.land(Commit(20, 2, [update(1, "one"), update(2, "two"), Change("d", 3)]))
    run(story, spark, FIRST)
    story.land_again(
        Commit(15, 1.5, [update(1, "below"), update(4, "four"), update(5, "five"), Change("c", 9, NAMED)]),
        Commit(16, 1.6, [update(5, "five again"), Change("t")]),
    )
    if not few:
        monkeypatch.setattr(replay_changes, "ROWS_OF_A_TASK", 0)
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "again", replay=True)
    [done] = net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "again", replay=True)
    # 1 stays as it is above, 4, 5 and 9 have other rows, and the truncate has none.
    assert done.keys_changed == 4


@pytest.mark.slow
def test_a_replay_of_one_window_of_forty_takes_no_more_jobs_than_one_of_three(
    tmp_path: Path, spark: SparkSession
) -> None:
    def jobs(count: int) -> tuple[int, int]:
        story = Story(tmp_path / str(count))
        story.land(*in_each_window(count, 10, "title"))
        of = windows(count)
        run(story, spark, *of)
        # Without news no row would be made again.
        story.land(Commit(10_000, 61, [Change("u", 1, NAMED)]))
        for layer in (raw, deduped):
            layer.materialize(story.workspace, spark, SOURCE, [of[1]], "late")
        started = Jobs(spark)
        dimensions.materialize(story.workspace, spark, story.contract, [of[1]], "again", replay=True)
        return started.count, started.tasks

    # Beside other work two more tasks were counted for the larger home.
    (few, of_few), (many, of_many) = jobs(3), jobs(40)
    assert many <= few + 3
    assert of_many <= of_few + 6
