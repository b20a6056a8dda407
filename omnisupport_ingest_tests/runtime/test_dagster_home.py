"""The instance that Dagster reads from the folder we write."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance
from dagster._core.instance.ref import InstanceRef
from dagster._core.scheduler.instigation import InstigatorType, TickStatus
from dagster._core.storage.event_log import SqliteEventLogStorage

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_home import (
    TICKS_KEPT,
    dagster_environment,
    remove_old_run_logs,
    with_driver,
    write_dagster_home,
)
from omnisupport_ingest.settings import Settings


def made(settings: Settings) -> Home:
    home = Home.open(settings.home, settings.window_size)
    write_dagster_home(settings, home)
    return home


def test_dagster_takes_the_folder_and_sends_no_telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "home")
    home = made(settings)
    for name, value in dagster_environment(settings, home).items():
        monkeypatch.setenv(name, value)
    with DagsterInstance.get() as instance:
        assert not instance.telemetry_enabled
        assert instance.run_monitoring_enabled
        assert not instance.run_retries_enabled
        pools = instance.get_concurrency_config().pool_config
        assert (str(pools.pool_granularity.value), pools.default_pool_limit) == ("op", 1)
        assert instance.event_log_storage.get_materialized_partitions  # It opens: SQLite in the home.
        assert isinstance(instance.event_log_storage, SqliteEventLogStorage)
        assert list(home.dagster.rglob("*.db"))


def test_a_plain_dagster_dev_in_the_project_has_the_same_rules_and_sends_no_telemetry(
    tmp_path: Path,
) -> None:
    """Without DAGSTER_HOME, `dagster dev` configures its temporary instance from its working directory."""
    project = Path(__file__).parents[2]
    settings = Settings(home=tmp_path / "home")
    written = yaml.safe_load((made(settings).dagster / "dagster.yaml").read_text())
    plain = yaml.safe_load((project / "dagster.yaml").read_text())
    assert plain == {name: written[name] for name in plain}
    (tmp_path / "instance").mkdir()
    reference = InstanceRef.from_dir(str(tmp_path / "instance"), config_dir=str(project))
    with DagsterInstance.from_ref(reference) as instance:
        assert not instance.telemetry_enabled


def test_postgresql_storage_is_chosen_by_one_setting_and_its_password_is_in_no_file(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", dagster_pg_url="postgresql://me:hunter2@127.0.0.1:1/dagster")
    home = made(settings)
    assert "hunter2" not in (home.dagster / "dagster.yaml").read_text()
    assert "OMNISUPPORT_DAGSTER_STORAGE_URL" in (home.dagster / "dagster.yaml").read_text()
    url = dagster_environment(settings, home)["OMNISUPPORT_DAGSTER_STORAGE_URL"]
    assert url == "postgresql+psycopg2://me:hunter2@127.0.0.1:1/dagster"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("postgresql://h/d", "postgresql+psycopg2://h/d"),
        ("postgres://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2://h/d"),
    ],
)
def test_the_url_names_the_driver_that_is_installed(given: str, taken: str) -> None:
    assert with_driver(given) == taken


def test_logs_of_runs_long_past_are_removed_and_younger_ones_kept(tmp_path: Path) -> None:
    home = made(Settings(home=tmp_path / "home"))
    runs = home.logs / "runs"
    # Ticks of one sensor log into one folder, which they do not touch once it is there.
    for name, days in (("old/a.err", 31), ("young/a.err", 29), ("ours/s/1.err", 31), ("ours/s/2.err", 1)):
        file = runs / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        then = time.time() - days * 86_400
        os.utime(file, (then, then))
    for folder in (runs / "ours", runs / "ours" / "s"):
        then = time.time() - 31 * 86_400
        os.utime(folder, (then, then))
    assert remove_old_run_logs(home) == 2
    then = time.time() - 31 * 86_400
    os.utime(runs / "old", (then, then))
    assert remove_old_run_logs(home) == 0
    left = sorted(str(each.relative_to(runs)) for each in runs.rglob("*"))
    assert left == ["ours", "ours/s", "ours/s/2.err", "young", "young/a.err"]


def test_ticks_are_kept_as_long_as_retention_show_says(tmp_path: Path) -> None:
    home = made(Settings(home=tmp_path / "home"))
    with DagsterInstance.from_config(str(home.dagster)) as instance:
        for of in (InstigatorType.SENSOR, InstigatorType.SCHEDULE):
            kept = instance.get_tick_retention_settings(of)
            assert kept[TickStatus.SUCCESS] == kept[TickStatus.FAILURE] == TICKS_KEPT.days
            assert kept[TickStatus.SKIPPED] == 1
