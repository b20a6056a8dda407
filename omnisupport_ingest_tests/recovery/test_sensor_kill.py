"""The process that evaluates a sensor is killed before its cursor is kept, or around its backfill."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.sensor_tick import LATE, Answer, Request, tick
from omnisupport_ingest_tests.recovery.traces import contents, traces

pytestmark = pytest.mark.usefixtures("spark")

KILLED = -signal.SIGKILL


def launch(story: Story, instance: dg.DagsterInstance, request: Request) -> dg.DagsterRun:
    """Carry out ``request`` as the run that the daemon would launch."""
    done = (
        build_definitions(story.workspace)
        .resolve_job_def(f"ingest_{SOURCE}")
        .execute_in_process(instance=instance, tags={**request.tags, "dagster/run_key": request.run_key})
    )
    assert done.success
    return done.dagster_run


def evaluated(folder: Path, cursor: str | None = None) -> Answer:
    answer = tick(folder, cursor=cursor)
    assert isinstance(answer, Answer), f"the sensor's process ended with {answer}"
    return answer


@pytest.mark.slow
def test_a_sensor_killed_before_its_cursor_is_kept_skips_nothing_and_repeats_nothing(recent: Story, folder):
    story = recent
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    batch = story.land(Commit(20, 61, [Change("c", 2, {"title": "two", "body": None})]))
    first, second = story.store.manifests()[0].windows + batch.windows
    with dg.DagsterInstance.get() as instance:
        assert tick(folder, failpoint="sensor.answer.after") == KILLED
        again = evaluated(folder)
        (request,) = again.requests
        assert request.windows == (first, second)
        assert request.run_key == f"{SOURCE}/{first}/{second}/{batch.batch_id}/a1"
        # The daemon launches a key once, so it matters that the lost evaluation made this one too.
        assert evaluated(folder).requests == again.requests
        launch(story, instance, request)

        newest = story.land(Commit(30, 62, [Change("u", 2, {"title": "three"}, unchanged=("body",))]))
        assert tick(folder, cursor=again.cursor, failpoint="sensor.answer.after") == KILLED
        (later,) = evaluated(folder, again.cursor).requests
        assert later.windows == (second, second)
        assert later.run_key == f"{SOURCE}/{second}/{second}/{newest.batch_id}/a1"
        launch(story, instance, later)

        before, held = traces(story.workspace), contents(story.workspace)
        launch(story, instance, request)
        assert traces(story.workspace) == before
        assert contents(story.workspace) == held
        for cursor in (None, again.cursor):
            idle = evaluated(folder, cursor)
            assert not idle.requests
            assert idle.skipped == f"All that has landed is committed: 3 batches, up to {newest.batch_id}."
    assert [len(content.rows) for content in held.values()] == [3, 0, 3, 2, 2]


@pytest.mark.slow
def test_a_late_sensor_killed_around_its_backfill_has_asked_for_it_once(recent: Story, folder):
    story = recent
    start = stories.START
    # The watermark passes the end of the first window by more than an hour.
    newest = Commit(90, 2 * 3600, [Change("c", 9, {"title": "newest", "body": None})])
    story.clock = start + timedelta(hours=3)
    story.land_file(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]), newest)
    story.land_file(Commit(11, 30, [Change("c", 2, {"title": "late", "body": None})]))
    with dg.DagsterInstance.get() as instance:
        assert tick(folder, sensor=LATE, failpoint="dagster.backfill.before") == KILLED
        assert instance.get_backfills() == []
        assert tick(folder, sensor=LATE, failpoint="dagster.backfill.after") == KILLED
        (backfill,) = instance.get_backfills()
        answer = tick(folder, sensor=LATE)
        assert isinstance(answer, Answer)
        assert "which a backfill or a run in progress takes" in (answer.skipped or "")
        assert [each.backfill_id for each in instance.get_backfills()] == [backfill.backfill_id]
