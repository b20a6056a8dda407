"""A replay of many windows in a row costs Spark as many jobs as one of few: windows are no loop of jobs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.layers import deduped, net_changes, raw
from omnisupport_ingest.runtime.spark import session_conf
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.layers.story import SOURCE, START, Change, Commit, Story

FEW, MANY = 3, 40
LISTING = "spark.sql.sources.parallelPartitionDiscovery.threshold"


def windows(count: int) -> list[str]:
    return [f"{START + timedelta(minutes=number):%Y-%m-%dT%H%M}" for number in range(count)]


def in_each_window(count: int, lsn: int, title: str, op: str = "c") -> list[Commit]:
    values = {"title": title, "body": None}
    return [
        Commit(lsn + number, 60 * number + 1, [Change(op, number + 1, values)]) for number in range(count)
    ]


def jobs_of_late_replay(folder: Path, spark: SparkSession, count: int) -> int:
    """Jobs of Spark that take late events into ``count`` closed windows in a row, through every layer."""
    story = Story(folder)
    story.clock = START + timedelta(days=2)
    newest = Commit(10_000, 24 * 3600, [Change("c", 999, {"title": "newest", "body": None})])
    story.land_file(*in_each_window(count, 100, "first"), newest)
    asked = windows(count)
    for replay in (False, True):
        group = uuid.uuid4().hex
        if replay:
            story.land_file(*in_each_window(count, 500, "late", "u"))
        spark.sparkContext.setJobGroup(group, "many windows")
        done = raw.materialize(story.workspace, spark, SOURCE, asked, "run", replay=replay)
        done += deduped.materialize(story.workspace, spark, SOURCE, asked, "run", replay=replay)
        done += net_changes.materialize(story.workspace, spark, story.contract, asked, "run", replay=replay)
        jobs = spark.sparkContext.statusTracker().getJobIdsForGroup(group)
        assert all(each.closed for each in done)
    assert {each.keys_changed for each in done if each.layer == net_changes.LAYER} == {1}
    return len(jobs)


@pytest.fixture
def as_the_platform(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with the platform's own rule on when listing files is a job of its own."""
    before = spark.conf.get(LISTING)
    spark.conf.set(LISTING, session_conf(Settings(_env_file=None))[LISTING])
    yield spark
    spark.conf.set(LISTING, before)


@pytest.mark.slow
def test_late_events_in_many_windows_in_a_row_are_as_many_jobs_as_in_few(
    tmp_path: Path, as_the_platform: SparkSession
) -> None:
    few = jobs_of_late_replay(tmp_path / "few", as_the_platform, FEW)
    assert few > 0
    assert jobs_of_late_replay(tmp_path / "many", as_the_platform, MANY) == few
