"""The sensor ``late_arrivals``, on a real instance, with really landed late batches."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from datetime import timedelta

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus

from omnisupport_ingest.contracts.decision_table import load_decision_table
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.direct_run import WindowRun, run_windows
from omnisupport_ingest.layers.scheduling.late_replay import EndedReplay, waiting_windows
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.windows import WindowRange
from omnisupport_ingest_tests.contracts.decision_tables import write_decision
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SOURCE, THIRD, Change, Commit, Story

NEWEST = Commit(90, 3 * 3600, [Change("c", 9, {"title": "newest", "body": None})])
EARLY = Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})])
LATE_ONE = Commit(11, 30, [Change("c", 2, {"title": "late", "body": None})])
LATE_TWO = Commit(12, 125, [Change("c", 3, {"title": "late too", "body": None})])


class LateSensor:
    """Ticks of the sensor; a daemon that dies after a tick forgets the cursor it was given."""

    def __init__(self, story: Story, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._story, self._definitions, self.instance = story, definitions, instance
        self._repository = definitions.get_repository_def()
        self._sensor = self._repository.get_sensor_def(f"late_arrivals_{SOURCE}")
        self._workspace = story.workspace
        self.cursor: str | None = None

    def tick(self, *, daemon_dies: bool = False) -> dg.SensorResult:
        context = dg.build_sensor_context(self.instance, cursor=self.cursor, repository_def=self._repository)
        result = self._sensor(context, workspace=self._workspace)
        if not daemon_dies:
            self.cursor = result.cursor
        return result

    def backfills(self) -> list[object]:
        return list(self.instance.get_backfills())

    def end(self, backfill, status: BulkActionStatus) -> None:  # type: ignore[no-untyped-def]
        self.instance.update_backfill(backfill.with_status(status))


@pytest.fixture
def sensor(story: Story, definitions: dg.Definitions):
    story.clock += timedelta(days=30)
    with dg.instance_for_test() as instance:
        yield LateSensor(story, definitions, instance)


@pytest.fixture
def soon_closing(recent_story: Story) -> Story:
    """A recent story whose windows close a minute after their end."""
    contract = copy.deepcopy(CONTRACT)
    contract["x-cdc"]["lateness"] = {"allowed": "PT1M", "max": "P7D"}
    recent_story.write_contract(contract)
    contracts = load_contracts(recent_story.contracts)
    recent_story.workspace = replace(recent_story.workspace, contracts=contracts)
    return recent_story


def windows_of(backfill) -> set[str]:  # type: ignore[no-untyped-def]
    subset = backfill.asset_backfill_data.target_subset
    return set(subset.get_partitions_subset(keys.raw_key(SOURCE)).get_partition_keys())


def test_nothing_late_asks_for_nothing(story, sensor):
    story.land_file(EARLY, NEWEST)
    assert "No event waits" in sensor.tick().skip_reason.skip_message
    assert sensor.backfills() == []


def test_late_windows_are_one_backfill_of_exactly_those_with_reason_batches_and_counts(story, sensor):
    story.land_file(NEWEST)
    batch = story.land_file(LATE_ONE, LATE_TWO)
    sensor.tick()
    (backfill,) = sensor.backfills()
    assert windows_of(backfill) == {FIRST, THIRD}
    assert backfill.title == f"late arrival: 2 events of 1 batch in 2 closed windows of {SOURCE}"
    assert backfill.tags[keys.LATE_TAG] == "2"
    assert backfill.tags[keys.LATE_BATCHES_TAG] == batch.batch_id
    assert backfill.tags[keys.REASON_TAG] == backfill.title
    assert {key.path[-1] for key in backfill.asset_backfill_data.target_subset.asset_keys} == {
        "raw_cdc_staging",
        "deduped_events",
        "dim_notes",
    }


def test_late_windows_are_asked_for_once_however_often_the_sensor_looks(story, sensor):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    for _ in range(3):
        sensor.tick()
    assert len(sensor.backfills()) == 1


def test_daemon_that_dies_between_asking_and_remembering_asks_for_the_same_backfill(story, sensor):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    sensor.tick(daemon_dies=True)
    sensor.tick(daemon_dies=True)
    assert len(sensor.backfills()) == 1


def test_what_lands_late_while_a_backfill_runs_is_asked_for_apart_or_waits_for_its_end(story, sensor):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    sensor.tick()
    story.land_file(Commit(13, 31, [Change("c", 4, {"title": "again", "body": None})]), LATE_TWO)
    sensor.tick()
    first, second = sorted(sensor.backfills(), key=lambda each: each.backfill_timestamp)
    assert windows_of(first) == {FIRST}
    assert windows_of(second) == {THIRD}, "the first window waits for the end of its backfill"
    sensor.end(first, BulkActionStatus.COMPLETED_SUCCESS)
    sensor.end(second, BulkActionStatus.COMPLETED_SUCCESS)
    sensor.tick()
    assert len(sensor.backfills()) == 3


def test_backfill_that_failed_is_asked_for_again_after_a_while_under_another_id(story, sensor, monkeypatch):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    sensor.tick()
    (backfill,) = sensor.backfills()
    # It took longer than the wait before the next attempt, which counts from its end.
    took = backfill._replace(backfill_timestamp=time.time() - 3600).with_end_timestamp(time.time())
    sensor.end(took, BulkActionStatus.FAILED)
    assert "the next is at" in sensor.tick().skip_reason.skip_message
    monkeypatch.setattr(
        "omnisupport_ingest.layers.scheduling.late_replay.retry_at", lambda _, ended_at: ended_at
    )
    # A person who cancels it has an hour.
    sensor.end(took, BulkActionStatus.CANCELED)
    assert "the next is at" in sensor.tick().skip_reason.skip_message
    sensor.end(took, BulkActionStatus.FAILED)
    sensor.tick()
    again = {each.backfill_id for each in sensor.backfills()} - {backfill.backfill_id}
    assert again == {backfill.backfill_id.removesuffix("a1") + "a2"}


def test_what_lands_late_in_a_window_whose_backfill_failed_waits_with_it_and_keeps_no_other_waiting(
    story, sensor
):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    sensor.tick()
    (backfill,) = sensor.backfills()
    sensor.end(backfill.with_end_timestamp(time.time()), BulkActionStatus.CANCELED)
    story.land_file(Commit(13, 31, [Change("c", 4, {"title": "again", "body": None})]))
    assert "the next is at" in sensor.tick().skip_reason.skip_message
    story.land_file(LATE_TWO)
    sensor.tick()
    (other,) = [each for each in sensor.backfills() if each.backfill_id != backfill.backfill_id]
    assert windows_of(other) == {THIRD}


def ended(second: int, *windows: str, succeeded: bool = False, cancelled: bool = False) -> EndedReplay:
    return EndedReplay(frozenset(windows), stories.START + timedelta(seconds=second), succeeded, cancelled)


@pytest.mark.parametrize(
    ("replays", "waits"),
    [
        ([], {}),
        ([ended(0, FIRST)], {FIRST: 5}),
        ([ended(0, FIRST), ended(10, FIRST, THIRD)], {FIRST: 20, THIRD: 15}),
        ([ended(10, FIRST), ended(0, FIRST)], {FIRST: 20}),
        ([ended(0, FIRST), ended(10, FIRST, succeeded=True)], {}),
        ([ended(0, FIRST), ended(10, FIRST, succeeded=True), ended(20, FIRST)], {FIRST: 25}),
        ([ended(0, FIRST, cancelled=True)], {FIRST: 3600}),
        ([ended(-4000, FIRST, cancelled=True), ended(-60, THIRD)], {}),
    ],
)
def test_each_window_waits_longer_with_every_replay_of_it_that_fails(replays, waits):
    found = waiting_windows(replays, stories.START)
    assert {window: (until - stories.START).seconds for window, until in found.items()} == waits


def test_window_with_late_events_is_left_out_by_the_forward_sensor(story, sensor, definitions):
    story.land_file(NEWEST)
    story.land_file(LATE_ONE)
    forward = definitions.get_repository_def().get_sensor_def(f"wal_batches_{SOURCE}")
    result = forward(dg.build_sensor_context(sensor.instance), workspace=story.workspace)
    asked = [request.tags["dagster/asset_partition_range_start"] for request in result.run_requests]
    assert asked == ["2026-01-01T1500"]


@pytest.mark.slow
def test_replay_run_takes_the_late_events_and_leaves_nothing_to_ask_for(soon_closing):
    story = soon_closing
    definitions = build_definitions(story.workspace)
    first, newest = (story.workspace.grid.key_of(each, story.clock) for each in (stories.START, story.clock))
    story.land_file(EARLY, Commit(90, 299, NEWEST.changes))
    with dg.instance_for_test() as instance:
        done = run_windows(instance, definitions, WindowRun(SOURCE, WindowRange(first, newest), None))
        assert done.succeeded, done.failures
        story.land_file(LATE_ONE)
        assert pending_windows(story.workspace, SOURCE).late_windows == (first,)
        tags = {keys.REASON_TAG: "late", keys.LATE_TAG: "1"}
        done = run_windows(
            instance, definitions, WindowRun(SOURCE, WindowRange(first, first), None, replay=tags)
        )
        assert done.succeeded, done.failures
        assert pending_windows(story.workspace, SOURCE).late_windows == ()
        wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey([SOURCE, "dim_notes"]), asset_partitions=[first])
        (record,) = instance.fetch_materializations(wanted, limit=1).records
    metadata = record.asset_materialization.metadata
    assert metadata["replay"].value == "changed by late events"
    assert metadata["keys_changed"].value == 1
    assert metadata["content_hash_before"].value != metadata["content_hash"].value


@pytest.mark.slow
def test_run_of_a_backfill_finds_its_late_windows_settled(soon_closing):
    story = soon_closing
    definitions = build_definitions(story.workspace)
    first, newest = (story.workspace.grid.key_of(each, story.clock) for each in (stories.START, story.clock))
    story.land_file(EARLY, Commit(90, 299, NEWEST.changes))
    with dg.instance_for_test() as instance:
        assert run_windows(
            instance, definitions, WindowRun(SOURCE, WindowRange(first, newest), None)
        ).succeeded
        story.land_file(LATE_ONE)
        # As the daemon runs a backfill: every asset of it, with the checks that they have.
        done = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance,
            asset_selection=[
                keys.raw_key(SOURCE),
                keys.deduped_key(SOURCE),
                keys.dimension_key(story.contract),
            ],
            tags={
                "dagster/asset_partition_range_start": first,
                "dagster/asset_partition_range_end": first,
                keys.LATE_TAG: "1",
            },
        )
        found = {each.check_name: each.passed for each in done.get_asset_check_evaluations()}
    assert found["windows_settled"] and found["replays_explained"]


@pytest.mark.slow
def test_backfill_by_hand_fails_and_changes_nothing_where_the_table_refuses_it(recent_story):
    story = recent_story
    first, newest = (story.workspace.grid.key_of(each, story.clock) for each in (stories.START, story.clock))
    story.land_file(EARLY, Commit(90, 299, NEWEST.changes))
    table = write_decision(story.contracts.parent / "table.csv", "manual_backfill", "refuse")
    story.workspace = replace(story.workspace, decisions=load_decision_table(table))
    definitions = build_definitions(story.workspace)
    windows, by_hand = WindowRange(first, newest), {keys.REASON_TAG: "to be sure"}
    with dg.instance_for_test() as instance:
        refused = run_windows(instance, definitions, WindowRun(SOURCE, windows, None, replay=by_hand))
        assert [failure.step for failure in refused.failures] == [f"{SOURCE}/raw_cdc_staging"]
        assert "manual_backfill" in refused.failures[0].problem
        assert "replay_window" in refused.failures[0].fix
        assert not story.workspace.raw(SOURCE).exists
        done = run_windows(instance, definitions, WindowRun(SOURCE, windows, None))
        assert done.succeeded, "a run that the sensor asks for is no backfill by hand"
        story.land_file(LATE_ONE)
        late = by_hand | {keys.LATE_TAG: "1"}
        done = run_windows(
            instance, definitions, WindowRun(SOURCE, WindowRange(first, first), None, replay=late)
        )
        assert done.succeeded, "nor is the replay of late events"
