"""Runs, sensors and checks from Dagster's own files, as Dagster wrote them."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._core.test_utils import create_run_for_test, instance_for_test
from pydantic import SecretStr

from omnisupport_ingest.runtime.dagster_home import with_driver
from omnisupport_ingest.runtime.recorded_runs import CheckSeen, Recorded, recorded


@dg.asset
def rows() -> None:
    """An asset."""


@dg.asset_check(asset=rows)
def sound(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=not context.run.tags.get("broken"), description="Two rows are gone.")


@dg.op
def breaks(context: dg.OpExecutionContext) -> None:
    if context.run.tags.get("broken"):
        raise ValueError("as asked")


@dg.job
def brittle() -> None:
    breaks()


@pytest.mark.full
def test_it_says_what_dagster_recorded_in_files(tmp_path: Path) -> None:
    with instance_for_test(temp_dir=str(tmp_path)) as instance:
        _says_what_is_recorded(instance, lambda: recorded(tmp_path))


def test_it_says_what_dagster_recorded_in_a_postgresql(tmp_path: Path, records: SecretStr) -> None:
    url = with_driver(records.get_secret_value())
    overrides = {"storage": {"postgres": {"postgres_url": url}}}
    with instance_for_test(overrides=overrides, temp_dir=str(tmp_path)) as instance:
        _says_what_is_recorded(instance, lambda: recorded(tmp_path, records))


def test_a_postgresql_that_does_not_answer_tells_nothing(tmp_path: Path) -> None:
    assert recorded(tmp_path, SecretStr("postgresql://me@127.0.0.1:1/dagster")) is None


def _says_what_is_recorded(instance: dg.DagsterInstance, look: Callable[[], Recorded | None]) -> None:
    definitions = dg.Definitions(assets=[rows], asset_checks=[sound], jobs=[dg.define_asset_job("take")])
    job = definitions.resolve_job_def("take")
    job.execute_in_process(instance=instance)
    first = look()
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
    last = look()
    assert first is not None
    assert last is not None
    assert not first.unread and not last.unread
    assert [(each.job, each.status, each.going_on) for each in last.runs] == [("take", "SUCCESS", False)] * 2
    assert (first.failed_checks, len(last.checks)) == ((), 1)
    (failed,) = last.failed_checks
    assert (failed.asset, failed.check, failed.said) == ("rows", "sound", "Two rows are gone.")
    (sensor,) = last.sensors
    assert (sensor.name, sensor.tick, sensor.said) == ("wal_batches", "SKIPPED", "Nothing has landed.")
    assert sensor.tick_at is not None
    assert sensor.tick_at.year == 2027
    assert last.failed_jobs == ()
    brittle.execute_in_process(instance=instance, tags={"broken": "yes"}, raise_on_error=False)
    for _ in range(6):
        job.execute_in_process(instance=instance)
    failed_long_ago = look()
    assert failed_long_ago is not None
    assert [each.job for each in failed_long_ago.failed_jobs] == ["brittle"], "no other job makes it well"
    brittle.execute_in_process(instance=instance)
    well = look()
    assert well is not None
    assert well.failed_jobs == ()


def test_runs_that_go_on_come_first_however_many_there_are(tmp_path: Path) -> None:
    """The newest runs are those that wait, and hide the ones that run."""
    made = [
        *[dg.DagsterRunStatus.STARTED] * 2,
        *[dg.DagsterRunStatus.SUCCESS] * 7,
        dg.DagsterRunStatus.STARTING,
        *[dg.DagsterRunStatus.NOT_STARTED] * 6,
    ]
    with instance_for_test(temp_dir=str(tmp_path)) as instance:
        for status in made:
            create_run_for_test(instance, job_name="take", status=status)
    found = recorded(tmp_path)
    assert found is not None
    going_on = ["STARTED"] * 2 + ["STARTING"] + ["NOT_STARTED"] * 6
    assert [each.status for each in found.runs] == [*going_on, *["SUCCESS"] * 5]


def test_a_home_without_such_files_tells_nothing_and_a_damaged_one_no_run(tmp_path: Path) -> None:
    assert recorded(tmp_path) is None
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "runs.db").write_bytes(b"not a database")
    found = recorded(tmp_path)
    assert found is not None
    assert (found.runs, found.sensors, found.checks, found.daemon_at) == ((), (), (), None)
    assert found.unread == ("run",)


@pytest.mark.full
def test_a_failed_run_of_a_rare_job_is_reported_however_many_others_follow(tmp_path: Path) -> None:
    with instance_for_test(temp_dir=str(tmp_path)) as instance:
        create_run_for_test(instance, job_name="retention", status=dg.DagsterRunStatus.FAILURE)
        create_run_for_test(instance, job_name="__ASSET_JOB", status=dg.DagsterRunStatus.FAILURE)
        for _ in range(301):
            create_run_for_test(instance, job_name="ingest", status=dg.DagsterRunStatus.SUCCESS)
    found = recorded(tmp_path)
    assert found is not None and not found.unread
    assert [each.job for each in found.failed_jobs] == ["__ASSET_JOB", "retention"]
    with closing(sqlite3.connect(tmp_path / "history" / "runs.db")) as records:
        records.execute("UPDATE runs SET end_time = 1.0")
        records.commit()
    found = recorded(tmp_path)
    assert found is not None and found.failed_jobs == (), "nobody may have such a job any more"


def test_checks_of_tables_without_a_contract_are_left_out() -> None:
    """A withdrawn table is judged by nothing any more: its last red check would stay for good."""
    assets = ("desk/dim_a", "desk/dim_b", "desk/history/dim_a_history", "desk/history/dim_b_history")
    assets += ("desk/target/a", "desk/target/b", "desk/deduped_events", "gone/raw_cdc_staging", "gone/dim_a")
    checks = tuple(CheckSeen(each, "c", False, datetime.now(UTC), None) for each in assets)
    found = Recorded((), (), (), checks, None).in_force({("desk", "a")})
    assert [each.asset for each in found.failed_checks] == [
        *("desk/dim_a", "desk/history/dim_a_history", "desk/target/a", "desk/deduped_events")
    ]
