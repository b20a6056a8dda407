"""What retention keeps although it is old: what somebody may still ask of it, or what is its last copy."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.decision_table import CONTRACT_CHANGE, WAIT
from omnisupport_ingest.layers.pending import pending_windows
from omnisupport_ingest.retention.plan import RetentionPlan, plan_retention
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables

pytestmark = pytest.mark.quick

KEPT = {"landing": "P7D", "raw": "P10D"}
DAY = 24 * 3600


@pytest.fixture
def desk(tmp_path: Path) -> ThreeTables:
    """Three tables whose first window is closed and older than all of them keep raw."""
    desk = ThreeTables(tmp_path, retention=KEPT)
    desk.clock = START + timedelta(days=60)
    desk.land_of(1, *TABLES)
    desk.land_of(11 * DAY, "notes")
    desk.take_in("2026-01-12T1200", tables=["notes"])
    desk.take_in(FIRST, closed=True)
    assert pending_windows(desk.workspace, SOURCE).nothing
    return desk


def why(plan: RetentionPlan) -> set[str]:
    assert plan.doomed == (), "raw holds no events in this story, so nothing may go"
    return {each.why for each in plan.refused if each.window == FIRST}


def test_a_window_that_waits_to_be_judged_by_other_rules_keeps_everything(desk: ThreeTables) -> None:
    """The decision table lets it wait until somebody replays it, which needs its events."""
    assert why(plan_retention(desk.workspace, SOURCE)) == {"raw holds 0 of its 3 events"}
    document = json.loads((desk.contracts / "tags.json").read_text())
    document["properties"]["title"]["maxLength"] = 10
    (desk.contracts / "tags.json").write_text(json.dumps(document))
    desk.reopen()
    table = desk.workspace.decisions
    waits = replace(table.decisions[CONTRACT_CHANGE], action=WAIT)
    decisions = replace(table, decisions={**table.decisions, CONTRACT_CHANGE: waits})
    workspace = replace(desk.workspace, decisions=decisions)
    assert pending_windows(workspace, SOURCE).nothing
    assert why(plan_retention(workspace, SOURCE)) == {"work in it is pending, or it was made by other rules"}
