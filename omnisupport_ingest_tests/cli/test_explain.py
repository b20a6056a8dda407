"""``explain``: the event behind a cell, and what became of the others, from landing to the dimension."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.explain import explain
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.read.explain import NothingToExplain
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, land_another, run
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers


def test_a_cell_names_its_event_and_the_way_from_landing_to_the_dimension(sample_home: SampleHome) -> None:
    found = document(explain, "notes", "--key", "1", "--column", "title")
    (column,) = found["columns"]
    (event,) = found["events"]
    assert (column["value"], column["resolved"]) == ("one", True)
    assert event["id"] == column["decided_by"]
    assert (event["role"], event["op"], event["commit_lsn"]) == ("decides", "c", "0/A")
    assert event["landing_file"].startswith(f"data/{event['batch_id']}/{FIRST}")
    assert [each["layer"] for each in found["path"]] == [
        "raw_cdc_staging",
        "deduped_events",
        "net_changes",
        "dimension",
    ]
    assert found["row"]["dimension_shows_last_event"]
    assert "title = 'one'" in run(explain, "notes", "--key", "1", "--column", "title").stdout


def test_a_row_that_was_deleted_says_by_what(sample_home: SampleHome) -> None:
    found = document(explain, "notes", "--key", "2")
    assert found["row"]["deleted_by"].startswith("1:0/14:2#")
    assert "deleted by delete at 1:0/14:2" in run(explain, "notes", "--key", "2").stdout


def test_a_column_that_nobody_sent_is_unresolved(sample_home: SampleHome) -> None:
    (column,) = document(explain, "notes", "--key", "3", "--column", "body")["columns"]
    assert (column["resolved"], column["value"], column["decided_by"]) == (False, None, None)


def test_a_key_without_an_event_is_told_and_what_has_landed_for_it_is_named(sample_home: SampleHome) -> None:
    land_another(sample_home)
    with pytest.raises(NothingToExplain):
        run(explain, "notes", "--key", "4")
    assert len(document(explain, "notes", "--key", "1")["batches_not_judged"]) == 1


def test_a_column_that_the_lake_does_not_have_is_a_usage_error(sample_home: SampleHome) -> None:
    with pytest.raises(Exception, match="has no column 'nothing' in the lake"):
        run(explain, "notes", "--key", "1", "--column", "nothing")


def test_a_quarantined_event_hides_a_value_and_its_review_is_named(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a title that is much too long"
    story = Story(tmp_path)
    story.land(
        Commit(5, 0, [Change("t")]),
        Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})]),
        Commit(20, 2, [Change("u", 1, {"title": long}, unchanged=("body",))]),
    )
    run_layers(open_workspace(tmp_path), spark, [FIRST])
    for name, value in (
        ("HOME", tmp_path / "home"),
        ("CONTRACTS_DIR", tmp_path / "contracts"),
        ("SOURCE", SOURCE),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", str(value))
    found = document(explain, "notes", "--key", "1", "--column", "title")
    (column,) = found["columns"]
    truncate, lost, hides = found["events"]
    assert truncate["role"] == "carries no values"
    assert (column["resolved"], column["decided_by"]) == (False, hides["id"])
    assert (lost["role"], hides["role"]) == ("older position", "quarantined, and hides older values")
    assert hides["quarantine_reason"] == "row_rule"
    assert (hides["quarantine_state"], hides["reviews"]) == ("open", [])
    done = run(explain, "notes", "--key", "1", "--column", "title").stdout
    assert "title = unresolved" in done
    assert f"quarantine show {hides['id']}" in done
    assert long not in done
    event = EventRef.parse(hides["id"])
    decide(open_workspace(tmp_path), SOURCE, "discard", [event], reviewer="ana", why="a typo")
    (review,) = document(explain, "notes", "--key", "1")["events"][2]["reviews"]
    assert (review["decision"], review["by"], review["why"]) == ("discard", "ana", "a typo")
    with pytest.raises(NothingToExplain):
        run(explain, "notes", "--key", "9")
