"""A scenario's detector is the code that finds it: named there, and written down from there."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import omnisupport_ingest
from omnisupport_ingest.cdc.judging import JudgingRules, judge_batches
from omnisupport_ingest.contracts import decision_table
from omnisupport_ingest.contracts.decision_table import (
    JUDGED,
    OPERATOR,
    SCENARIOS,
    STOP,
    DecisionTable,
    DetectedScenario,
    Detector,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.layers.events.scenarios import Stopped, Tallies, refuse_stopped
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.oracle.judging import FOUND_BY

PACKAGE = Path(omnisupport_ingest.__file__).parent
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
CONTRACT = TableContract(
    name="tickets",
    version="1.0.0",
    source="desk",
    schema="public",
    table="tickets",
    title="Tickets",
    description="Tickets.",
    owner="team:tests",
    key=("id",),
    columns=(Column("id", "bigint", nullable=False), Column("title", "text", max_length=5)),
    soft_delete_column=None,
    allowed_lateness=timedelta(hours=1),
    max_lateness=timedelta(hours=3),
    path="tickets.json",
    fingerprint="0" * 64,
)
FINE: dict[str, Any] = {
    "window": "2026-03-01T1200",
    "copy": 1,
    "collision": False,
    "epoch": 1,
    "newest_epoch_before": 1,
    "op": "c",
    "key": '["1"]',
    "moved_from_key": None,
    "before": None,
    "after": '{"id":"1","title":"fine"}',
    "unchanged": None,
    "misplaced": None,
    "file_row": 1,
    "watermark_before": None,
    "source_schema": "public",
    "source_table": "tickets",
    "source_ts": NOON,
    "commit_lsn": 1,
    "ordinal": 0,
    "event_hash": 7,
}
TYPES = {
    "collision": pa.bool_(),
    "misplaced": pa.bool_(),
    "before": pa.string(),
    "moved_from_key": pa.string(),
    "key": pa.string(),
    "unchanged": pa.list_(pa.string()),
    "source_ts": pa.timestamp("us", tz="UTC"),
    "watermark_before": pa.timestamp("us", tz="UTC"),
}
OF_EVENTS: Mapping[str, Mapping[str, Any]] = {
    "out_of_range": {"window": OUT_OF_RANGE},
    "collision": {"collision": True},
    "older_epoch": {"newest_epoch_before": 2},
    "malformed_image": {"after": '{"id":"1","ti'},
    "schema_mismatch": {"after": '{"id":"1","title":"fine","more":null}'},
    "row_rule": {"after": '{"id":"1","title":"too long"}'},
    "batch_rejected": {"batch_id": "b1"},
    "out_of_order_event": {"misplaced": True},
    "too_late_arrival": {"watermark_before": NOON + timedelta(hours=4)},
    "late_arrival": {"watermark_before": NOON + timedelta(hours=2)},
    "discarded_event": {"decided": "discard"},
    "duplicate_position": {"copy": 2},
}
"""What is otherwise about an event of each scenario."""


def decisions(**actions: str) -> DecisionTable:
    table = load_decision_table(default_decision_table())
    decided = {
        name: replace(row, action=actions.get(name, row.action)) for name, row in table.decisions.items()
    }
    return replace(table, decisions=decided)


def judged(event: Mapping[str, Any], table: DecisionTable) -> tuple[str, DetectedScenario | None]:
    """The verdict of an event, and what was found of it."""
    arrays = {name: pa.array([value], TYPES.get(name)) for name, value in event.items() if name != "decided"}
    of_batch = (event["window"], "public", "tickets", event.get("batch_id", ""))
    rejected = {of_batch: ("title:max_length",)} if "batch_id" in event else {}
    columns = {CONTRACT.table_name: RowColumns.of(CONTRACT, bare=False)}
    reviews = {(1, 1, 0, 7): event["decided"]} if "decided" in event else {}
    judging_rules = JudgingRules(
        (CONTRACT,), table, timedelta(hours=1), reviews, rejected=rejected, row_columns=columns
    )
    (batch,) = judge_batches([pa.RecordBatch.from_pydict(arrays)], judging_rules)
    (found,) = batch.to_pylist()
    reason = found["reason"]
    return found["verdict"], None if reason is None else DetectedScenario(reason, found["detector"])


@pytest.mark.parametrize("op", "crud")
@pytest.mark.parametrize("broken", [{"key": None}, {"key": '["7",null]'}, {"moved_from_key": "[null]"}])
def test_an_event_whose_key_is_null_in_part_is_of_no_row(op, broken):
    given = FINE | {"op": op} | broken
    assert judged(given, decisions()) == ("quarantined", DetectedScenario("malformed_image", "envelope"))


def test_a_key_may_spell_null():
    assert judged(FINE | {"key": '["null","a,null"]'}, decisions()) == ("accepted", None)


def found_in_code() -> dict[tuple[str, str], list[str]]:
    """Where the code says ``DETECTOR.found(SCENARIO)``: scenario and name of the detector → modules."""
    places = defaultdict(list)
    for module in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            match call:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="found"), args=[ast.Name(id=scenario)]
                ):
                    detector = getattr(decision_table, name, None)
                    if isinstance(detector, Detector):
                        place = getattr(decision_table, scenario), detector.name
                        places[place].append(str(module.relative_to(PACKAGE)))
    return places


def test_every_scenario_is_found_at_one_place_by_the_detector_that_the_table_names():
    places = found_in_code()
    assert {name: len(modules) for (name, _), modules in places.items()} == dict.fromkeys(SCENARIOS, 1)
    table = load_decision_table(default_decision_table())
    assert dict(places.keys()) == {name: row.detected_by for name, row in table.decisions.items()}


def test_the_oracle_has_the_detectors_of_events_by_heart():
    assert {name: SCENARIOS[name].detector for name in JUDGED} == FOUND_BY


def test_no_detector_finds_what_another_one_is_to_find():
    with pytest.raises(ValueError, match="collision is found by dedupe_key, not by operator"):
        OPERATOR.found("collision")
    with pytest.raises(ValueError, match="not by guess"):
        Detector("guess").found("late_arrival")


@pytest.mark.parametrize("scenario", JUDGED)
def test_an_event_in_quarantine_names_what_found_it(scenario):
    table = decisions(**{scenario: "quarantine"})
    assert judged(FINE | OF_EVENTS[scenario], table) == (
        "quarantined",
        DetectedScenario(scenario, FOUND_BY[scenario]),
    )


@pytest.mark.parametrize("scenario", [name for name in JUDGED if STOP in SCENARIOS[name].actions])
def test_where_the_table_says_stop_nothing_of_the_window_is_judged(scenario):
    table = decisions(**{scenario: STOP})
    verdict, found = judged(FINE | OF_EVENTS[scenario], table)
    assert verdict == "quarantined" and found is not None
    tallies = Tallies(Counter({("w", verdict): 1}), {"w": Counter({found: 1})})
    with pytest.raises(
        Stopped, match=f"1 events of desk in window w are {scenario} .found by {found.detector}."
    ):
        refuse_stopped(tallies, table, "desk")
    refuse_stopped(tallies, decisions(), "desk")
