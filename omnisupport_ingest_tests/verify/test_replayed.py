"""A replay that must change nothing: which window is replayed, and that a change of its content is found."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from omnisupport_ingest.verify.again import changed_tables, replayable, start_replay
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import run_layers


def test_the_fullest_window_is_replayed_and_a_change_of_its_content_names_the_tables(
    tmp_path: Path, spark: SparkSession
) -> None:
    story = Story(tmp_path)
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": "one"}), Change("c", 2, {"title": "two"})]),
        Commit(20, 61, [Change("c", 3, {"title": "three"})]),
    )
    assert replayable(story.workspace, SOURCE) == []
    run_layers(story.workspace, spark, [FIRST, SECOND])
    workspace = story.workspace
    assert {each.window for each in replayable(workspace, SOURCE)} == {FIRST, SECOND}

    launched: list[str] = []

    def launch(window: str) -> str:
        launched.append(window)
        return f"backfill of {window}"

    replay = start_replay(workspace, SOURCE, launch)
    assert (replay.window, replay.backfill_id, launched) == (FIRST, f"backfill of {FIRST}", [FIRST])
    assert changed_tables(workspace, replay) == []

    story.land(Commit(30, 2, [Change("u", 1, {"title": "changed"})]))
    run_layers(story.workspace, spark, [FIRST])
    assert changed_tables(story.workspace, replay) == [
        f"{SOURCE}/deduped_events",
        f"{SOURCE}/net_changes/notes",
        f"{SOURCE}/raw_cdc_staging",
    ]
