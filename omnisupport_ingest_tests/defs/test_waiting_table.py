"""A table whose column has another type waits for a person, in a run that succeeds, and no other one does.

Nor is a check of the others silent then, or where the step of a table fails.
"""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import checks, keys
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.type_changes import ask_for
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.defs.test_added_table import add_labels, ingest, land_of_both_tables, shown
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Story
from omnisupport_ingest_tests.waiting import until

pytestmark = pytest.mark.usefixtures("spark")

NOTES, LABELS = dg.AssetKey([SOURCE, "dim_notes"]), dg.AssetKey([SOURCE, "dim_labels"])
WAITS, GOES_ON = {NOTES}, {LABELS}


def materialized(run: dg.ExecuteInProcessResult) -> set[dg.AssetKey]:
    found = {event.asset_key for event in run.get_asset_materialization_events()}
    return {key for key in found if key is not None}


OF_A_TABLE = {"complete", "fresh", "rules_kept"}
OF_ALL_LAYERS = {"windows_settled", "replays_explained"}


def give_notes_another_type(story: Story) -> None:
    document = copy.deepcopy(CONTRACT)
    document["properties"]["body"] = {
        "type": ["integer", "null"],
        "x-pg-type": "integer",
        "description": "Another type.",
    }
    (story.contracts / "notes.json").write_text(json.dumps(document))


def verdicts(run: dg.ExecuteInProcessResult) -> dict[tuple[dg.AssetKey, str], bool]:
    """Whether each check that the run evaluated passed."""
    return {(each.asset_key, each.check_name): each.passed for each in run.get_asset_check_evaluations()}


def checked(run: dg.ExecuteInProcessResult, asset: dg.AssetKey) -> set[str]:
    return {name for of, name in verdicts(run) if of == asset}


def run_job(
    workspace: Workspace, name: str, window: str | None, instance: dg.DagsterInstance
) -> dg.ExecuteInProcessResult:
    """The job without an error for what fails in it. ``window``: None of a job without partitions."""
    tags = (
        {} if window is None else {f"dagster/asset_partition_range_{end}": window for end in ("start", "end")}
    )
    job = build_definitions(workspace).resolve_job_def(f"{name}_{SOURCE}")
    return job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)


def test_table_that_waits_fails_no_run_and_is_taken_by_the_next_one_that_a_person_lets(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        assert materialized(ingest(recent_story.workspace, window, instance)) >= WAITS
        give_notes_another_type(recent_story)
        workspace = add_labels(recent_story)
        assert pending_windows(workspace, SOURCE).windows == (window,)
        run = ingest(workspace, window, instance)
        assert materialized(run) & (WAITS | GOES_ON) == GOES_ON
        assert shown(workspace)["labels"] == [(1, "bug"), (2, "idea")]
        assert shown(workspace)["notes"] == [(1, "note")], "as it was"
        complete = dg.AssetCheckKey(NOTES, "complete")
        (told,) = instance.event_log_storage.get_latest_asset_check_execution_by_key([complete]).values()
        verdict = told.event.dagster_event.asset_check_evaluation_data
        assert told.run_id == run.run_id
        assert not verdict.passed and "retype" in verdict.description
        assert pending_windows(workspace, SOURCE).windows == ()
        (notes,) = [each for each in workspace.contracts.of_source(SOURCE) if each.name == "notes"]
        ask_for(workspace, notes)
        again = Workspace.open(workspace.settings)
        assert pending_windows(again, SOURCE).windows == (window,)
        assert materialized(ingest(again, window, instance)) >= WAITS
        assert pending_windows(again, SOURCE).windows == ()


def test_checks_of_every_table_and_of_all_layers_are_made_while_one_table_waits(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        ingest(recent_story.workspace, window, instance)
        give_notes_another_type(recent_story)
        workspace = add_labels(recent_story)
        for job, partition in (("ingest", window), ("audit", None)):
            run = run_job(workspace, job, partition, instance)
            assert run.success, job
            assert checked(run, NOTES) >= OF_A_TABLE, job
            assert checked(run, LABELS) >= OF_A_TABLE, job
            assert checked(run, keys.deduped_key(SOURCE)) >= OF_ALL_LAYERS, job
            found = verdicts(run)
            assert found[NOTES, "complete"] is False
            assert found[LABELS, "fresh"] is found[keys.deduped_key(SOURCE), "windows_settled"] is True


def test_step_that_fails_silences_no_check_of_another_table(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        workspace = add_labels(recent_story)
        ingest(workspace, window, instance)
        (notes,) = [each for each in workspace.contracts.of_source(SOURCE) if each.name == "notes"]
        for entry in (workspace.dimension(notes).folder / "_delta_log").glob("*.json"):
            entry.write_bytes(b"{damaged")
        for job, partition in (("ingest", window), ("audit", None)):
            run = run_job(workspace, job, partition, instance)
            assert not run.success, job
            assert checked(run, LABELS) >= OF_A_TABLE, job
            # Rules are asked of events, and these are there.
            assert {verdicts(run)[NOTES, name] for name in OF_A_TABLE - {"rules_kept"}} == {False}, job


def test_run_that_makes_no_events_ends_with_its_last_checks(
    recent_story: Story, monkeypatch: pytest.MonkeyPatch
):
    """Dagster records nothing of the steps that it does not begin, so nobody may wait for their end."""
    monkeypatch.setattr(checks, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(checks, "_MAX_RETRIES", 20)
    window = land_of_both_tables(recent_story)
    for file in (recent_story.workspace.landing(SOURCE).folder / "data").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:-1])
    with dg.DagsterInstance.ephemeral() as instance:
        run = run_job(add_labels(recent_story), "ingest", window, instance)
        assert not run.success
        assert not instance.all_logs(run.run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY)
        assert checked(run, NOTES) >= OF_A_TABLE


def test_last_checks_of_a_run_wait_for_a_table_that_another_run_writes(
    recent_story: Story, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checks, "RETRY_SECONDS", 0.5)
    window = land_of_both_tables(recent_story)
    workspace, pool = add_labels(recent_story), keys.pool_of(NOTES)
    with dg.instance_for_test(
        overrides={"concurrency": {"pools": {"granularity": "op", "default_limit": 1}}}
    ) as instance:
        storage = instance.event_log_storage
        storage.initialize_concurrency_limit_to_default(pool)
        assert storage.claim_concurrency_slot(pool, "another run", "its step").is_claimed
        with ThreadPoolExecutor() as threads:
            running = threads.submit(run_job, workspace, "ingest", window, instance)
            try:
                retried = {dg.DagsterEventType.STEP_UP_FOR_RETRY}
                until(lambda: [one for one in instance.get_runs() if instance.all_logs(one.run_id, retried)])
                assert instance.get_materialized_partitions(LABELS) == {window}
            finally:
                storage.free_concurrency_slots_for_run("another run")
            run = running.result()
        assert run.success
        assert materialized(run) >= WAITS | GOES_ON
        assert checked(run, NOTES) >= OF_A_TABLE and checked(run, keys.deduped_key(SOURCE)) >= OF_ALL_LAYERS
        assert verdicts(run)[NOTES, "fresh"] is True
