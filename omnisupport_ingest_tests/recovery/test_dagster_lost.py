"""Dagster's whole folder is deleted: the lake knows where it stands, and the pipeline goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.metadata import CONCEPTS
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.sensor_tick import FORWARD, evaluate
from omnisupport_ingest_tests.recovery.traces import contents
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("spark")


def rebuild() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "checkpoint", "rebuild"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ingest(story: Story, folder, instance: dg.DagsterInstance) -> tuple[str, str]:
    """Do the one run that the sensor asks for; returns its first and last window."""
    (request,) = evaluate(folder, instance, FORWARD).requests
    job = build_definitions(story.workspace).resolve_job_def(f"ingest_{SOURCE}")
    assert job.execute_in_process(instance=instance, tags=request.tags).success
    return request.windows


def metadata_of(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str | None, dict]:
    """The metadata of every materialization of ``key``, by partition."""
    found = instance.fetch_materializations(key, limit=100).records
    return {record.partition_key: dict(record.asset_materialization.metadata) for record in found}


@pytest.mark.slow
def test_without_its_folder_dagster_shows_every_partition_again_and_takes_new_batches(recent: Story, folder):
    story = recent
    partitioned = [keys.raw_key(SOURCE), keys.deduped_key(SOURCE), keys.dimension_key(story.contract)]
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    story.land(Commit(20, 61, [Change("c", 2, {"title": "two", "body": None})]))
    with dg.DagsterInstance.get() as instance:
        first, second = ingest(story, folder, instance)
        shown = {key: metadata_of(instance, key) for key in partitioned}
    held = contents(story.workspace)

    shutil.rmtree(story.workspace.home.dagster)
    assert "6 partitions are reported materialized again" in rebuild()
    assert "0 partitions are reported materialized again" in rebuild()
    with dg.DagsterInstance.get() as instance:
        for key in partitioned:
            assert instance.get_materialized_partitions(key) == {first, second}
        for key, before in shown.items():
            now = metadata_of(instance, key)
            assert now.keys() == before.keys()
            for partition, entries in now.items():
                assert set(CONCEPTS) <= entries.keys()
                # A run also knows how long it took, which no log of a table does.
                assert entries.keys() == before[partition].keys() - {"duration_seconds"}
                for concept in CONCEPTS:
                    assert entries[concept] == before[partition][concept]
        assert not evaluate(folder, instance, FORWARD).requests

        story.land(Commit(30, 62, [Change("u", 2, {"title": "three"}, unchanged=("body",))]))
        assert ingest(story, folder, instance) == (second, second)
        assert not evaluate(folder, instance, FORWARD).requests
    after = contents(story.workspace)
    assert [len(after[name].rows) for name in ("raw", "deduped", "dim")] == [3, 3, 2]
    assert set(held["raw"].rows) < set(after["raw"].rows)
    assert any("'three'" in row for row in after["dim"].rows)
