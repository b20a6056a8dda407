"""What runs every hour: nothing for a source in which nothing landed, and the first time at once."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import dagster as dg
import pytest

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import hourly
from omnisupport_ingest.runtime.dagster_services import WEBSERVER
from omnisupport_ingest.runtime.running import record_service
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

INSERT = Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})])
JOBS = (f"audit_{SOURCE}", f"history_{SOURCE}")


@pytest.mark.parametrize("job", JOBS)
def test_nothing_is_scheduled_for_a_source_in_which_nothing_landed(
    story: Story, job: str, tmp_path: Path
) -> None:
    schedule = build_definitions(story.workspace).get_repository_def().get_schedule_def(f"hourly_{job}")
    assert (schedule.job_name, schedule.default_status) == (job, dg.DefaultScheduleStatus.RUNNING)
    # A schedule opens its instance again, so this one is on disk.
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        dg.build_schedule_context(instance, resources={"workspace": story.workspace}) as context,
    ):
        tick = schedule.evaluate_tick(context)
        assert (tick.run_requests, tick.skip_message) == ([], f"Nothing of {SOURCE} has landed.")
        story.land(INSERT)
        assert len(schedule.evaluate_tick(context).run_requests or ()) == 1
        before = dg.DagsterRun(job_name=job, run_id=str(uuid4()), status=dg.DagsterRunStatus.STARTED)
        instance.add_run(before)
        assert not schedule.evaluate_tick(context).run_requests
        instance.report_run_failed(before)
        assert len(schedule.evaluate_tick(context).run_requests or ()) == 1


class Ticks:
    """Ticks of the sensor: the jobs that each requests, and why it requests none."""

    def __init__(self, story: Story) -> None:
        self._workspace = story.workspace
        self._sensor = build_definitions(story.workspace).get_repository_def().get_sensor_def(hourly.FIRST)
        self.cursor: str | None = None

    def tick(self) -> tuple[list[str | None], str | None]:
        with dg.DagsterInstance.ephemeral() as instance:
            context = dg.build_sensor_context(instance, cursor=self.cursor)
            result = self._sensor(context, workspace=self._workspace)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        reason = result.skip_reason.skip_message if result.skip_reason is not None else None
        return [each.job_name for each in result.run_requests or ()], reason


@pytest.mark.usefixtures("spark")
def test_the_first_checks_are_requested_once_when_the_tables_are_complete_and_the_ui_runs(
    recent_story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, empty = recent_story, Commit(5, 0, [])
    ticks = Ticks(story)
    assert ticks.tick() == ([], "The UI does not run.")
    record_service(story.workspace.home.run, WEBSERVER)
    waits = ([], "1 of 1 sources have no complete tables yet.")
    assert ticks.tick() == waits, "nothing has landed"
    story.land_chunk(empty)
    story.land_boundary(empty)
    (window,) = story.land(INSERT).windows
    assert ticks.tick() == waits, "no run has taken in what landed"
    ingest = build_definitions(story.workspace).resolve_job_def(f"ingest_{SOURCE}")
    tags = {"dagster/asset_partition_range_start": window, "dagster/asset_partition_range_end": window}
    with dg.DagsterInstance.ephemeral() as instance:
        assert ingest.execute_in_process(instance=instance, tags=tags).success
    with monkeypatch.context() as patched:
        patched.setattr(hourly, "tables_complete", lambda *_: {"notes": CheckFinding(False, "behind")})
        assert ticks.tick() == waits, "a table is not complete"
    assert ticks.tick() == (list(JOBS), None)
    assert ticks.tick() == ([], "Every source has had its first checks.")
