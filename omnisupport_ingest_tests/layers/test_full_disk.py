"""The disk is full while a batch lands or Spark writes: nothing is lost, and the same work goes on after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.landing.errors import LandingFailed
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.small_disk import Disk, small_disk

INSERT = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "long"})])
UPDATE = Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])
UPDATED = [("uno", "long")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", megabytes=4) as made:
        yield made


def rows(story: Story, spark: SparkSession) -> list[tuple[str, str]]:
    """What the dimension holds; every other table is opened too."""
    workspace = story.workspace
    for table in (workspace.raw(SOURCE), workspace.deduped(SOURCE), workspace.net_changes(story.contract)):
        assert table.open().state(FIRST) is not None
    current = workspace.dimension(story.contract).open()
    return [(row["title"], row["body"]) for row in current.read(spark, current.all_files()).collect()]


def run(story: Story, spark: SparkSession) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    dimensions.update(story.workspace, spark, story.contract, "run")


def test_a_batch_that_does_not_fit_lands_whole_once_there_is_room(disk: Disk):
    store = LandingStore(disk.path, "support_desk")
    first = land(store, 10, 20)
    with disk.full(), pytest.raises(LandingFailed, match="No space left on device") as refused:
        land(store, 20, 30)
    assert "Make room on the disk" in refused.value.fix
    assert store.batch_ids() == [first.batch_id]
    second = land(store, 20, 30)
    store.verify(second)
    assert store.landed().gap is None
    assert store.batch_ids() == [first.batch_id, second.batch_id]


@pytest.mark.slow
def test_a_run_that_finds_too_little_room_breaks_no_table_and_ends_well_once_there_is_some(
    disk: Disk, spark: SparkSession
):
    story = Story(disk.path / "told")
    story.land(INSERT)
    run(story, spark)
    story.land(UPDATE)
    before = rows(story, spark)
    failed = []
    for kilobytes in range(0, 400, 24):
        with disk.full(but=kilobytes * 1024):
            try:
                run(story, spark)
                break
            except Exception as error:
                failed.append(error)
        assert "no space left on" in str(failed[-1]).lower()
        assert rows(story, spark) in (before, UPDATED)
    assert len(failed) > 1
    run(story, spark)
    assert pending_windows(story.workspace, SOURCE).windows == ()
    assert rows(story, spark) == UPDATED
