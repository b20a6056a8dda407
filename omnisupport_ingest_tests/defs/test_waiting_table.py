"""A table whose column has another type waits for a person, in a run that succeeds, and no other one does."""

from __future__ import annotations

import copy
import json

import dagster as dg
import pytest

from omnisupport_ingest.stages.pending import pending_windows
from omnisupport_ingest.stages.retyping import ask_for
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest_tests.defs.test_added_table import add_labels, ingest, land_of_both_tables, shown
from omnisupport_ingest_tests.stages.story import CONTRACT, SOURCE, Story

pytestmark = pytest.mark.usefixtures("spark")

WAITS = {dg.AssetKey([SOURCE, "dim_notes"])}
GOES_ON = {dg.AssetKey([SOURCE, "dim_labels"])}


def materialized(run: dg.ExecuteInProcessResult) -> set[dg.AssetKey]:
    found = {event.asset_key for event in run.get_asset_materialization_events()}
    return {key for key in found if key is not None}


def test_table_that_waits_fails_no_run_and_is_taken_by_the_next_one_that_a_person_lets(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        assert materialized(ingest(recent_story.workspace, window, instance)) >= WAITS
        document = copy.deepcopy(CONTRACT)
        document["properties"]["body"] = {
            "type": ["integer", "null"],
            "x-pg-type": "integer",
            "description": "Another type.",
        }
        (recent_story.contracts / "notes.json").write_text(json.dumps(document))
        workspace = add_labels(recent_story)
        assert pending_windows(workspace, SOURCE).windows == (window,)
        run = ingest(workspace, window, instance)
        assert materialized(run) & (WAITS | GOES_ON) == GOES_ON
        assert shown(workspace)["labels"] == [(1, "bug"), (2, "idea")]
        assert shown(workspace)["notes"] == [(1, "note")], "as it was"
        complete = dg.AssetCheckKey(dg.AssetKey([SOURCE, "dim_notes"]), "complete")
        (told,) = instance.event_log_storage.get_latest_asset_check_execution_by_key([complete]).values()
        verdict = told.event.dagster_event.asset_check_evaluation_data
        assert not verdict.passed and "retype" in verdict.description
        assert pending_windows(workspace, SOURCE).windows == ()
        (notes,) = [each for each in workspace.contracts.of_source(SOURCE) if each.name == "notes"]
        ask_for(workspace, notes)
        again = Workspace.open(workspace.settings)
        assert pending_windows(again, SOURCE).windows == (window,)
        assert materialized(ingest(again, window, instance)) >= WAITS
        assert pending_windows(again, SOURCE).windows == ()
