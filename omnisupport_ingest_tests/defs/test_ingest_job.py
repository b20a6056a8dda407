"""One run through every layer on real Spark, what Dagster then shows, and what is left without Dagster."""

from __future__ import annotations

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.metadata import CONCEPTS
from omnisupport_ingest.layers.dimension import net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.windows import KEY_FORMAT
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

pytestmark = pytest.mark.usefixtures("spark")

RAW = dg.AssetKey([SOURCE, "raw_cdc_staging"])
DIMENSION = dg.AssetKey([SOURCE, "dim_notes"])
EMPTY = Commit(5, 0, [])


@pytest.mark.quick
def test_a_range_of_windows_goes_through_every_layer_and_survives_the_loss_of_dagster(recent_story: Story):
    story = recent_story
    definitions = build_definitions(story.workspace)
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    batch = story.land(Commit(20, 2, [Change("u", 1, {"title": "two", "body": None})]))
    (first,) = batch.windows
    second = story.workspace.grid.end_of(first).strftime(KEY_FORMAT)
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": second}
    with dg.DagsterInstance.ephemeral() as instance:
        run = definitions.resolve_job_def(f"ingest_{SOURCE}").execute_in_process(instance=instance, tags=tags)
        assert run.success
        assert instance.get_materialized_partitions(DIMENSION) == {first, second}
        metadata = (
            instance.fetch_materializations(dg.AssetRecordsFilter(RAW, asset_partitions=[first]), limit=1)
            .records[0]
            .asset_materialization.metadata
        )
        assert set(CONCEPTS) <= set(metadata)
        assert metadata["events_raw"].value == 3
        assert metadata["cursor"].value == "1:0/14:0"
        assert all(check.passed for check in run.get_asset_check_evaluations())
        shown = instance.get_latest_materialization_event(DIMENSION).asset_materialization.metadata
        assert (shown["complete_to"].value, shown["dimension_rows"].value) == ("1:0/14:0", 1)
        assert shown["dagster/row_count"].value == 1
        assert shown["content_hash"].value != shown["dimension_content_hash"].value

        audit = definitions.resolve_job_def(f"audit_{SOURCE}").execute_in_process(instance=instance)
        verdicts = {check.check_name: check.passed for check in audit.get_asset_check_evaluations()}
        assert verdicts == {
            "chain_unbroken": True,
            "complete": True,
            "counts_add_up": True,
            "epochs_in_order": True,
            "fresh": True,
            "schema_as_contracted": True,
            "keys_unique": True,
            "meets_contract": True,
            "no_collisions": True,
            "no_unresolved_cells": True,
            "quarantine_not_rising": True,
            "replays_explained": True,
            "rules_kept": True,
            "sentinel_empty": True,
            "watermark_fresh": True,
            "windows_settled": True,
        }

    with dg.DagsterInstance.ephemeral() as empty:
        assert rebuild_materializations(empty, story.workspace) == 6
        assert rebuild_materializations(empty, story.workspace) == 0
        assert empty.get_materialized_partitions(DIMENSION) == {first, second}
        event = empty.get_latest_materialization_event(DIMENSION)
        assert {*CONCEPTS, "complete_to"} <= set(event.asset_materialization.metadata)


def test_a_window_that_a_failed_run_had_folded_is_not_missing_once_the_next_run_has_merged_it(
    recent_story: Story, spark: SparkSession
) -> None:
    story = recent_story
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    batch = story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    (first,) = batch.windows
    second = story.workspace.grid.end_of(first).strftime(KEY_FORMAT)
    arguments = (story.workspace, spark)
    for layer in (raw, deduped):
        layer.materialize(*arguments, SOURCE, [first], "one that fails now")
    net_changes.materialize(*arguments, story.contract, [first], "one that fails now")
    tags = {"dagster/asset_partition_range_start": second, "dagster/asset_partition_range_end": second}
    job = build_definitions(story.workspace).resolve_job_def(f"ingest_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, tags=tags).success
        assert instance.get_materialized_partitions(DIMENSION) == {first, second}
