"""The job that records a review from the UI: the same rules as the command, and the sensor then replays."""

from __future__ import annotations

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import run_layers

COLLIDED = [Commit(10, 1, [Change("c", 1, {"title": title, "body": None})]) for title in ("one", "another")]


def held(story: Story) -> list[str]:
    rows = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    return [str(row.event) for row in rows]


def run(
    definitions: dg.Definitions, instance: dg.DagsterInstance, **config: object
) -> dg.ExecuteInProcessResult:
    return definitions.resolve_job_def(f"review_{SOURCE}").execute_in_process(
        instance=instance,
        run_config={"ops": {f"decide_{SOURCE}": {"config": config}}},
        raise_on_error=False,
    )


@pytest.mark.slow
def test_a_review_by_the_job_is_recorded_and_its_window_is_asked_for_by_the_sensor(
    recent_story: Story, spark: SparkSession
):
    story = recent_story
    story.land(COLLIDED[0])
    (window,) = story.land_again(COLLIDED[1]).windows
    run_layers(story.workspace, spark, [window])
    one, another = held(story)
    definitions = build_definitions(story.workspace)
    with dg.DagsterInstance.ephemeral() as instance:
        refused = run(
            definitions, instance, events=[one, another], decision="release", reviewer="ana", reason="both"
        )
        assert not refused.success
        assert ReviewLedger.open(story.workspace, SOURCE).reviews == ()

        done = run(definitions, instance, events=[one], decision="release", reviewer="ana", reason="right")
        assert done.success
        (output,) = [
            event for event in done.all_node_events if event.event_type is dg.DagsterEventType.STEP_OUTPUT
        ]
        metadata = output.step_output_data.metadata
        assert metadata["stale_windows"].value == window
        assert metadata["still_open_at_the_same_positions"].value == another
    (review,) = ReviewLedger.open(story.workspace, SOURCE).reviews
    assert (str(review.event), review.reviewer, review.why) == (one, "ana", "right")

    assert pending_windows(story.workspace, SOURCE).windows == (window,)
    sensor = definitions.resolve_sensor_def(f"wal_batches_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(
            instance=instance,
            definitions=definitions,
            resources={"workspace": story.workspace},
        )
        (request,) = sensor(context).run_requests
    assert request.tags["dagster/asset_partition_range_start"] == window

    ingest = definitions.resolve_job_def(f"ingest_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:
        assert ingest.execute_in_process(instance=instance, tags=request.tags).success
    assert held(story) == [another]
    assert pending_windows(story.workspace, SOURCE).windows == ()


@pytest.mark.parametrize("missing", ["events", "decision", "reviewer", "reason"])
def test_who_what_and_why_must_be_told(story: Story, definitions: dg.Definitions, missing: str):
    config = {"events": ["1:0/A:0#0000000000000001"], "decision": "discard", "reviewer": "ana", "reason": "x"}
    del config[missing]
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(dg.DagsterInvalidConfigError):
        run(definitions, instance, **config)
