"""The times of rows that are read by a cursor: what is late by them, and what a moment shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.read.as_of import read_as_of
from omnisupport_ingest_tests.sources.query.platform_of_desk import Platform
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk

BY_ID = {"cursor": {"field": "id", "lookback": 100, "event_time": "updated_at"}}
"""Rows are found by their ids, and each is of the window of its ``updated_at``."""


def test_a_version_whose_event_time_is_in_a_closed_window_is_late_and_its_window_is_requested(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch, **BY_ID)
    desk.run("INSERT INTO tickets VALUES (1, 'now', now())")
    home.sync()
    workspace = home.workspace
    assert pending_windows(workspace, SOURCE).late == ()
    then = datetime.now(UTC) - timedelta(hours=5)
    desk.run(f"INSERT INTO tickets VALUES (2, 'late', '{then.isoformat()}'), (3, 'now', now())")
    home.sync()
    (late,) = pending_windows(workspace, SOURCE).late
    assert (late.window, late.events) == (workspace.grid.key_of(then, datetime.now(UTC)), 1)
    repository = build_definitions(workspace).get_repository_def()
    with dg.instance_for_test() as instance:
        context = dg.build_sensor_context(instance, repository_def=repository)
        repository.get_sensor_def(f"late_arrivals_{SOURCE}")(context, workspace=workspace)
        (backfill,) = instance.get_backfills()
        assert backfill.asset_backfill_data is not None
        windows = backfill.asset_backfill_data.target_subset.get_partitions_subset(keys.raw_key(SOURCE))
        assert set(windows.get_partition_keys()) == {late.window}


@pytest.mark.slow
def test_a_moment_before_a_row_far_ahead_shows_it_only_if_nothing_later_has_landed(
    desk: Desk, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch)
    desk.run("INSERT INTO tickets VALUES (1, 'before', now() - interval '2 hours')")
    desk.run("INSERT INTO tickets VALUES (2, 'ahead', '2099-01-01Z')")
    moment = datetime.now(UTC) - timedelta(hours=1)

    def shown() -> list[int]:
        home.sync()
        home.take_in(spark)
        (rows,) = read_as_of(home.workspace, spark, [home.contract], moment).values()
        return sorted(row["id"] for row in rows.collect())

    assert shown() == [1, 2]
    desk.run("INSERT INTO tickets VALUES (3, 'after', now())")
    assert shown() == [1]
