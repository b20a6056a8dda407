"""``explain``: the event behind a cell, and what became of the others, from landing to the dimension."""

from __future__ import annotations

import pytest

from omnisupport_ingest.cli.explain import explain
from omnisupport_ingest.read.explain import NothingToExplain
from omnisupport_ingest_tests.cli.home_to_look_at import Told, document, land_another, run, told, whole
from omnisupport_ingest_tests.layers.story import FIRST

__all__ = ["told", "whole"]


def test_a_cell_names_its_event_and_the_way_from_landing_to_the_dimension(told: Told) -> None:
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


def test_a_row_that_was_deleted_says_by_what(told: Told) -> None:
    found = document(explain, "notes", "--key", "2")
    assert found["row"]["deleted_by"].startswith("1:0/14:2#")
    assert "deleted by delete at 1:0/14:2" in run(explain, "notes", "--key", "2").stdout


def test_a_column_that_nobody_sent_is_unresolved(told: Told) -> None:
    (column,) = document(explain, "notes", "--key", "3", "--column", "body")["columns"]
    assert (column["resolved"], column["value"], column["decided_by"]) == (False, None, None)


def test_a_key_without_an_event_is_told_and_what_has_landed_for_it_is_named(told: Told) -> None:
    land_another(told)
    with pytest.raises(NothingToExplain):
        run(explain, "notes", "--key", "4")
    assert len(document(explain, "notes", "--key", "1")["batches_not_judged"]) == 1


def test_a_column_that_the_lake_does_not_have_is_a_usage_error(told: Told) -> None:
    with pytest.raises(Exception, match="has no column 'nothing' in the lake"):
        run(explain, "notes", "--key", "1", "--column", "nothing")
