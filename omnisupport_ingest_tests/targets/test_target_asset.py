"""A target is an asset of its own: the lake goes on where its warehouse does not answer."""

from __future__ import annotations

import time
from dataclasses import replace
from uuid import uuid4

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.targets import LOOK_SECONDS, RETRY_SECONDS, _request
from omnisupport_ingest.targets.standing import last_syncs, note_failed, note_synced
from omnisupport_ingest.targets.sync import sync_target
from omnisupport_ingest_tests.layers.story import SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_layers import run
from omnisupport_ingest_tests.targets.test_target import ENV, UPDATE, Warehouse, story, warehouse
from omnisupport_ingest_tests.waiting import PATIENCE

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
        for selection in (None, frozenset({key})):
            before = dg.DagsterRun(
                job_name=job.name,
                run_id=str(uuid4()),
                status=dg.DagsterRunStatus.STARTED,
                asset_selection=selection,
            )
            instance.add_run(before)
            assert requests() == [], "the run before goes on, so another would only wait for it"
            instance.delete_run(before.run_id)
        good = warehouse.dsn
        monkeypatch.setenv(ENV, "postgresql://me:s3cret@127.0.0.1:1/none")
        failed = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not failed.success
        told = [str(event.event_specific_data) for event in failed.all_events if event.is_step_failure]
        assert told and "s3cret" not in "".join(told)
        last = last_syncs(story.workspace.home, story.contract)
        assert last is not None and last.failed_at is not None
        for version in (1, 2):
            assert requests() == [], "a target that is away is tried again after a while"
            story.land(Commit(11 + version, 65 + version, [Change("u", 1, {"title": f"new {version}"})]))
            run(story, spark, SECOND)
        with monkeypatch.context() as later:
            later.setattr(time, "time", lambda: last.failed_at.timestamp() + RETRY_SECONDS)
            assert len(requests()) == 1
        monkeypatch.setenv(ENV, good)
        assert job.execute_in_process(instance=instance).success
        assert len(warehouse.rows()) == 40 and requests() == []
        story.land(UPDATE)
        run(story, spark, SECOND)
        assert len(requests()) == 1


def test_the_sensor_asks_for_another_target_and_for_a_table_that_was_made_anew(
    story: Story, warehouse: Warehouse
) -> None:
    key = keys.target_key(story.contract)
    snapshot = story.workspace.dimension(story.contract).open()
    synced = sync_target(story.workspace, story.contract)
    with dg.DagsterInstance.ephemeral() as instance:

        def asked(contract: TableContract, later: float = 0) -> dg.RunRequest | None:
            return _request(instance, story.workspace, contract, time.time() + later)

        def says(**told: object) -> None:
            metadata = {name: dg.MetadataValue.text(str(value)) for name, value in told.items()}
            metadata["delta_version"] = dg.MetadataValue.int(snapshot.version)
            instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata))

        target = f"{ENV} {warehouse.schema}.notes"
        says(table_id=synced.table_id, target=target)
        assert asked(story.contract) is None
        # Only a sync sees what somebody did to the target, so one is asked for every hour.
        assert asked(story.contract, LOOK_SECONDS - PATIENCE) is None
        looks = [asked(story.contract, LOOK_SECONDS + late) for late in (1, 1 + RETRY_SECONDS)]
        assert len({each.run_key for each in looks if each is not None}) == 2
        # A sync by hand has failed since: nobody else would find out that the target is right.
        note_failed(story.workspace.home, story.contract, OSError("no route"))
        assert asked(story.contract, RETRY_SECONDS - PATIENCE) is None
        assert asked(story.contract, RETRY_SECONDS) is not None
        note_synced(story.workspace.home, story.contract, synced.table_id, snapshot.version)
        assert asked(story.contract) is None
        policy = story.contract.target
        assert policy is not None
        elsewhere = asked(replace(story.contract, target=replace(policy, table="other")))
        assert elsewhere is not None
        says(table_id="made-before", target=target)
        anew = asked(story.contract)
        assert anew is not None and anew.run_key != elsewhere.run_key
