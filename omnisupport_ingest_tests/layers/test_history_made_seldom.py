"""A history that is made less often than the layers above: what came, was compacted and was judged again."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story

LATER = "2026-01-01T1400"
SECONDS = {FIRST: 0, SECOND: 60, LATER: 7200}
Version = tuple[int, str | None, str, str | None]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    story = Story(tmp_path / "told")
    story.clock = START + timedelta(hours=3)
    return story


def take_in(story: Story, spark: SparkSession, *windows: str, replay: bool = False) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)


def versions(story: Story, spark: SparkSession) -> list[Version]:
    snapshot = story.workspace.history(story.contract).open()
    rows = snapshot.read(spark, snapshot.all_files()).orderBy("id", "_cdc_valid_from_position")
    names = ("id", "title", "_cdc_opened_by", "_cdc_closed_by")
    return [tuple(row[name] for name in names) for row in rows.collect()]


def same_as_made_whole(story: Story, spark: SparkSession) -> bool:
    made = history.materialize(story.workspace, spark, story.contract, "run")
    whole = history.materialize(story.workspace, spark, story.contract, "whole", replay=True)
    return made.content_hash == whole.content_hash


def row(op: str, number: int, title: str) -> Change:
    return Change(op, number, {"title": title, "body": "b"})


def test_events_of_a_window_that_was_compacted_and_then_replayed_are_in_the_history(
    story: Story, spark: SparkSession
) -> None:
    story.land(Commit(10, 1, [row("c", 1, "one"), row("c", 2, "two")]))
    take_in(story, spark, FIRST)
    history.materialize(story.workspace, spark, story.contract, "run")
    # Events of a window that the history knows, and of one that is new to it.
    story.land(Commit(20, 2, [row("u", 1, "uno")]), Commit(30, 61, [row("c", 3, "three")]))
    take_in(story, spark, FIRST, SECOND)
    story.land(Commit(40, 62, [row("u", 2, "dos")]))
    take_in(story, spark, SECOND)
    story.land(Commit(1000, SECONDS[LATER], [row("c", 4, "later")]))
    take_in(story, spark, LATER)
    take_in(story, spark, FIRST, SECOND)
    events = story.workspace.deduped(SOURCE).open()
    assert [len(events.files(window)) for window in (FIRST, SECOND)] == [1, 1]
    story.land(Commit(1010, 63, [row("u", 3, "late")]))
    take_in(story, spark, FIRST, SECOND, replay=True)
    history.materialize(story.workspace, spark, story.contract, "run")
    assert versions(story, spark) == [
        (1, "one", "c", "u"),
        (1, "uno", "u", None),
        (2, "two", "c", "u"),
        (2, "dos", "u", None),
        (3, "three", "c", "u"),
        (3, "late", "u", None),
        (4, "later", "c", None),
    ]
    assert same_as_made_whole(story, spark)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_came_and_was_replayed_between_two_runs_the_history_is_that_of_all_events(
    story: Story, spark: SparkSession, seed: int
) -> None:
    rng = Random(seed)
    # Everything but the last window is closed whenever it is taken in.
    story.land(Commit(1, SECONDS[LATER], [row("c", 1, "first")]))
    take_in(story, spark, LATER)
    for lsn in range(10, 140, 10):
        windows = rng.sample((FIRST, SECOND, LATER), rng.choice((1, 1, 2)))
        if rng.random() < 0.7:
            kind = rng.choice(("c", "u", "u", "u", "d", "t"))
            # A title that is too long is quarantined.
            title = rng.choice((f"at {lsn}", f"at {lsn}", "x" * 21))
            change = row(kind, rng.randint(1, 3), title) if kind != "t" else Change("t")
            story.land(Commit(lsn, SECONDS[windows[0]] + rng.randrange(50), [change]))
        take_in(story, spark, *windows, replay=rng.random() < 0.4)
        if rng.random() < 0.25:
            history.materialize(story.workspace, spark, story.contract, "run")
    assert same_as_made_whole(story, spark)
