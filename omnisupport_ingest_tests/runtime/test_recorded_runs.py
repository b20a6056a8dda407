"""Runs, sensors and checks from Dagster's own files, as Dagster wrote them."""

from pathlib import Path

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._core.test_utils import instance_for_test

from omnisupport_ingest.runtime.recorded_runs import recorded


@dg.asset
def rows() -> None:
    """An asset."""


@dg.asset_check(asset=rows)
def sound(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=not context.run.tags.get("broken"), description="Two rows are gone.")


def test_it_says_what_dagster_recorded(tmp_path: Path) -> None:
    definitions = dg.Definitions(assets=[rows], asset_checks=[sound], jobs=[dg.define_asset_job("take")])
    job = definitions.resolve_job_def("take")
    with instance_for_test(temp_dir=str(tmp_path)) as instance:
        job.execute_in_process(instance=instance)
        first = recorded(tmp_path)
        job.execute_in_process(instance=instance, tags={"broken": "yes"})
        for status, reason in ((TickStatus.SUCCESS, None), (TickStatus.SKIPPED, "Nothing has landed.")):
            instance.create_tick(
                TickData(
                    instigator_origin_id="origin",
                    instigator_name="wal_batches",
                    instigator_type=InstigatorType.SENSOR,
                    status=status,
                    timestamp=1_800_000_000.0,
                    selector_id="selector",
                    skip_reason=reason,
                    run_ids=[],
                    run_keys=[],
                )
            )
        last = recorded(tmp_path)
    assert first is not None
    assert last is not None
    assert [(each.job, each.status, each.going_on) for each in last.runs] == [("take", "SUCCESS", False)] * 2
    assert (first.failed_checks, len(last.checks)) == ((), 1)
    (failed,) = last.failed_checks
    assert (failed.asset, failed.check, failed.said) == ("rows", "sound", "Two rows are gone.")
    (sensor,) = last.sensors
    assert (sensor.name, sensor.tick, sensor.said) == ("wal_batches", "SKIPPED", "Nothing has landed.")
    assert sensor.tick_at is not None
    assert sensor.tick_at.year == 2027


def test_a_home_without_such_files_tells_nothing_and_a_damaged_one_no_run(tmp_path: Path) -> None:
    assert recorded(tmp_path) is None
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "runs.db").write_bytes(b"not a database")
    found = recorded(tmp_path)
    assert found is not None
    assert (found.runs, found.sensors, found.checks, found.daemon_at) == ((), (), (), None)
