"""A target is an asset of its own: the lake goes on where its warehouse does not answer."""

from __future__ import annotations

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest_tests.stages.story import SECOND, SOURCE, Story
from omnisupport_ingest_tests.stages.test_layers import run
from omnisupport_ingest_tests.targets.test_target import ENV, UPDATE, Warehouse, story, warehouse

__all__ = ["story", "warehouse"]


def test_the_sensor_asks_until_the_target_is_synced(
    story: Story, warehouse: Warehouse, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions = build_definitions(story.workspace)
    key = keys.target_key(story.contract)
    graph = definitions.resolve_asset_graph()
    assert graph.get(key).parent_keys == {keys.dimension_key(story.contract)}
    assert (
        key not in definitions.resolve_job_def(keys.ingest_job_name(SOURCE)).asset_layer.selected_asset_keys
    )
    sensor = definitions.resolve_sensor_def(f"targets_{SOURCE}")
    job = definitions.resolve_job_def(f"targets_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:

        def requests() -> list[dg.RunRequest]:
            context = dg.build_sensor_context(
                instance=instance, definitions=definitions, resources={"workspace": story.workspace}
            )
            return list(sensor.evaluate_tick(context).run_requests or [])

        (asked,) = requests()
        assert list(asked.asset_selection or []) == [key]
        good = warehouse.dsn
        monkeypatch.setenv(ENV, "postgresql://me:s3cret@127.0.0.1:1/none")
        failed = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not failed.success
        told = [str(event.event_specific_data) for event in failed.all_events if event.is_step_failure]
        assert told and "s3cret" not in "".join(told)
        assert len(requests()) == 1
        monkeypatch.setenv(ENV, good)
        assert job.execute_in_process(instance=instance).success
        assert len(warehouse.rows()) == 40 and requests() == []
        story.land(UPDATE)
        run(story, spark, SECOND)
        assert len(requests()) == 1
