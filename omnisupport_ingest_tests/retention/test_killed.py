"""Retention is killed at its failpoints: nothing is missing that no record names; the next call ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.cli.home_copy import copy_home
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.retention import remove_old_runs
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.layers.removed import LANDING, RAW, Present, Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.windows import WindowGrid, WindowSize
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, events
from omnisupport_ingest_tests.retention.test_story import DAY, damaged, put, take_all, told

pytestmark = pytest.mark.crash

REMOVE = """
import sys
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.settings import Settings
home, contracts = sys.argv[1:3]
settings = Settings(home=home, contracts_dir=contracts, window="minutes:1", _env_file=None)
workspace = Workspace.open(settings)
carry_out(workspace, plan_retention(workspace, "desk"), removed_by="test")
"""

FILES_POINTS = (
    "landing.positions.before",
    "landing.positions.after",
    "landing.positions.after:2",
    "retention.landing.before",
    "retention.landing.after:3",
    "lake.commit.after@retention_ledger:3",
    "lake.commit.after@raw_cdc_staging",
)
"""In the order in which a removal of files of events passes them."""

REMOVE_RUNS = """
import sys
from datetime import UTC, datetime, timedelta
import dagster as dg
from omnisupport_ingest.defs.retention import remove_old_runs
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
home, contracts = sys.argv[1:3]
settings = Settings(home=home, contracts_dir=contracts, window="minutes:1", _env_file=None)
workspace = Workspace.open(settings)
with dg.DagsterInstance.local_temp(sys.argv[3]) as instance:
    remove_old_runs(instance, workspace, datetime.now(UTC) + timedelta(days=1))
"""

POINTS = (
    "lake.ledger.before@retention_ledger",
    "lake.ledger.after@retention_ledger",
    "lake.commit.after@retention_ledger",
    "retention.landing.before",
    "retention.landing.after",
    "retention.landing.after:3",
    "lake.commit.after@retention_ledger:3",
    "lake.commit.before@raw_cdc_staging",
    "lake.commit.after@raw_cdc_staging",
)
"""In the order in which a removal from both layers passes them."""


@pytest.fixture(scope="module")
def old_home(tmp_path_factory, spark):  # type: ignore[no-untyped-def]
    """The home and contracts of a story whose first two windows are old."""
    folder = tmp_path_factory.mktemp("old")
    story = told(folder, {"landing": "P7D", "raw": "P10D"})
    story.land(put(10, 1, "first", op="c"), put(20, 61, "second"))
    story.land(put(30, 11 * DAY, "later"))
    take_all(story, spark)
    return story.workspace.settings.home, story.contracts


def opened(home: Path, contracts: Path) -> Workspace:
    return Workspace.open(Settings(home=home, contracts_dir=contracts, window="minutes:1", _env_file=None))


def killed(script: str, point: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, VARIABLE: point},
        check=False,
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()


@pytest.mark.parametrize("point", POINTS)
def test_a_removal_killed_at_a_gate_loses_nothing_and_the_next_call_ends_it(
    old_home, tmp_path, kept_in, point
):
    home, contracts = tmp_path / "home", old_home[1]
    shutil.copytree(old_home[0], home, symlinks=True)
    if kept_in is not None:
        copy_home(Home.open(home, WindowSize(1)), kept_in)
    killed(REMOVE, point, home, contracts)

    workspace = opened(home, contracts)
    removed, store = Removed.open(workspace, SOURCE), workspace.landing(SOURCE)
    assert damaged(store, Present(store, removed).has) == 0
    assert pending_windows(workspace, SOURCE).nothing
    if point in POINTS[:2]:
        assert not removed.removals and damaged(store) == 0

    carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test")
    removed = Removed.open(workspace, SOURCE)
    assert {(each.layer, each.window) for each in removed.removals} == {
        (layer, window) for layer in (LANDING, RAW) for window in (FIRST, SECOND)
    }
    assert not removed.unfinished
    data = store.folder / "data"
    (left,) = storage_of(data / "any").listed(data)
    assert [*data.rglob("*.parquet")] == [left.path]
    raw = workspace.raw(SOURCE).open()
    assert [raw.files(window) for window in (FIRST, SECOND)] == [(), ()]
    assert pending_windows(workspace, SOURCE).nothing
    version = raw.version
    assert carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test") == []
    assert workspace.raw(SOURCE).open().version == version


@pytest.fixture(scope="module")
def old_files_home(tmp_path_factory, spark):  # type: ignore[no-untyped-def]
    """The home and contracts of a story whose events came as files, two windows of which are old."""
    story = told(tmp_path_factory.mktemp("files"), {"landing": "P7D", "raw": "P10D"})
    story.land_file(put(10, 1, "first", op="c"), put(20, 61, "second"))
    story.land_file(put(30, 11 * DAY, "later"))
    take_all(story, spark)
    return story.workspace.settings.home, story.contracts


@pytest.mark.parametrize("point", FILES_POINTS)
def test_a_removal_of_files_killed_at_a_gate_loses_no_position_and_the_next_call_ends_it(
    old_files_home, tmp_path, kept_in, point
):
    home, contracts = tmp_path / "home", old_files_home[1]
    shutil.copytree(old_files_home[0], home, symlinks=True)
    if kept_in is not None:
        copy_home(Home.open(home, WindowSize(1)), kept_in)
    killed(REMOVE, point, home, contracts)

    workspace = opened(home, contracts)
    removed, store = Removed.open(workspace, SOURCE), workspace.landing(SOURCE)
    assert damaged(store, Present(store, removed).has) == 0
    assert placed(store) == [FIRST, SECOND]
    assert pending_windows(workspace, SOURCE).nothing

    carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test")
    removed = Removed.open(workspace, SOURCE)
    assert {(each.layer, each.window) for each in removed.removals} == {
        (layer, window) for layer in (LANDING, RAW) for window in (FIRST, SECOND)
    }
    assert not removed.unfinished
    data = store.folder / "data"
    assert len([*storage_of(data / "any").listed(data)]) == 1
    assert not [
        each for each in check_landing(store, Present(store, removed).has).damage if each.kind != "epoch"
    ]
    assert placed(store) == [FIRST, SECOND]
    assert carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test") == []


def placed(store: LandingStore) -> list[str | None]:
    """The windows in which the first two events land that come again with another time."""
    later = START + timedelta(days=12)
    again = [
        event._replace(
            ordinal=event.commit_lsn << 14 | event.ordinal,
            commit_lsn=0,
            identity=f"{event.op} {event.key} {event.after}",
            source_ts=later,
        )
        for commit in (put(10, 1, "first", op="c"), put(20, 61, "second"))
        for event in events(commit)
    ]
    grid = WindowGrid(WindowSize(1), START - timedelta(hours=1))
    with BatchWriter(store, grid, 1, file_batch_id("again"), clock=lambda: later) as writer:
        for each in again:
            writer.add(each)
        with FirstWindows.of(store, 1, writer.finish()) as found:
            windows = [found.window_of(each) for each in again]
        writer.abandon()
    return windows


@pytest.mark.parametrize("moment", ["before", "after"])
def test_removing_old_runs_killed_at_its_gate_loses_no_checkpoint(old_home, tmp_path, moment):
    home, contracts = old_home
    workspace, raw = opened(home, contracts), keys.raw_key(SOURCE)

    @dg.op(out=dg.Out(dg.Nothing))
    def make(context) -> None:  # type: ignore[no-untyped-def]
        for window in (FIRST, SECOND):
            context.log_event(dg.AssetMaterialization(raw, partition=window))

    @dg.job
    def old_run() -> None:
        make()

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        run = old_run.execute_in_process(instance=instance)
        rebuild_materializations(instance, workspace)
        known = instance.get_materialized_partitions(raw)
        assert {FIRST, SECOND} <= known
    killed(REMOVE_RUNS, f"dagster.old_run.{moment}", home, contracts, tmp_path)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert (instance.get_run_by_id(run.run_id) is None) == (moment == "after")
        later = datetime.now(UTC) + timedelta(days=1)
        assert remove_old_runs(instance, workspace, later) == (moment == "before")
        assert instance.get_run_by_id(run.run_id) is None
        assert instance.get_materialized_partitions(raw) == known
        assert remove_old_runs(instance, workspace, datetime.now(UTC) - timedelta(days=1)) == 0
