"""Keys made again: a few are looked up in the files, many are read by Spark, and both give the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.lake import wanted_rows
from omnisupport_ingest.lake.wanted_rows import keys_frame
from omnisupport_ingest.layers import deduped, dimensions, event_files, history, odd_keys, raw
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
        patched.setattr(odd_keys, "_of_many", never)
        patched.setattr(history._Update, "_events_of_many", never)
        few = rows_of(make(kept))
    with patch.context() as patched, ExitStack() as kept:
        patched.setattr(wanted_rows, "MOST_KEYS", -1)
        for module in (odd_keys, event_files):
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
            odd_keys.refolded(spark, held, told.contract, wanted, deleted_since=None, doubted=False)
        ),
        monkeypatch,
    )
    assert few == many
    assert len(few) >= len(ids)


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
