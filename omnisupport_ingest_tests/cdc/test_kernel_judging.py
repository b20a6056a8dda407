"""The judging kernel reaches the oracle's verdicts on thousands of random deliveries, without Spark.

Copies and collisions are marked here by the simplest means. The proof and the tests of the layers show that
Spark marks the same.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import columnar, ordinary
from omnisupport_ingest.cdc.erasing import Erasures, Span, key_hash
from omnisupport_ingest.cdc.judging import ADDED, JudgingRules, judge_batches
from omnisupport_ingest.contracts.decision_table import (
    JUDGED,
    SCENARIOS,
    Decision,
    DecisionTable,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.cdc.kernels import key_text
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle import judging as oracle
from omnisupport_ingest_tests.oracle.histories import SHAPE, collided, soup
from omnisupport_ingest_tests.oracle.judging import ACCEPTED, DUPLICATE, OUT_OF_RANGE, Arrival, Delivery
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position

HOUR = timedelta(hours=1)
LIMIT = 8
"""Most characters of a status by the rule; about half of the drawn ones have more."""

CONTRACT = replace(
    lanes.CONTRACT,
    key=("id",),
    columns=(
        Column("id", "bigint", nullable=False),
        Column("status", "text", max_length=LIMIT),
        Column("note", "text"),
        Column("body", "text"),
    ),
    allowed_lateness=HOUR,
    max_lateness=3 * HOUR,
)
UNKNOWN = "no_contract"

randoms = st.integers(0, (1 << 32) - 1).map(Random)

_SCHEMA = pa.schema(
    [
        *(
            pa.field(name, pa.string())
            for name in ("window", "op", "key", "moved_from_key", "before", "after", "envelope", "batch_id")
        ),
        *(pa.field(name, pa.string()) for name in ("source_schema", "source_table", "identity")),
        *(pa.field(name, pa.int32()) for name in ("copy", "epoch", "newest_epoch_before")),
        *(
            pa.field(name, pa.int64())
            for name in ("commit_lsn", "ordinal", "file_row", "event_hash", "number")
        ),
        *(pa.field(name, pa.bool_()) for name in ("collision", "misplaced")),
        *(pa.field(name, columnar.TIME) for name in ("source_ts", "watermark_before")),
        pa.field("unchanged", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class BothRules:
    """The same rules for the kernel and for the oracle."""

    kernel: JudgingRules
    oracle: oracle.JudgingRules


@settings(max_examples=examples(400))
@given(randoms, st.integers(1, 9), st.sampled_from((0, 2, ordinary.FEW)))
def test_every_copy_gets_the_verdict_of_the_oracle(rng: Random, batch_rows: int, few: int) -> None:
    deliveries = drawn(rng)
    both = drawn_rules(rng, deliveries)
    assert judged(deliveries, both.kernel, batch_rows, few) == due(deliveries, both.oracle)


@settings(max_examples=examples(100))
@given(randoms)
def test_raw_is_accepted_and_duplicates_and_quarantined_and_copies_change_nothing(rng: Random) -> None:
    deliveries = drawn(rng)
    both = drawn_rules(rng, deliveries)
    found = judged(deliveries, both.kernel, 5)
    assert len(found) == len(deliveries)
    later = [
        replace(each, number=each.number + len(deliveries), arrival=deliveries[-1].arrival)
        for each in deliveries
    ]
    again = judged([*deliveries, *later], both.kernel, 5)
    assert {number: again[number] for number in found} == found
    assert {again[each.number][0] for each in later} <= {
        DUPLICATE if both.oracle.passes("duplicate_position") else oracle.QUARANTINED
    }


@settings(max_examples=examples(100))
@given(randoms)
def test_an_erased_event_keeps_its_verdict_and_none_of_its_values(rng: Random) -> None:
    deliveries = drawn(rng)
    both = drawn_rules(rng, deliveries)
    spans: dict[tuple[str, Key], list[tuple[Position | None, Position]]] = defaultdict(list)
    for each in deliveries:
        if each.event.key is not None and rng.random() < 0.3:
            above = Position(each.event.at.epoch, rng.randint(0, each.event.at.commit_lsn), 0)
            spans[each.event.table, each.event.key].append((rng.choice((None, above)), each.event.at))
    erasures = Erasures(
        {
            ("public", table, key_hash(key_text(key) or "")): [Span(*span) for span in of_key]
            for (table, key), of_key in spans.items()
        }
    )
    due = {
        each.delivery.number: each for each in oracle.judge(deliveries, replace(both.oracle, erasures=spans))
    }
    table = pa.Table.from_pylist(marked(deliveries), schema=_SCHEMA)
    rows = [
        row
        for batch in judge_batches(table.to_batches(4), replace(both.kernel, erasures=erasures))
        for row in batch.to_pylist()
    ]
    assert len(rows) == len(due)
    for row in rows:
        verdict = due[row["number"]]
        kept, unreadable = verdict.kept, verdict.delivery.unreadable
        assert (row["verdict"], row["reason"]) == (verdict.verdict, verdict.reason)
        assert row["envelope"] == (None if verdict.erased else "as delivered")
        if verdict.erased and unreadable is not None:
            assert (row["before"], row["after"]) == (None, None)
        elif unreadable is None:
            sent = (_image(kept.before, kept.key), _image(kept.after, kept.key), sorted(kept.unchanged))
            # Without a contract even the key's columns are values.
            if verdict.erased and kept.table == UNKNOWN and kept.after is not None:
                sent = (None, "{}", sorted({*kept.unchanged, "id"}))
            assert (row["before"], row["after"], row["unchanged"] or []) == sent


@pytest.mark.parametrize("op", ["c", "u", "r"])
@pytest.mark.parametrize(
    ("image", "reason", "rules"),
    [
        ({"id": None}, "malformed_image", ["id:not_null"]),
        ({"id": "1", "region": None}, "malformed_image", ["region:not_null"]),
        ({"id": "one", "region": "eu"}, "row_rule", ["id:type"]),
        ({"id": "1", "region": "eu"}, None, []),
    ],
)
def test_null_in_a_part_of_a_composite_key_never_reaches_a_table(
    op: str, image: Image, reason: str | None, rules: list[str]
) -> None:
    contract = replace(
        CONTRACT,
        key=("id", "region"),
        columns=(*CONTRACT.columns, Column("region", "text", nullable=False)),
    )
    key = (image["id"], image.get("region"))
    event = Event(lanes.Position(1, 5, 0), op, SHAPE.name, key, _START, after=image)  # type: ignore[arg-type]
    judging_rules = replace(drawn_rules(Random(1), []).kernel, contracts=(contract,))
    sent = _row(Delivery(1, event, "2026-11-01T0900", _ARRIVAL), 1, False) | {"after": json.dumps(image)}
    (batch,) = judge_batches(pa.Table.from_pylist([sent], schema=_SCHEMA).to_batches(), judging_rules)
    (row,) = batch.to_pylist()
    assert (row["reason"], row["rules"]) == (reason, rules)


def test_the_cases_hold_every_situation_they_are_meant_to() -> None:
    reasons: set[str | None] = set()
    states: set[str | None] = set()
    for seed in range(300):
        rng = Random(seed)
        deliveries = drawn(rng)
        verdicts = due(deliveries, drawn_rules(rng, deliveries).oracle)
        reasons |= {each[1] for each in verdicts.values()}
        states |= {each[2] for each in verdicts.values()}
    assert reasons == {None, "duplicate_position", *oracle._IN_ORDER}
    assert states == {None, "open", "discarded", "not_needed"}


_START = datetime(2026, 11, 1, 9, tzinfo=UTC)
_ARRIVAL = Arrival(_START, None, 1, from_file=True)


def drawn(rng: Random) -> list[Delivery]:
    """Draw deliveries in landing order: copies, collisions, late, unreadable and out-of-range events."""
    events = [event for event in collided(rng, soup(rng, withheld=False)) if event.scope is None]
    events = [_long(rng, event) for event in events]
    events += [event for event in events if rng.random() < 0.3]
    rng.shuffle(events)
    found: list[Delivery] = []
    arrival = _ARRIVAL
    for number, event in enumerate(events, 1):
        if rng.random() < 0.4:
            mark = _START + rng.random() * 8 * HOUR
            arrival = Arrival(
                _START + number * HOUR,
                None if rng.random() < 0.2 else max(mark, arrival.watermark_before or mark),
                max(arrival.newest_epoch_before, rng.choice((1, 1, 1, 2))),
                from_file=rng.random() < 0.6,
            )
        window = event.source_ts.strftime("%Y-%m-%dT%H00")
        found.append(
            Delivery(
                number,
                event,
                OUT_OF_RANGE if event.at.commit_lsn == 6 else window,
                arrival,
                unreadable=rng.choice(("{", "[1]", "", "nul")) if _spoiled(event) else None,
                misplaced=event.at.commit_lsn == 5,
            )
        )
    return found


def _spoiled(event: Event) -> bool:
    """Spoil events by position, so that copies stay equal."""
    return event.op in "cur" and event.at.ordinal == 10


def _long(rng: Random, event: Event) -> Event:
    table = UNKNOWN if event.at.commit_lsn == 4 else event.table
    if event.after is not None and event.at.ordinal % 3 == 1:
        event = replace(event, after={**event.after, "more": "m"})
    elif event.unchanged and event.at.commit_lsn == 2:
        event = replace(event, unchanged=event.unchanged | {"more"})
    return replace(event, table=table, key=None if event.at.ordinal == 8 and event.op == "u" else event.key)


def drawn_rules(rng: Random, deliveries: Sequence[Delivery]) -> BothRules:
    """Draw a decision table with allowed actions, and reviews of some events."""
    ours = load_decision_table(default_decision_table())
    decisions = dict(ours.decisions)
    for name in JUDGED:
        if rng.random() < 0.4:
            decisions[name] = Decision(name, rng.choice(SCENARIOS[name].actions), rng.random() < 0.5, "")
    decided = ("release", "discard", "discard copies")
    reviews = {each.key: rng.choice(decided) for each in deliveries if rng.random() < 0.15}
    first = {each.key: each for each in deliveries}
    by_event = {(*first[key].event.at, _hash(first[key])): what for key, what in reviews.items()}
    rejected = [each for each in deliveries if rng.random() < 0.1]
    of_batches = {
        (each.window, "public", each.event.table, str(each.number)): (oracle.REJECTING,) for each in rejected
    }
    may, must = drawn_columns(rng)
    blocked = rng.random() < 0.3
    return BothRules(
        JudgingRules(
            (CONTRACT,),
            DecisionTable(decisions),
            HOUR,
            by_event,
            rejected=of_batches,
            row_columns={CONTRACT.table_name: RowColumns(may, must)} if blocked else {},
        ),
        oracle.JudgingRules(
            {name: each.action for name, each in decisions.items()},
            frozenset(name for name, each in decisions.items() if each.needs_manual_review),
            {SHAPE.name: (HOUR, 3 * HOUR)},
            {SHAPE.name: {"status": LIMIT}},
            HOUR,
            reviews,
            rejected={each.number: (oracle.REJECTING,) for each in rejected},
            key_columns={SHAPE.name: CONTRACT.key},
            uncontracted={UNKNOWN},
            columns={SHAPE.name: (may, must)} if blocked else {},
        ),
    )


def drawn_columns(rng: Random) -> tuple[frozenset[str], frozenset[str]]:
    """Draw the columns that a row may and must have: all of the contract, and now and then ``more``."""
    may = {*(each.name for each in CONTRACT.columns), *(["more"] if rng.random() < 0.3 else [])}
    return frozenset(may), frozenset(each for each in may if rng.random() < 0.5)


def as_kernel_rules(judging_rules: oracle.JudgingRules, deliveries: Sequence[Delivery]) -> JudgingRules:
    """Convert the oracle's rules to those of the kernel."""
    ours = load_decision_table(default_decision_table())
    decisions = {
        name: Decision(
            name, judging_rules.actions.get(name, each.action), name in judging_rules.to_review, ""
        )
        for name, each in ours.decisions.items()
    }
    limits = judging_rules.longest.get(SHAPE.name, {})
    columns = tuple(replace(each, max_length=limits.get(each.name)) for each in CONTRACT.columns)
    allowed, longest = judging_rules.lateness[SHAPE.name]
    contract = replace(CONTRACT, columns=columns, allowed_lateness=allowed, max_lateness=longest)
    reviews = {
        (*each.event.at, _hash(each)): judging_rules.reviews[each.key]
        for each in deliveries
        if each.key in judging_rules.reviews
    }
    return JudgingRules((contract,), DecisionTable(decisions), judging_rules.window_length, reviews)


def no_rules() -> JudgingRules:
    """Rules by which only positions and contents count."""
    ours = load_decision_table(default_decision_table())
    return JudgingRules((), ours, HOUR)


Judged = tuple[str, str | None, str | None, tuple[str, ...], bool]
"""Verdict, reason, state of the review, broken rules, whether it is late."""


def due(deliveries: Sequence[Delivery], judging_rules: oracle.JudgingRules) -> dict[int, Judged]:
    return {
        each.delivery.number: (each.verdict, each.reason, each.state, tuple(each.rules), each.late)
        for each in oracle.judge(deliveries, judging_rules)
    }


def judged(
    deliveries: Sequence[Delivery], judging_rules: JudgingRules, batch_rows: int, few: int = 0
) -> dict[int, Judged]:
    table = pa.Table.from_pylist(marked(deliveries), schema=_SCHEMA)
    found: dict[int, Judged] = {}
    for batch in judge_batches(table.to_batches(batch_rows), judging_rules, few=few):
        assert batch.schema.names == [
            *(name for name in _SCHEMA.names if name not in ("copy", "collision")),
            *ADDED,
        ]
        for row in batch.to_pylist():
            found[row["number"]] = (
                *(row["verdict"], row["reason"], row["review_state"]),
                *(tuple(row["rules"]), row["late"]),
            )
            assert row["detector"] == (None if row["reason"] is None else SCENARIOS[row["reason"]].detector)
            assert row["verdict"] != ACCEPTED or row["reason"] is None
    return found


def marked(deliveries: Sequence[Delivery]) -> list[dict[str, Any]]:
    """The deliveries as rows, with the marks of ``dedupe.mark_copies``."""
    contents: dict[object, dict[object, list[Delivery]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(deliveries, key=lambda each: each.number):
        contents[each.window, each.event.at, each.event.identity][each.key].append(each)
    return [
        _row(each, copy, len(of_place) > 1)
        for of_place in contents.values()
        for copies in of_place.values()
        for copy, each in enumerate(copies, 1)
    ]


def _row(each: Delivery, copy: int, collision: bool) -> Mapping[str, Any]:
    event, arrival = each.event, each.arrival
    return {
        **dict(zip(("epoch", "commit_lsn", "ordinal"), event.at, strict=True)),
        "number": each.number,
        "window": each.window,
        "op": event.op,
        "key": key_text(event.key),
        "before": _image(event.before, event.key),
        "after": each.unreadable if each.unreadable is not None else _image(event.after, event.key),
        "envelope": "as delivered",
        "batch_id": str(each.number),
        "source_schema": "public",
        "source_table": event.table,
        "copy": copy,
        "collision": collision,
        "newest_epoch_before": arrival.newest_epoch_before,
        "file_row": each.number if arrival.from_file else None,
        "event_hash": _hash(each),
        "misplaced": each.misplaced,
        "source_ts": event.source_ts,
        "watermark_before": arrival.watermark_before,
        "unchanged": sorted(event.unchanged),
    }


def _image(image: Image | None, key: Key | None) -> str | None:
    return None if image is None else _compact({**({"id": key[0]} if key else {}), **image})


def _compact(image: Image) -> str:
    return json.dumps(image, ensure_ascii=False, separators=(",", ":"))


def _hash(each: Delivery) -> int:
    at, identity, content = each.key
    parts = [tuple(sorted(part, key=repr)) if isinstance(part, frozenset) else part for part in content]  # type: ignore[attr-defined]
    return zlib.crc32(repr((at, identity, parts)).encode())
