"""The job ``retention``, which only counts by default, and ``sweep``; the disk of a young home."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlparse

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.assets import _leave_sealed
from omnisupport_ingest.lake import layout
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.forecast import disk_forecast
from omnisupport_ingest.settings import NightlyRetention
from omnisupport_ingest.storage import has_landed
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.retention.test_story import take_all, told


@pytest.fixture
def landed(tmp_path: Path) -> Story:
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    changes = [Change("c", key, {"title": f"n{key}", "body": "text" * 100}) for key in range(2000)]
    story.land(Commit(10, 1, changes))
    story.land(Commit(30, 11 * 24 * 3600, [Change("u", 1, {"title": "later", "body": "text"})]))
    return story


def night(workspace: Workspace, **config: bool) -> dict[str, object]:
    """What a run of the job says of itself."""
    job = build_definitions(workspace).resolve_job_def("retention")
    asked = {"ops": {"remove_what_is_old": {"config": config}}} if config else None
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(asked, instance=instance, resources={"workspace": workspace})
    assert done.success
    [told] = [
        each.step_output_data.metadata
        for each in done.all_node_events
        if each.event_type is dg.DagsterEventType.STEP_OUTPUT
    ]
    return {name: each.value for name, each in told.items()}


def data_of(story: Story) -> set[Path]:
    return {*(story.store.folder / "data").rglob("*.parquet")}


def applying(story: Story) -> Workspace:
    settings = story.workspace.settings.model_copy(update={"retention": NightlyRetention.APPLY})
    return Workspace.open(settings)


def test_the_job_removes_nothing_that_no_layer_has_taken(landed: Story) -> None:
    told = night(applying(landed))
    assert told["applied"] and told[f"{SOURCE}_refused"]
    assert len(data_of(landed)) == 2


def test_every_night_what_would_go_is_counted_and_it_goes_only_by_the_setting_or_a_word(
    landed: Story,
    spark,  # type: ignore[no-untyped-def]
) -> None:
    take_all(landed, spark)
    before, removals = data_of(landed), landed.workspace.removals(SOURCE)
    counted = night(landed.workspace)
    assert not counted["applied"] and counted[f"{SOURCE}_landing_windows_to_go"] == 1
    assert counted[f"{SOURCE}_landing_bytes_to_go"] and counted[f"{SOURCE}_raw_windows_to_go"] == 1
    assert night(applying(landed), apply=False) == counted
    assert data_of(landed) == before and not removals.exists
    gone = night(applying(landed))
    assert gone["applied"] and data_of(landed) < before and removals.exists
    same = {name.removesuffix("_to_go"): value for name, value in counted.items() if name.endswith("_to_go")}
    assert {name: gone[name] for name in same} == same
    assert not [name for name in night(landed.workspace, apply=True) if name.endswith("_windows")]


def test_a_run_is_warned_of_sealed_windows_once_and_not_by_each_of_its_tables(
    landed: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    windows = [FIRST, SECOND]
    monkeypatch.setattr(
        "omnisupport_ingest.defs.assets.Removed",
        SimpleNamespace(open=lambda *_: SimpleNamespace(sealed=frozenset({FIRST}))),
    )
    for run, name in (("one", "raw_cdc_staging"), ("one", "dim_notes"), ("other", "dim_notes")):
        context = SimpleNamespace(
            run_id=run,
            asset_key=dg.AssetKey([SOURCE, name]),
            partition_keys=windows,
            log=SimpleNamespace(warning=warnings.append),
        )
        _leave_sealed(context, landed.workspace)  # type: ignore[arg-type]
    assert warnings == [f"Left as sealed: 1 window of {SOURCE}, {FIRST}."] * 2


def test_the_schedule_runs_by_itself_where_something_is_given_up(landed: Story, tmp_path: Path) -> None:
    silent = told(tmp_path / "silent", {"old_files": "P2D"}).workspace
    kept = silent.settings.model_copy(update={"runs_kept_days": 90})
    for workspace, asks in ((landed.workspace, True), (silent, False), (Workspace.open(kept), True)):
        schedule = build_definitions(workspace).get_repository_def().get_schedule_def("nightly_retention")
        assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
        with dg.DagsterInstance.ephemeral() as instance:
            context = dg.build_schedule_context(instance, resources={"workspace": workspace})
            assert bool(schedule.evaluate_tick(context).run_requests) == asks


def test_the_job_sweep_makes_no_folder_of_a_source_that_has_not_landed(tmp_path: Path) -> None:
    settings = told(tmp_path, {}).workspace.settings
    folder = settings.home / "landing" / SOURCE
    shutil.rmtree(folder)
    workspace = Workspace.open(settings)
    definitions = build_definitions(workspace)
    job, schedule = definitions.resolve_job_def("sweep"), definitions.resolve_schedule_def("hourly_sweep")
    # A schedule opens its instance again, so this one is on disk.
    (tmp_path / "dagster").mkdir()
    with (
        dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance,
        dg.build_schedule_context(instance, resources={"workspace": workspace}) as context,
    ):
        assert not schedule.evaluate_tick(context).run_requests
        assert job.execute_in_process(instance=instance, resources={"workspace": workspace}).success
    assert not folder.exists()
    assert not has_landed(workspace.home.path, SOURCE)


def test_the_job_sweep_runs_by_itself_and_deletes_what_is_old_enough(
    landed: Story,
    spark,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    landing: list[tuple[str, timedelta]] = []
    monkeypatch.setattr(LandingStore, "sweep", lambda of, age: landing.append((of.source, age)) or [])
    take_all(landed, spark)
    workspace = landed.workspace
    definitions = build_definitions(workspace)
    assert definitions.resolve_schedule_def("hourly_sweep").default_status is dg.DefaultScheduleStatus.RUNNING
    dimension = workspace.dimension(landed.contract)
    draft = dimension.folder / layout.STAGING / "left-by-a-crash"
    draft.mkdir(parents=True)
    (draft / "part.parquet").write_bytes(b"half a file")
    held = {Path(unquote(urlparse(file.uri).path)) for file in dimension.open().all_files()}
    job = definitions.resolve_job_def("sweep")
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, resources={"workspace": workspace}).success
        assert draft.exists(), "it is younger than a day"
        old = time.time() - 25 * 3600
        for path in (draft / "part.parquet", draft):
            os.utime(path, (old, old))
        assert job.execute_in_process(instance=instance, resources={"workspace": workspace}).success
    assert not draft.exists()
    assert landing == [(SOURCE, timedelta(days=1))] * 2
    assert held and all(path.exists() for path in held)


def test_the_forecast_tells_the_size_of_landing_without_a_walk_and_no_growth_before_it_can(
    landed: Story,
) -> None:
    found = disk_forecast(landed.workspace, START + timedelta(minutes=30))
    files = [each for name in ("data", "manifests") for each in (landed.store.folder / name).rglob("*.*")]
    on_disk = sum(each.stat().st_size for each in files)
    assert on_disk / 2 < found.layers["landing"] < on_disk * 2
    assert (found.per_day, found.days) == (None, None)
    assert found.free > 0
