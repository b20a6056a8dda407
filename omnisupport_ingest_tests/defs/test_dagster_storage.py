"""Dagster's records by connections that stay open: the same records in the same files, and fewer syncs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from alembic.script import ScriptDirectory
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from sqlalchemy import select

from omnisupport_ingest.defs.dagster_storage import (
    _OPEN_DATABASES,
    KeptEventLogStorage,
    KeptRunStorage,
    KeptScheduleStorage,
)
from omnisupport_ingest.defs.retention import remove_old_runs
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_home import write_dagster_home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.layers.story import Story
from omnisupport_ingest_tests.waiting import until

_KILLED = """
import os, signal
import dagster as dg
instance = dg.DagsterInstance.get()
for number in range(20):
    instance.report_runless_asset_event(dg.AssetMaterialization("orders", metadata={"number": number}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    """The instance of a home, as every process of the platform opens it."""
    settings = Settings(home=tmp_path / "home")
    home = Home.open(settings.home, settings.window_size)
    write_dagster_home(settings, home)
    monkeypatch.setenv("DAGSTER_HOME", str(home.dagster))
    return dg.DagsterInstance.get()


@dg.asset
def orders() -> None:
    """An asset to make."""


def made(instance: dg.DagsterInstance) -> str:
    """A finished run that has made ``orders``; its id."""
    return dg.materialize([orders], instance=instance).run_id


def test_the_instance_of_a_home_uses_it_and_records_what_dagster_would(instance: dg.DagsterInstance) -> None:
    stores = instance.run_storage, instance.event_log_storage, instance.schedule_storage
    assert list(map(type, stores)) == [KeptRunStorage, KeptEventLogStorage, KeptScheduleStorage]
    run_id = made(instance)
    with dg.DagsterInstance.from_ref(instance.get_ref()) as another:
        run = another.get_run_by_id(run_id)
        assert run is not None
        assert run.status is dg.DagsterRunStatus.SUCCESS
        assert another.get_latest_materialization_event(orders.key) is not None
        assert len(another.all_logs(run_id)) == len(instance.all_logs(run_id))


def test_the_files_are_where_dagsters_own_storage_looks_for_them(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    run_id = made(instance)
    yaml = tmp_path / "home" / "dagster" / "dagster.yaml"
    yaml.write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.get() as own:
        assert not isinstance(own.run_storage, KeptRunStorage)
        assert own.get_run_by_id(run_id) is not None
        assert own.get_latest_materialization_event(orders.key) is not None


def test_a_process_keeps_open_the_databases_of_the_runs_last_used(instance: dg.DagsterInstance) -> None:
    runs = [made(instance) for _ in range(_OPEN_DATABASES + 3)]
    open_files = {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    kept = [run for run in runs if any(each.endswith(f"{run}.db") for each in open_files)]
    # The others are of the instance: its runs, its assets.
    assert kept == runs[-len(kept) :]
    assert _OPEN_DATABASES - 3 <= len(kept) < _OPEN_DATABASES
    assert all(instance.all_logs(run) for run in runs), "those that are closed are opened again"


def test_an_instance_that_is_closed_keeps_no_database_open(instance: dg.DagsterInstance) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with dg.DagsterInstance.from_ref(instance.get_ref()) as another:
        made(another)
        another.all_instigator_state()
        assert [each for each in set(Path("/proc/self/fd").iterdir()) - before if each.exists()]
    left = {each for each in Path("/proc/self/fd").iterdir() if each.exists()} - before
    assert not [each for each in left if each.readlink().name.endswith((".db", ".db-wal"))]


def test_threads_ask_and_tell_at_once(instance: dg.DagsterInstance) -> None:
    def tell(number: int) -> int:
        instance.report_runless_asset_event(dg.AssetMaterialization("orders", metadata={"number": number}))
        return instance.get_runs_count()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tell, range(80))) == [0] * 80
    assert len(instance.fetch_materializations(orders.key, limit=100).records) == 80


def test_a_killed_process_loses_nothing_that_it_has_told(instance: dg.DagsterInstance) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED], env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert len(instance.fetch_materializations(orders.key, limit=100).records) == 20


def test_an_instance_that_is_opened_again_reads_no_migration_of_dagster(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    assert not instance.fetch_materializations(orders.key, limit=1).records
    monkeypatch.setattr(ScriptDirectory, "from_config", lambda config: read.append(config))
    for _ in range(3):
        with dg.DagsterInstance.from_ref(instance.get_ref()) as another:
            assert another.get_runs_count() == 0
            assert list(another.all_instigator_state()) == []
            assert not another.fetch_materializations(orders.key, limit=1).records
    assert not read


def test_databases_that_were_deleted_are_made_again(instance: dg.DagsterInstance) -> None:
    made(instance)
    reference = instance.get_ref()
    instance.dispose()
    for gone in Path(instance.root_directory).glob("schedules/schedules.db*"):
        gone.unlink()
    for gone in Path(instance.root_directory).glob("history/runs/index.db*"):
        gone.unlink()
    with dg.DagsterInstance.from_ref(reference) as another:
        assert list(another.all_instigator_state()) == []
        assert not another.fetch_materializations(orders.key, limit=1).records
        assert another.get_runs_count() == 1


_REPORT = """
import sys
import dagster as dg
from dagster._core.events import EngineEventData
instance = dg.DagsterInstance.get()
run = instance.get_run_by_id(sys.argv[1])
for number in range(5):
    instance.report_engine_event(f"event {number}", run)
"""


def test_whoever_watches_a_run_is_told_what_another_process_records(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    run_id = made(instance)
    seen: list[str] = []
    records = instance.get_records_for_run(run_id)
    instance.watch_event_logs(run_id, records.cursor, lambda event, _: seen.append(event.message))
    subprocess.run([sys.executable, "-c", _REPORT, run_id], check=True)
    until(lambda: len(seen) >= 5)
    assert [each for each in seen if each.startswith("event ")] == [f"event {number}" for number in range(5)]
    instance.dispose()


@dg.asset_check(asset=orders)
def counted() -> dg.AssetCheckResult:
    """A check to execute."""
    return dg.AssetCheckResult(passed=True)


def test_a_run_that_is_deleted_leaves_no_file_and_of_its_checks_the_last_one(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    storage = instance.event_log_storage
    assert isinstance(storage, KeptEventLogStorage)

    def checks() -> list[str]:
        with storage.index_connection() as connection:
            table = AssetCheckExecutionsTable
            found = connection.execute(select(table.c.run_id).order_by(table.c.id)).fetchall()
        return [row[0] for row in found]

    runs = [dg.materialize([orders, counted], instance=instance).run_id for _ in range(3)]
    workspace = Story(tmp_path / "story").workspace
    assert all(Path(storage.path_for_shard(each)).exists() for each in runs) and checks() == runs
    assert remove_old_runs(instance, workspace, datetime.now(UTC) - timedelta(hours=1)) == 0
    assert checks() == runs
    assert remove_old_runs(instance, workspace, datetime.now(UTC) + timedelta(hours=1)) == 3
    folder = Path(storage.path_for_shard(runs[0])).parent
    assert {each.name.partition(".")[0] for each in folder.iterdir()} == {"index"}
    assert checks() == runs[-1:]
    again = made(instance)
    assert instance.all_logs(again) and Path(storage.path_for_shard(again)).exists()
