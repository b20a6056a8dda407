"""What the policy of a rule comes to, event by event: the kernel beside a plain reading of the rules."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.broken_rules import SAMPLES, BrokenRules, RulesLookout
from omnisupport_ingest.cdc.judging import JudgingRules, judge_batches
from omnisupport_ingest.cdc.ordinary import FEW
from omnisupport_ingest.contracts.decision_table import (
    DUPLICATE_POSITION,
    Decision,
    DecisionTable,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.quality import ExpressionRule, Policies, Quality
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.examples import examples

WINDOW = "2026-11-21T0900"
MOMENT = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)

RULES = (
    ExpressionRule("solved_after_opened", "solved >= opened", ("opened", "solved"), "warn"),
    ExpressionRule(
        "owned_when_solved", "solved IS NULL OR coalesce(owner, '') <> ''", ("owner", "solved"), "quarantine"
    ),
    ExpressionRule("cost_of_owner", "cost < 50 OR owner = 'boss'", ("owner", "cost"), "reject_batch"),
    ExpressionRule("never_asked", "id < 0", ("id",), "accept"),
)
CONTRACT: TableContract = replace(
    lanes.CONTRACT,
    key=("id",),
    columns=(
        Column("id", "bigint", nullable=False, minimum=Decimal(1)),
        Column("state", "text", enum=("new", "done"), policies=Policies((("enum", "warn"),))),
        Column("owner", "text", max_length=6, policies=Policies((("max_length", "accept"),))),
        Column(
            "rank",
            "smallint",
            minimum=Decimal(1),
            maximum=Decimal(4),
            policies=Policies((("maximum", "warn"),)),
        ),
        Column("cost", "numeric(6,2)", minimum=Decimal(0), policies=Policies((("minimum", "reject_batch"),))),
        Column("opened", "timestamptz", nullable=False),
        Column("solved", "timestamptz"),
    ),
    quality=Quality(RULES),
)
WARN = {"state:enum", "rank:maximum", "solved_after_opened"}
REJECT = {"cost:minimum", "cost_of_owner"}
PLACE = (WINDOW, CONTRACT.schema, CONTRACT.table)

Image = Mapping[str, str | None]


def _hour(hour: int) -> str:
    return f"2026-11-21 {hour:02}:00:00+00"


def texts(*values: str | None) -> st.SearchStrategy[str | None]:
    return st.sampled_from(values)


IMAGES = st.fixed_dictionaries(
    {"id": texts("1", "2", "3", "0", "x"), "opened": texts(_hour(9), _hour(10), "infinity", "soon")},
    optional={
        "state": texts("new", "done", "lost", None),
        "owner": texts("boss", "", "somebody", None),
        "rank": texts("1", "4", "5", "0", None),
        "cost": texts("0", "49.99", "50", "-1", "NaN", None),
        "solved": texts(_hour(8), _hour(9), _hour(11), "infinity", None),
    },
)


def read_plainly(image: Image) -> list[str]:
    """The rules that ``image`` breaks, read from the contract by hand; those that are not asked left out."""
    broken = []
    sent = {name: text for name, text in image.items() if text is not None}
    if sent.get("id") == "x":
        broken.append("id:type")
    if sent.get("id") == "0":
        broken.append("id:minimum")
    if sent.get("state") == "lost":
        broken.append("state:enum")
    if sent.get("rank") == "0":
        broken.append("rank:minimum")
    if sent.get("rank") == "5":
        broken.append("rank:maximum")
    if sent.get("cost") == "-1":
        broken.append("cost:minimum")
    if sent.get("opened") == "soon":
        broken.append("opened:type")
    opened, solved = sent.get("opened", ""), sent.get("solved", "")
    # What the type cannot hold is not known to a rule of several columns.
    if opened[:2] == solved[:2] == "20" and solved < opened:
        broken.append("solved_after_opened")
    if "owner" in image and solved[:2] == "20" and sent.get("owner") in (None, ""):
        broken.append("owned_when_solved")
    if sent.get("cost") == "50" and sent.get("owner") not in (None, "boss"):
        broken.append("cost_of_owner")
    return broken


def marked(images: Sequence[Image], batches: Sequence[str]) -> pa.RecordBatch:
    rows = len(images)
    columns: dict[str, Any] = {
        "window": [WINDOW] * rows,
        "op": ["c"] * rows,
        "key": [json.dumps([str(row)]) for row in range(rows)],
        "after": [json.dumps(image, separators=(",", ":")) for image in images],
        "batch_id": batches,
        "envelope": ["as delivered"] * rows,
        "identity": pa.nulls(rows, pa.string()),
        "source_schema": [CONTRACT.schema] * rows,
        "source_table": [CONTRACT.table] * rows,
        "copy": pa.array([1] * rows, pa.int32()),
        "epoch": pa.array([1] * rows, pa.int32()),
        "newest_epoch_before": pa.nulls(rows, pa.int32()),
        "commit_lsn": pa.array(range(rows), pa.int64()),
        "ordinal": pa.array([0] * rows, pa.int64()),
        "file_row": pa.nulls(rows, pa.int64()),
        "event_hash": pa.array(range(rows), pa.int64()),
        "collision": [False] * rows,
        "misplaced": pa.nulls(rows, pa.bool_()),
        "source_ts": pa.array([MOMENT] * rows, columnar.TIME),
        "watermark_before": pa.nulls(rows, columnar.TIME),
        "unchanged": pa.nulls(rows, pa.list_(pa.string())),
        "before": pa.nulls(rows, pa.string()),
        "moved_from_key": pa.nulls(rows, pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def judging_rules(**changed: Any) -> JudgingRules:
    table = load_decision_table(default_decision_table())
    return JudgingRules((changed.pop("contract", CONTRACT),), table, timedelta(hours=1), **changed)


def judged(events: pa.RecordBatch, by: JudgingRules, few: int) -> pa.RecordBatch:
    (found,) = judge_batches([events], by, few=few)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(IMAGES, min_size=1, max_size=90), st.sampled_from((0, FEW)), st.data())
def test_each_event_gets_what_the_policies_of_its_broken_rules_say(
    images: list[Image], few: int, data: st.DataObject
) -> None:
    batches = [data.draw(st.sampled_from("ab")) for _ in images]
    events = marked(images, batches)
    due = [read_plainly(image) for image in images]
    first = judged(events, judging_rules(), few)
    assert first.column("rules").to_pylist() == due
    withheld = [bool(set(broken) - WARN) for broken in due]
    assert first.column("reason").to_pylist() == ["row_rule" if each else None for each in withheld]

    found = BrokenRules.parse(RulesLookout([CONTRACT]).found(first).to_text())
    assert found.counts == Counter((*PLACE, rule) for broken in due for rule in broken)
    rejecting = defaultdict(set)
    for broken, batch in zip(due, batches, strict=True):
        if REJECT & set(broken):
            rejecting[batch] |= REJECT & set(broken)
    assert found.rejected == {(*PLACE, batch): tuple(sorted(rules)) for batch, rules in rejecting.items()}

    again = judged(events, judging_rules(rejected=found.rejected), few)
    reasons = [
        "row_rule" if each else "batch_rejected" if batch in rejecting else None
        for each, batch in zip(withheld, batches, strict=True)
    ]
    assert again.column("reason").to_pylist() == reasons
    for reason, rules, batch in zip(reasons, again.column("rules").to_pylist(), batches, strict=True):
        assert reason != "batch_rejected" or rejecting[batch] <= set(rules)
    assert RulesLookout([CONTRACT]).found(again).counts == Counter(
        (*PLACE, rule)
        for broken, reason in zip(due, reasons, strict=True)
        if reason != "batch_rejected"
        for rule in broken
    )
    # Counted once, whether the batch was rejected or not: those rows keep the rule themselves.
    assert RulesLookout([CONTRACT]).found(again).rejected == found.rejected


def test_each_row_of_a_batch_is_told_its_own_warnings() -> None:
    late = {"opened": _hour(10), "solved": _hour(9), "owner": "boss"}
    images: list[Image] = [
        {"id": "1", "opened": _hour(9), "rank": "5"},
        {"id": "2", "opened": _hour(9)},
        {"id": "3", "state": "lost", **late},
        {"id": "4", "opened": _hour(9), "state": "lost", "rank": "5"},
        {"id": "5", **late},
    ]
    for few in (0, FEW):
        found = judged(marked(images, ["a"] * 5), judging_rules(), few)
        assert found.column("rules").to_pylist() == [read_plainly(image) for image in images]
        assert found.column("reason").null_count == 5


def test_keys_are_samples_unless_they_are_personal() -> None:
    events = marked([{"id": "1", "state": "lost", "opened": _hour(9)}] * 5, ["a"] * 5)
    found = RulesLookout([CONTRACT]).found(judged(events, judging_rules(), 0))
    rule = (*PLACE, "state:enum")
    assert (found.counts[rule], len(found.keys[rule])) == (5, SAMPLES)
    columns = (replace(CONTRACT.columns[0], personal=True), *CONTRACT.columns[1:])
    personal = replace(CONTRACT, columns=columns)
    hidden = RulesLookout([personal]).found(judged(events, judging_rules(contract=personal), 0))
    assert (hidden.counts[rule], hidden.keys) == (5, {})


def test_an_event_whose_batch_is_rejected_may_be_released() -> None:
    fine = {"id": "1", "opened": _hour(9)}
    events = marked([fine, {**fine, "cost": "-1"}], ["a", "a"])
    rejected = {(*PLACE, "a"): ("cost:minimum",)}
    released = judging_rules(rejected=rejected, reviews={(1, row, 0, row): "release" for row in range(2)})
    assert judged(events, judging_rules(rejected=rejected), 0).column("reason").to_pylist() == [
        "batch_rejected",
        "row_rule",
    ]
    assert judged(events, released, 0).column("reason").to_pylist() == [None, "row_rule"]


def test_a_discarded_event_counts_for_no_rule_and_still_rejects_its_batch() -> None:
    broken = {"id": "1", "opened": _hour(9), "cost": "-1"}
    events = marked([broken, broken], ["a", "a"])
    rules = judging_rules(reviews={(1, 0, 0, 0): "discard"})
    found = RulesLookout([CONTRACT]).found(judged(events, rules, 0))
    assert found.counts == {(*PLACE, "cost:minimum"): 1}
    both = judging_rules(reviews={(1, row, 0, row): "discard" for row in range(2)})
    found = RulesLookout([CONTRACT]).found(judged(events, both, 0))
    assert (found.counts, found.rejected) == ({}, {(*PLACE, "a"): ("cost:minimum",)})


@pytest.mark.parametrize("few", [0, FEW])
def test_an_expression_that_cannot_be_computed_for_a_row_keeps_the_rule(few: int) -> None:
    rule = ExpressionRule("owner_is_high", "CAST(owner AS INTEGER) > 7", ("owner",), "quarantine")
    contract = replace(CONTRACT, quality=Quality((rule,)))
    owners = ["8", "7", "nobody", "9" * 20, None]
    events = marked([{"id": "1", "owner": owner, "opened": _hour(9)} for owner in owners], ["a"] * 5)
    found = judged(events, judging_rules(contract=contract), few).column("rules").to_pylist()
    assert found == [[], ["owner_is_high"], [], [], []]


@pytest.mark.parametrize("few", [0, FEW])
def test_a_value_that_stops_a_whole_query_keeps_the_rule_of_its_row_alone(few: int) -> None:
    # TRY catches a failed cast, and no unknown time zone.
    expression = "hour(opened AT TIME ZONE owner) < 10"
    rule = ExpressionRule("opened_early", expression, ("owner", "opened"), "quarantine")
    contract = replace(CONTRACT, quality=Quality((rule, RULES[0])))
    owners = ["UTC", "Asia/Tokyo", "no zone", "UTC", None, "nor this"]
    images = [{"id": "1", "owner": owner, "opened": _hour(9)} for owner in owners]
    images[3]["solved"] = _hour(8)
    found = (
        judged(marked(images, ["a"] * 6), judging_rules(contract=contract), few).column("rules").to_pylist()
    )
    assert found == [[], ["opened_early"], [], ["solved_after_opened"], [], []]


@pytest.mark.parametrize("action", ["dedupe", "quarantine"])
def test_a_copy_counts_for_no_rule_wherever_it_is_put(action: str) -> None:
    events = marked([{"id": "1", "state": "lost", "opened": _hour(9)}] * 3, ["a"] * 3)
    place = events.schema.get_field_index("copy")
    events = events.set_column(place, events.schema.field(place), pa.array([1, 2, 3], pa.int32()))
    ours = load_decision_table(default_decision_table())
    decided = ours.decisions | {DUPLICATE_POSITION: Decision(DUPLICATE_POSITION, action, False, "")}
    for few in (0, FEW):
        found = judged(events, replace(judging_rules(), decisions=DecisionTable(decided)), few)
        assert RulesLookout([CONTRACT]).found(found).counts == {(*PLACE, "state:enum"): 1}


def test_a_row_of_other_columns_still_rejects_its_batch_and_its_columns_count_as_one_rule() -> None:
    columns = {CONTRACT.table_name: RowColumns.of(CONTRACT, bare=False)}
    by = replace(judging_rules(), row_columns=columns)
    full: dict[str, str | None] = {each.name: None for each in CONTRACT.source_columns}
    full |= {"owner": "boss", "opened": "2026-11-21 09:00:00+00"}
    refused = full | {"id": "1", "cost": "-1", "ada@example.org": "x", "bob@example.org": "y"}
    found = judged(marked([refused, full | {"id": "2"}], ["a", "a"]), by, 0)
    assert found.column("reason").to_pylist() == ["schema_mismatch", None]
    broken = RulesLookout([CONTRACT]).found(found)
    assert [*broken.rejected.values()] == [("cost:minimum",)]
    assert {rule: count for (*_, rule), count in broken.counts.items()} == {
        "cost:minimum": 1,
        "unknown_column": 2,
    }
