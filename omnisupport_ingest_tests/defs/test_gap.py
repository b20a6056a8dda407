"""A batch is missing from the chain: check and sensor name both ends, and go on once it is back."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from omnisupport_ingest.contracts.decision_table import load_decision_table
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.checks import build_log_checks
from omnisupport_ingest.defs.sensors import _all_committed
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.scheduling.pending import Pending
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.contracts.decision_tables import write_decision
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story

MISSING = Commit(0x20, 1, [Change("c", 1, {"title": "one", "body": None})])
BEHIND = Commit(0x30, 61, [Change("c", 2, {"title": "two", "body": None})])


def evaluate(story: Story, definitions: dg.Definitions, instance: dg.DagsterInstance) -> dg.SensorResult:
    sensor = definitions.get_repository_def().get_sensor_def(f"wal_batches_{SOURCE}")
    return sensor(dg.build_sensor_context(instance), workspace=story.workspace)


def chain_check(story: Story, instance: dg.DagsterInstance) -> dg.AssetCheckEvaluation:
    """The verdict of ``chain_unbroken`` in a run of the checks that need no Spark."""
    checks = build_log_checks(SOURCE, [story.contract])
    checked = [keys.landing_key(SOURCE), keys.deduped_key(SOURCE), keys.dimension_key(story.contract)]
    definitions = dg.Definitions(
        assets=[dg.AssetSpec(key) for key in checked],
        asset_checks=checks,
        resources={"workspace": story.workspace},
        jobs=[dg.define_asset_job("checks", selection=dg.AssetSelection.checks(*checks))],
    )
    run = definitions.resolve_job_def("checks").execute_in_process(instance=instance)
    (found,) = [each for each in run.get_asset_check_evaluations() if each.check_name == "chain_unbroken"]
    return found


def test_a_gap_is_named_by_both_its_ends_and_holds_back_what_lies_behind_it(story: Story, definitions):
    story._seal([], StreamSpan(Lsn(0), Lsn(0x10), None, None, None, None, None))
    gone = story.land(MISSING)
    story.land(BEHIND)
    manifest = story.store.folder / "manifests" / f"{gone.batch_id}.json"
    kept = manifest.read_bytes()
    with dg.DagsterInstance.ephemeral() as instance:
        assert chain_check(story, instance).passed

        manifest.unlink()
        verdict = chain_check(story, instance)
        result = evaluate(story, definitions, instance)
        assert not verdict.passed
        assert verdict.severity is dg.AssetCheckSeverity.ERROR
        assert not result.run_requests
        for said in (verdict.description, result.skip_reason.skip_message):
            assert "ends at 0/10" in said
            assert "continues 0/20" in said
            assert "Fix: Restore the manifest" in said
            assert "capture --new-epoch" in said

        manifest.write_bytes(kept)
        assert chain_check(story, instance).passed
        (request,) = evaluate(story, definitions, instance).run_requests
        assert request.tags["dagster/asset_partition_range_start"] == FIRST
        assert request.tags["dagster/asset_partition_range_end"] == SECOND


def test_where_a_gap_stops_the_source_its_repair_by_a_new_epoch_lets_it_go_on(story: Story, definitions):
    path = write_decision(story.contracts.parent / "decisions.csv", "stream_gap", "stop")
    story.workspace = replace(story.workspace, decisions=load_decision_table(path))
    story.land(Commit(0x10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    gone = story.land(Commit(0x20, 2, [Change("c", 2, {"title": "two", "body": None})]))
    story.land(Commit(0x30, 61, [Change("c", 3, {"title": "three", "body": None})]))
    (story.store.folder / "manifests" / f"{gone.batch_id}.json").unlink()
    with dg.DagsterInstance.ephemeral() as instance:
        stopped = evaluate(story, definitions, instance)
        assert not stopped.run_requests
        said = stopped.skip_reason.skip_message
        assert said.startswith("Nothing is taken in until the gap is repaired: 1 batch waits. "), said

        read = Commit(0x40, 62, [Change("r", 1, {"title": "one", "body": None})])
        story.land_chunk(read, epoch=2)
        story.land_boundary(read, epoch=2)
        (request,) = evaluate(story, definitions, instance).run_requests
        assert request.tags["dagster/asset_partition_range_start"] == FIRST
        assert request.tags["dagster/asset_partition_range_end"] == SECOND


def test_a_repaired_gap_is_no_news_of_a_source_that_has_taken_in_everything(pending: Pending) -> None:
    gap = Gap(1, "first", Lsn(0x20), "third", Lsn(0x30))
    assert "Fix: Restore the manifest" in _all_committed(replace(pending, gap=gap))
    assert _all_committed(replace(pending, gap=replace(gap, later_epoch=2))) == _all_committed(pending)


@pytest.fixture
def pending() -> Pending:
    return Pending((), 0, 4, "third", "0/40", None, None)
