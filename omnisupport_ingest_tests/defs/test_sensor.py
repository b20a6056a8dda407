"""The state machine of the sensor ``wal_batches``, on a real instance and really landed batches."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Timer
from uuid import uuid4

import dagster as dg
import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.defs import sensors
from omnisupport_ingest.defs.keys import PROCESS_TAG
from omnisupport_ingest.defs.run_history import RunHistory
from omnisupport_ingest.defs.sensors import SensorCursor
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.running import note_stopping
from omnisupport_ingest.settings import STORAGE_URL
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.waiting import PATIENCE

FIRST_BATCH = Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})])
SECOND_BATCH = Commit(20, 61, [Change("u", 1, {"title": "two", "body": None})])
LATER_BATCH = Commit(30, 300, [Change("u", 1, {"title": "three", "body": None})])

RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


class Sensor:
    """Ticks of one sensor on an instance, and runs as its launcher would record them."""

    def __init__(self, story: Story, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._workspace = story.workspace
        self._instance = instance
        self._sensor = definitions.get_repository_def().get_sensor_def(f"wal_batches_{SOURCE}")
        self.cursor: str | None = None

    def tick(self) -> dg.SensorResult:
        context = dg.build_sensor_context(self._instance, cursor=self.cursor)
        result = self._sensor(context, workspace=self._workspace)
        self.cursor = result.cursor
        return result

    def launch(self, request: dg.RunRequest, status: dg.DagsterRunStatus) -> dg.DagsterRun:
        """Record the run of ``request`` in ``status``; a key is launched once, as the daemon does."""
        key = {"dagster/run_key": request.run_key}
        assert not self._instance.get_runs(dg.RunsFilter(tags=key)), "the daemon would drop this run"
        run = dg.DagsterRun(
            job_name=f"ingest_{SOURCE}", run_id=str(uuid4()), status=status, tags={**request.tags, **key}
        )
        self._instance.add_run(run)
        return run

    def fail(self, run: dg.DagsterRun) -> None:
        self._instance.report_run_failed(run)

    def lose(self, run: dg.DagsterRun) -> None:
        """The run is gone, as if it had never been recorded."""
        self._instance.delete_run(run.run_id)


@pytest.fixture
def sensor(story: Story, definitions: dg.Definitions):
    with dg.DagsterInstance.ephemeral() as instance:
        yield Sensor(story, definitions, instance)


def ranges(result: dg.SensorResult) -> list[tuple[str, str]]:
    return [(request.tags[RANGE[0]], request.tags[RANGE[1]]) for request in result.run_requests or []]


def test_nothing_landed_is_said(sensor):
    assert sensor.tick().skip_reason.skip_message == "Nothing has landed yet."


@pytest.mark.quick
def test_landed_windows_are_asked_for_as_one_range_and_observed(story, sensor):
    story.land(FIRST_BATCH)
    newest = story.land(SECOND_BATCH)
    result = sensor.tick()
    assert ranges(result) == [(FIRST, SECOND)]
    cursor = SensorCursor.from_text(result.cursor)
    assert cursor == SensorCursor(newest.batch_id, "0/14", 1)
    assert result.run_requests[0].run_key == f"{SOURCE}/{FIRST}/{SECOND}/{newest.batch_id}/a1"
    (observation,) = result.asset_events
    assert observation.asset_key == dg.AssetKey([SOURCE, "landing"])
    assert observation.metadata["batches_pending"].value == 2


def test_windows_with_a_gap_are_two_runs(story, sensor):
    story.land(FIRST_BATCH)
    story.land(LATER_BATCH)
    assert ranges(sensor.tick()) == [(FIRST, FIRST), ("2026-01-01T1205", "2026-01-01T1205")]


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTED])
def test_a_run_in_progress_is_not_asked_for_again(story, sensor, status):
    story.land(FIRST_BATCH)
    sensor.launch(sensor.tick().run_requests[0], status)
    result = sensor.tick()
    assert not result.run_requests
    assert "A run is in progress" in result.skip_reason.skip_message
    assert not result.asset_events


def test_a_tick_waits_for_the_run_before_it(story, sensor, monkeypatch):
    monkeypatch.setattr(sensors, "FILES_PATIENCE_SECONDS", 60.0)
    story.land(FIRST_BATCH)
    run = sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.STARTED)
    story.land(SECOND_BATCH)
    asked = []

    def ends(history: RunHistory) -> bool:
        asked.append(ingesting(history))
        if len(asked) == 3:
            sensor.lose(run)
        return asked[-1]

    ingesting = RunHistory.ingesting
    monkeypatch.setattr(RunHistory, "ingesting", ends)
    assert ranges(sensor.tick()) == [(FIRST, SECOND)]
    assert asked[:4] == [True, True, True, False]


@pytest.mark.parametrize("landed", [False, True])
def test_a_tick_waits_for_nothing_once_the_daemon_is_to_end(story, sensor, monkeypatch, landed):
    """Neither for a batch nor for a run in progress: the daemon would wait for the tick."""
    monkeypatch.setattr(sensors, "FILES_PATIENCE_SECONDS", 100 * PATIENCE)
    run = story.workspace.home.run
    if landed:
        story.land(FIRST_BATCH)
        sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.STARTED)
        story.land(SECOND_BATCH)
    Timer(1, partial(note_stopping, run, DAEMON)).start()
    assert (
        "A run is in progress" if landed else "Nothing has landed"
    ) in sensor.tick().skip_reason.skip_message


@pytest.mark.quick
def test_what_lands_during_a_run_is_taken_by_the_next_one_all_at_once(story, sensor):
    story.land(FIRST_BATCH)
    run = sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.STARTED)
    story.land(SECOND_BATCH)
    assert not sensor.tick().run_requests
    sensor.lose(run)
    assert ranges(sensor.tick()) == [(FIRST, SECOND)]


@pytest.mark.quick
def test_a_failed_run_is_retried_with_a_fresh_run_key_after_a_wait(story, sensor, monkeypatch):
    story.land(FIRST_BATCH)
    request = sensor.tick().run_requests[0]
    sensor.fail(sensor.launch(request, dg.DagsterRunStatus.STARTED))
    waiting = sensor.tick()
    assert not waiting.run_requests
    assert "1 run failed in a row" in waiting.skip_reason.skip_message

    pass_time(monkeypatch, timedelta(seconds=6))
    again = sensor.tick().run_requests[0]
    assert again.run_key.endswith("/a2")
    sensor.launch(again, dg.DagsterRunStatus.STARTED)


@pytest.mark.parametrize(
    "cursor", [None, "", "not json", "[1]", SensorCursor("e000001-s-f", "F/F", 9).to_text()]
)
@pytest.mark.quick
def test_a_lost_rewound_or_garbled_cursor_skips_nothing_and_repeats_nothing(story, sensor, cursor):
    story.land(FIRST_BATCH)
    story.land(SECOND_BATCH)
    request = sensor.tick().run_requests[0]
    sensor.cursor = cursor
    repeated = sensor.tick()
    assert ranges(repeated) == [(FIRST, SECOND)]
    # The daemon launches a key once, so the run that was launched before the crash counts.
    assert repeated.run_requests[0].run_key == request.run_key


def test_a_run_that_succeeded_and_settled_nothing_is_requested_again_after_a_wait_that_doubles(
    story, sensor, monkeypatch
):
    story.land(FIRST_BATCH)
    sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.SUCCESS)
    waiting = sensor.tick()
    assert not waiting.run_requests
    assert "left 1 range of windows pending" in waiting.skip_reason.skip_message
    for number, seconds in ((2, 6), (3, 11)):
        pass_time(monkeypatch, timedelta(seconds=seconds))
        again = sensor.tick().run_requests[0]
        assert again.run_key.endswith(f"/a{number}")
        sensor.launch(again, dg.DagsterRunStatus.SUCCESS)
        assert not sensor.tick().run_requests
    # What lands is new work, which does not wait: a chunk of a snapshot too, which moves no cursor.
    before = SensorCursor.from_text(sensor.cursor).last_batch_id
    story.land_chunk(FIRST_BATCH)
    assert ranges(sensor.tick()) == [(FIRST, FIRST)]
    assert SensorCursor.from_text(sensor.cursor).last_batch_id == before
    story.land(SECOND_BATCH)
    assert ranges(sensor.tick()) == [(FIRST, SECOND)]


def test_other_rules_make_a_window_pending_that_a_run_has_made_and_nothing_waits(story, sensor):
    story.land(FIRST_BATCH)
    sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.SUCCESS)
    story.write_contract(CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | {"version": "1.0.1"}})
    sensor._workspace = replace(story.workspace, contracts=load_contracts(story.contracts))
    assert sensor.tick().run_requests[0].run_key.endswith("/a2")


def test_attempts_go_on_counting_when_older_runs_are_deleted(story, sensor, monkeypatch):
    story.land(FIRST_BATCH)
    runs = []
    for number in range(3):
        pass_time(monkeypatch, timedelta(seconds=60 * number))
        runs.append(sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.STARTED))
        sensor.fail(runs[-1])
    sensor.lose(runs[0])
    pass_time(monkeypatch, timedelta(seconds=60 * 3))
    assert sensor.tick().run_requests[0].run_key.endswith("/a4")


def test_a_tick_leaves_the_runs_of_other_machines_alone(story, sensor, monkeypatch):
    """The UI of a machine that stands by evaluates sensors there, where nobody sees these processes."""
    story.land(FIRST_BATCH)
    run = sensor.launch(sensor.tick().run_requests[0], dg.DagsterRunStatus.STARTED)
    elsewhere = ProcessIdentity(2**22 - 3, 1, "another")
    sensor._instance.add_run_tags(run.run_id, {PROCESS_TAG: elsewhere.text})
    monkeypatch.setenv(STORAGE_URL, "postgresql://records.example/dagster")
    story.land(SECOND_BATCH)
    assert not sensor.tick().run_requests
    assert sensor._instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED


def test_a_backfill_in_progress_covers_its_windows(story, sensor):
    story.land(FIRST_BATCH)
    with_raw = dg.DagsterRun(
        job_name="__ASSET_JOB",
        run_id=str(uuid4()),
        status=dg.DagsterRunStatus.STARTED,
        tags={RANGE[0]: FIRST, RANGE[1]: FIRST},
        asset_selection={dg.AssetKey([SOURCE, "raw_cdc_staging"])},
    )
    sensor._instance.add_run(with_raw)
    assert not sensor.tick().run_requests


def pass_time(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    """Let the sensor's clock run ahead of the machine's."""
    from omnisupport_ingest.defs import sensors

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz or UTC) + by

    monkeypatch.setattr(sensors, "datetime", Later)
