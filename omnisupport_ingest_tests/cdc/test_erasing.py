"""Erasing is compared with the oracle: what is left of erased events, and which events belong to a row."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Erasures, Span, key_hash
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.judging import ACCEPTED, JudgingRules, judge_batches
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.read.row_traces import KeyChange, spans_of
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.cdc.lanes import CONTRACT, SHAPE
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle import histories, judging
from omnisupport_ingest_tests.oracle.histories import simulate
from omnisupport_ingest_tests.oracle.judging import Arrival, Delivery, Verdict
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position
from omnisupport_ingest_tests.oracle.oracle import current_state, live

WINDOW = "2026-11-01T0900"
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
DECISIONS = load_decision_table(default_decision_table())
SCENARIOS = DECISIONS.decisions
UNREADABLE = "{not an image of long body"
SCHEMA = (
    arrow_schema(RAW_TYPE, without=())
    .append(pa.field("copy", pa.int64()))
    .append(pa.field("collision", pa.bool_()))
)
Spans = dict[tuple[str, Key], list[tuple[Position | None, Position]]]


def key_text(key: Key | None) -> str | None:
    return None if key is None else json.dumps(list(key), separators=(",", ":"))


def image_text(image: Image | None, key: Key | None) -> str | None:
    if image is None or key is None:
        return None
    return json.dumps({**dict(zip(CONTRACT.key, key, strict=True)), **image})


def landed(delivery: Delivery, copy: int, *, collides: bool) -> dict[str, Any]:
    event = delivery.event
    return {
        "window": delivery.window,
        **dict(zip(("epoch", "commit_lsn", "ordinal"), event.at, strict=True)),
        "op": event.op,
        "source_ts": event.source_ts,
        "source_schema": "public",
        "source_table": event.table,
        "key": key_text(event.key),
        "before": image_text(event.before, event.moved_from or event.key),
        "after": delivery.unreadable or image_text(event.after, event.key),
        "unchanged": sorted(event.unchanged),
        "moved_from_key": key_text(event.moved_from),
        "envelope": f"delivered {event.after}",
        "batch_id": "batch",
        "landed_at": NOON,
        "newest_epoch_before": delivery.arrival.newest_epoch_before,
        "event_hash": delivery.number,
        "copy": copy,
        "collision": collides,
    }


def judged(deliveries: Sequence[Delivery], spans: Spans) -> list[dict[str, Any]]:
    """Judge the deliveries in their order as the workers do; copies are found as Spark finds them."""
    contents: dict[Position, dict[object, int]] = defaultdict(lambda: defaultdict(int))
    copies = []
    for each in deliveries:
        contents[each.event.at][each.key] += 1
        copies.append(contents[each.event.at][each.key])
    rows = [
        landed(each, copy, collides=len(contents[each.event.at]) > 1)
        for each, copy in zip(deliveries, copies, strict=True)
    ]
    judging_rules = JudgingRules(
        contracts=(CONTRACT,),
        decisions=DECISIONS,
        window_length=timedelta(hours=1),
        erasures=Erasures(
            {
                ("public", table, key_hash(key_text(key) or "")): [Span(*span) for span in found]
                for (table, key), found in spans.items()
            }
        ),
    )
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    return [row for out in judge_batches([batch], judging_rules) for row in out.to_pylist()]


def expected(deliveries: Sequence[Delivery], spans: Spans) -> list[Verdict]:
    judging_rules = judging.JudgingRules(
        actions={name: decision.action for name, decision in SCENARIOS.items()},
        to_review=frozenset(name for name, each in SCENARIOS.items() if each.needs_manual_review),
        lateness={},
        longest={},
        window_length=timedelta(hours=1),
        erasures=spans,
    )
    return sorted(judging.judge(deliveries, judging_rules), key=lambda each: each.delivery.number)


@st.composite
def sent(draw: st.DrawFn) -> tuple[list[Delivery], Spans]:
    """Draw events as they may land (copies, collisions and unreadable ones among them), and which of them are
    erased."""
    rng = draw(st.randoms(use_true_random=False))
    soup = lanes.in_one_lane(histories.soup(rng, withheld=False))
    events = histories.collided(rng, [replace(event, source_ts=NOON) for event in soup])
    deliveries = [
        Delivery(
            number,
            event,
            WINDOW,
            Arrival(NOON, None, rng.choice((1, 2)), from_file=False),
            unreadable=UNREADABLE if event.after is not None and rng.random() < 0.1 else None,
        )
        for number, event in enumerate(events)
    ]
    return deliveries, _drawn_spans(rng, events)


def _drawn_spans(rng: Random, events: Sequence[Event]) -> Spans:
    places = sorted({event.at for event in events})
    spans: Spans = {}
    for key in sorted({event.key for event in events if event.key is not None}):
        if rng.random() < 0.6:
            above = rng.choice([None, None, *places])
            spans[SHAPE.name, key] = [(above, rng.choice(places))]
    return spans


def parsed(text: str | None) -> Any:
    return text if text is None or text == UNREADABLE else json.loads(text)


@settings(max_examples=examples(300))
@given(sent())
def test_judged_events_are_kept_as_the_oracle_keeps_them(story: tuple[list[Delivery], Spans]) -> None:
    deliveries, spans = story
    for row, verdict in zip(judged(deliveries, spans), expected(deliveries, spans), strict=True):
        kept, delivery = verdict.kept, verdict.delivery
        assert (row["verdict"], row["reason"]) == (verdict.verdict, verdict.reason)
        assert (row["op"], row["key"], row["moved_from_key"]) == (
            kept.op,
            key_text(kept.key),
            key_text(kept.moved_from),
        )
        if verdict.erased and verdict.verdict == ACCEPTED:
            # Of an accepted event, what is left is hashed.
            left = pa.Table.from_pylist([row], schema=SCHEMA)
            assert row["event_hash"] == event_hashes(left)[0].as_py() != delivery.number
        else:
            assert row["event_hash"] == delivery.number
        after = image_text(kept.after, kept.key)
        if delivery.unreadable is not None and not verdict.erased:
            after = UNREADABLE
        assert parsed(row["after"]) == parsed(after)
        assert parsed(row["before"]) == parsed(image_text(kept.before, kept.moved_from or kept.key))
        assert set(row["unchanged"] or ()) == kept.unchanged
        assert (row["envelope"] is None) == verdict.erased


def test_the_property_meets_erased_events_of_every_verdict() -> None:
    """Otherwise the property above could hold without meeting them."""
    seen = set()
    for seed in range(200):
        rng = Random(seed)
        events = histories.collided(rng, lanes.in_one_lane(histories.soup(rng, withheld=False)))
        arrival = Arrival(NOON, None, rng.choice((1, 2)), from_file=False)
        deliveries = [Delivery(number, event, WINDOW, arrival) for number, event in enumerate(events)]
        spans = _drawn_spans(rng, events)
        seen |= {(row["verdict"], row["op"]) for row in judged(deliveries, spans) if row["envelope"] is None}
    assert seen >= {(verdict, op) for verdict in ("accepted", "duplicate", "quarantined") for op in "cud"}


def test_what_is_erased_of_a_row_is_all_of_it_and_nothing_of_a_row_that_lives() -> None:
    """Every value of the simulated database is distinct, so it identifies its row."""
    rows = 0
    for seed in range(300):
        history = simulate(Random(seed), exact=True)
        # Between two epochs nobody looked, so a key that changed there is not known as a former one.
        every_change_seen = len({event.at.epoch for event in history.events}) == 1
        rows += _assert_erasing_takes_the_row_alone(history.events, whole=every_change_seen)
    assert rows > 200


def _assert_erasing_takes_the_row_alone(events: Sequence[Event], *, whole: bool) -> int:
    """Erase each ended row by itself; return how many there were."""
    changes = [
        KeyChange(text(event.moved_from), text(event.key), event.at)
        for event in events
        if event.moved_from is not None
    ]
    before = current_state(events, SHAPE)
    left = {(change.old, change.left) for change in changes}
    ended = [key for key, row in before.items() if row.ended and (text(key), row.last) not in left]
    for key in ended:
        row = before[key]
        erased = set(spans_of(text(key), row.last, changes))
        kept = [_without(event, erased) for event in events]
        values = {cell.value for cell in row.cells.values()}
        assert not whole or not values & {value for event in kept for value in _values(event)}
        assert _live_values(kept) == _live_values(events)
    return len(ended)


def _live_values(events: Sequence[Event]) -> dict[Key, Image]:
    return {key: row.values for key, row in live(current_state(events, SHAPE)).items()}


def text(key: Key | None) -> str:
    return key_text(key) or ""


def _without(event: Event, erased: set[tuple[str, Span]]) -> Event:
    if not any(name == text(event.key) and span.holds(event.at) for name, span in erased):
        return event
    return replace(
        event,
        before=None,
        after=None if event.after is None else {},
        unchanged=event.unchanged | frozenset(event.after or ()),
    )


def _values(event: Event) -> list[str]:
    return [
        value
        for image in (event.before, event.after)
        for value in (image or {}).values()
        if value is not None
    ]
