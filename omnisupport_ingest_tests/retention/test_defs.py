"""The job ``retention`` and its schedule, which is off until it is turned on; the disk of a young home."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlparse

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.lake import layout
from omnisupport_ingest.retention.forecast import disk_forecast
from omnisupport_ingest_tests.layers.story import START, Change, Commit, Story
from omnisupport_ingest_tests.retention.test_story import take_all, told


@pytest.fixture
def landed(tmp_path: Path) -> Story:
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    changes = [Change("c", key, {"title": f"n{key}", "body": "text" * 100}) for key in range(2000)]
    story.land(Commit(10, 1, changes))
    story.land(Commit(30, 11 * 24 * 3600, [Change("u", 1, {"title": "later", "body": "text"})]))
    return story


def test_the_job_removes_nothing_that_no_layer_has_taken_and_its_schedule_is_off(landed: Story) -> None:
    definitions = build_definitions(landed.workspace)
    schedule = definitions.resolve_schedule_def("nightly_retention")
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    job = definitions.resolve_job_def("retention")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(instance=instance, resources={"workspace": landed.workspace})
    assert done.success
    data = [*(landed.store.folder / "data").rglob("*.parquet")]
    assert len(data) == 2


def test_the_job_sweep_runs_by_itself_and_deletes_what_is_old_enough(landed: Story, spark) -> None:  # type: ignore[no-untyped-def]
    take_all(landed, spark)
    workspace = landed.workspace
    definitions = build_definitions(workspace)
    assert definitions.resolve_schedule_def("hourly_sweep").default_status is dg.DefaultScheduleStatus.RUNNING
    dimension = workspace.dimension(landed.contract)
    draft = dimension.folder / layout.STAGING / "left-by-a-crash"
    draft.mkdir(parents=True)
    (draft / "part.parquet").write_bytes(b"half a file")
    held = {Path(unquote(urlparse(file.uri).path)) for file in dimension.open().all_files()}
    job = definitions.resolve_job_def("sweep")
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, resources={"workspace": workspace}).success
        assert draft.exists(), "it is younger than a day"
        old = time.time() - 25 * 3600
        for path in (draft / "part.parquet", draft):
            os.utime(path, (old, old))
        assert job.execute_in_process(instance=instance, resources={"workspace": workspace}).success
    assert not draft.exists()
    assert held and all(path.exists() for path in held)


def test_the_forecast_tells_the_size_of_landing_without_a_walk_and_no_growth_before_it_can(
    landed: Story,
) -> None:
    found = disk_forecast(landed.workspace, START + timedelta(minutes=30))
    files = [each for name in ("data", "manifests") for each in (landed.store.folder / name).rglob("*.*")]
    on_disk = sum(each.stat().st_size for each in files)
    assert on_disk / 2 < found.layers["landing"] < on_disk * 2
    assert (found.per_day, found.days) == (None, None)
    assert found.free > 0
