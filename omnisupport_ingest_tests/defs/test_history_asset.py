"""Histories in Dagster: made by a job of their own, and in nobody's way before they are made."""

from __future__ import annotations

import copy
import json
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import assets, keys
from omnisupport_ingest.defs import history as history_assets
from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.metadata import CONCEPTS
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import KEY_FORMAT
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story

HISTORY = dg.AssetKey([SOURCE, "history", "dim_notes_history"])


def test_a_history_follows_the_events_in_the_group_of_its_source(definitions: dg.Definitions) -> None:
    node = definitions.resolve_asset_graph().get(HISTORY)
    assert node.parent_keys == {dg.AssetKey([SOURCE, "deduped_events"])}
    assert (node.group_name, node.pools) == (SOURCE, {f"{SOURCE}/history/dim_notes_history"})
    assert {key.name for key in node.check_keys} == {"open_rows_are_current_state", "versions_do_not_overlap"}


def test_no_ingest_and_no_audit_makes_or_checks_a_history(definitions: dg.Definitions) -> None:
    for job in (f"ingest_{SOURCE}", f"audit_{SOURCE}", f"replay_{SOURCE}"):
        layer = definitions.resolve_job_def(job).asset_layer
        assert HISTORY not in layer.executable_asset_keys
        assert not [key for key in layer.asset_graph.asset_check_keys if key.asset_key == HISTORY]
    schedule = definitions.resolve_schedule_def(f"hourly_history_{SOURCE}")
    assert (schedule.cron_schedule, schedule.job_name) == ("35 * * * *", f"history_{SOURCE}")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING


@pytest.mark.usefixtures("spark")
@pytest.mark.slow
def test_the_job_makes_an_empty_history_then_that_of_the_events_and_checks_it(recent_story: Story) -> None:
    story = recent_story
    definitions = build_definitions(story.workspace)
    job = definitions.resolve_job_def(f"history_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:
        # An hour may pass before anything lands.
        assert rows(instance, job) == 0
        story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
        batch = story.land(Commit(20, 2, [Change("u", 1, {"title": "two", "body": None})]))
        (first,) = batch.windows
        end = story.workspace.grid.end_of(first).strftime(KEY_FORMAT)
        tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": end}
        assert (
            definitions.resolve_job_def(f"ingest_{SOURCE}")
            .execute_in_process(instance=instance, tags=tags)
            .success
        )
        assert rows(instance, job) == 2
        version = story.workspace.history(story.contract).open().version
        assert rows(instance, job) == 2
        assert story.workspace.history(story.contract).open().version == version
    with dg.DagsterInstance.ephemeral() as empty:
        rebuild_materializations(empty, story.workspace)
        event = empty.get_latest_materialization_event(HISTORY)
        assert event is not None
        assert set(CONCEPTS) <= set(event.asset_materialization.metadata)


@pytest.mark.usefixtures("spark")
@pytest.mark.slow
def test_a_history_that_cannot_be_read_does_not_keep_another_from_being_made(
    recent_story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in the first step of a run, which looks at all histories of the source.
    monkeypatch.setattr(assets, "has_session", lambda: False)
    story = recent_story
    other: dict[str, Any] = copy.deepcopy(CONTRACT)
    other["title"], other["x-cdc"]["table"] = "Others", "others"
    (story.contracts / "others.json").write_text(json.dumps(other))
    workspace = Workspace.open(story.workspace.settings)
    [damaged] = [each for each in workspace.contracts.of_source(SOURCE) if each.table == "others"]
    log = workspace.history(damaged).folder / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("no entry of a log\n")
    job = build_definitions(workspace).resolve_job_def(f"history_{SOURCE}")
    with dg.DagsterInstance.ephemeral() as instance:
        run = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not run.success
    assert run.asset_materializations_for_node(HISTORY.to_python_identifier())


def test_a_check_that_failed_covers_the_whole_history_until_it_passes(story: Story) -> None:
    """The files of the last run alone may be right while another one is wrong."""
    findings: list[CheckFinding] = []
    seen: list[bool] = []

    def finding(*_: object, whole: bool) -> CheckFinding:
        seen.append(whole)
        return findings.pop(0)

    check = history_assets._check(contract=story.contract, finding=finding)
    job = dg.define_asset_job("checks", selection=dg.AssetSelection.checks(check))
    resources = {"workspace": story.workspace, "pyspark": LazyPySparkResource(spark_config={})}
    made = dg.AssetSpec(HISTORY)
    definitions = dg.Definitions([made], asset_checks=[check], jobs=[job], resources=resources)
    red, green = CheckFinding(False, "", {"compared": 1}), CheckFinding(True, "", {"compared": 1})
    nothing_compared = CheckFinding(True, "", {"compared": 0})
    findings += [green, red, red, nothing_compared, green, green]
    with dg.DagsterInstance.ephemeral() as instance:
        while findings:
            run = definitions.resolve_job_def("checks").execute_in_process(
                instance=instance, tags={keys.TAKE_NEW_TAG: "true"}
            )
            assert run.success
    assert seen == [False, False, True, True, True, False]


def rows(instance: dg.DagsterInstance, job: dg.JobDefinition) -> int:
    """Run the job; its checks pass; how many versions the history then has."""
    run = job.execute_in_process(instance=instance)
    assert run.success
    checks = run.get_asset_check_evaluations()
    assert {check.check_name: check.passed for check in checks} == {
        "open_rows_are_current_state": True,
        "versions_do_not_overlap": True,
    }
    (made,) = run.asset_materializations_for_node(HISTORY.to_python_identifier())
    return made.metadata["dagster/row_count"].value
