"""Rules and their policies through the layers, up to the checks and a corrected contract."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from omnisupport_ingest.checks import quality_checks
from omnisupport_ingest.contracts.quality import ERROR, WARN
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers


def contract(**quality: Any) -> dict[str, Any]:
    """The contract of the story with a parent and ``quality``; a long title is a warning."""
    document: dict[str, Any] = copy.deepcopy(CONTRACT)
    document["properties"]["title"]["x-policy"] = {"maxLength": "warn"}
    document["properties"]["parent"] = {
        "type": ["integer", "null"],
        "x-pg-type": "bigint",
        "description": "The note that it answers.",
    }
    document["x-cdc"]["quality"] = quality
    return document


RULES = [
    {"name": "no_own_parent", "expression": "parent <> id", "policy": "quarantine"},
    {"name": "body_if_title", "expression": "title IS NULL OR body <> ''", "policy": "reject_batch"},
]
REFERENCES = [{"name": "answers", "columns": ["parent"], "table": "notes", "severity": "error"}]


def reopened(story: Story) -> Workspace:
    return open_workspace(story.contracts.parent)


def reasons(workspace: Workspace) -> dict[str, tuple[str, tuple[str, ...]]]:
    rows = quarantined(workspace, SOURCE, ReviewLedger.open(workspace, SOURCE))
    return {str(row.event): (row.reason, row.rules) for row in rows}


def titles(workspace: Workspace, spark: SparkSession) -> Mapping[int, str | None]:
    (of_notes,) = workspace.contracts.of_source(SOURCE)
    shown = workspace.dimension(of_notes).open()
    return {row["id"]: row["title"] for row in shown.read(spark, shown.all_files()).collect()}


def rules_broken(workspace: Workspace, window: str = FIRST) -> Mapping[str, int]:
    state = workspace.deduped(SOURCE).open().state(window)
    assert state is not None and state.checkpoint.rules is not None
    assert state.checkpoint.rules.share is not None
    return state.checkpoint.rules.broken


def test_policies_from_landing_to_the_checks_and_a_corrected_contract(
    tmp_path: Path, spark: SparkSession
) -> None:
    story = Story(tmp_path)
    story.write_contract(contract(rules=RULES, references=REFERENCES))
    workspace = reopened(story)
    long = "a title that is far too long"
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": long, "body": "b", "parent": None})]),
        Commit(11, 2, [Change("c", 2, {"title": "own", "body": "b", "parent": "2"})]),
    )
    # The second batch has a row that rejects it, and an event of another window, which is another matter.
    story.land(
        Commit(20, 3, [Change("c", 3, {"title": "three", "body": "", "parent": None})]),
        Commit(21, 4, [Change("u", 1, {"title": "later", "body": "c", "parent": None})]),
        Commit(22, 61, [Change("c", 4, {"title": "four", "body": "b", "parent": "9"})]),
    )
    run_layers(workspace, spark)
    assert sorted(reasons(workspace).values()) == [
        ("batch_rejected", ("body_if_title",)),
        ("row_rule", ("body_if_title",)),
        ("row_rule", ("no_own_parent",)),
    ]
    assert titles(workspace, spark)[4] == "four"
    broken = {"notes/body_if_title": 1, "notes/no_own_parent": 1, "notes/title:max_length": 1}
    assert rules_broken(workspace) == broken

    found = quality_checks.rules_kept(workspace, SOURCE)["notes"]
    assert (found.passed, found.severity) == (False, ERROR)
    assert found.numbers["rows_broken"] == 3
    assert found.samples["title:max_length"] == ('["1"]',)
    (of_notes,) = workspace.contracts.of_source(SOURCE)
    orphans = quality_checks.references_kept(workspace, spark, of_notes)
    assert (orphans.passed, orphans.severity) == (False, ERROR)
    assert (orphans.numbers["orphans_answers"], orphans.samples) == (1, {"answers": ('["4"]',)})

    # Judged again from raw it is the same, batch or no batch.
    run_layers(workspace, spark, judge=True)
    assert len(reasons(workspace)) == 3
    assert rules_broken(workspace) == broken

    # Somebody corrects the contract: no command is needed, and the events come back in their order.
    rules = [{**rule, "policy": "warn"} for rule in RULES]
    story.write_contract(contract(rules=rules, references=REFERENCES))
    corrected = reopened(story)
    stale = pending_windows(corrected, SOURCE).windows
    assert {FIRST, SECOND} <= set(stale)
    run_layers(corrected, spark, stale)
    assert reasons(corrected) == {}
    assert titles(corrected, spark) == {1: "later", 2: "own", 3: "three", 4: "four"}
    found = quality_checks.rules_kept(corrected, SOURCE)["notes"]
    assert (found.passed, found.severity, found.numbers["rows_broken"]) == (False, WARN, 3)
    assert not pending_windows(corrected, SOURCE).windows


def test_an_expectation_is_another_contract_for_no_window(tmp_path: Path, spark: SparkSession) -> None:
    story = Story(tmp_path)
    story.write_contract(contract())
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": "b", "parent": None})]))
    workspace = reopened(story)
    run_layers(workspace, spark, [FIRST])
    story.write_contract(contract(volume={"at_least": 5}, freshness={"max_lag": "PT1M"}))
    expecting = reopened(story)
    assert not pending_windows(expecting, SOURCE).windows

    assert quality_checks.volume_expected(expecting, SOURCE)["notes"].summary == "No window is closed yet."
    # Two hours later, and silence between: the newest closed window is one in which nothing landed.
    late = Commit(30, 7200, [Change("c", 2, {"title": "two", "body": "b", "parent": None})])
    story.clock = START + timedelta(hours=2, minutes=5)
    story.land(late)
    run_layers(expecting, spark, sorted({FIRST, *pending_windows(expecting, SOURCE).windows}))
    found = quality_checks.volume_expected(expecting, SOURCE)["notes"]
    assert (found.passed, found.severity, found.numbers["events"]) == (False, WARN, 0)


def test_every_window_that_closes_in_one_run_is_held_against_the_expected_volume(
    tmp_path: Path, spark: SparkSession
) -> None:
    def created(id: int) -> Change:
        return Change("c", id, {"title": "one", "body": "b", "parent": None})

    story = Story(tmp_path)
    story.write_contract(contract(volume={"at_most": 1}))
    landings = (
        Commit(10, 1, [created(1), created(2)]),
        Commit(20, 61, [created(3)]),
        Commit(30, 3600 + 300, [created(4)]),
    )
    for number, commit in enumerate(landings):
        story.clock = START + timedelta(minutes=10, seconds=commit.second)
        story.land(commit)
        workspace = reopened(story)
        run_layers(workspace, spark, pending_windows(workspace, SOURCE).windows, run_id=f"run {number}")

    found = quality_checks.volume_expected(workspace, SOURCE)["notes"]
    # Nothing landed in the newest of them, but the run closed the two windows with events too.
    assert (found.passed, found.numbers["events"], found.numbers["windows_out_of_range"]) == (False, 2, 1)
    assert FIRST in found.summary
