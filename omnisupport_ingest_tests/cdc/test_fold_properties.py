"""The Spark fold equals the oracle, however the events are divided and merged.

Each test folds hundreds of random histories in one job. A failure names the lane, whose events can be drawn
again from the seed alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from random import Random

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.event_fold import KEY
from omnisupport_ingest.cdc.fold import fold_events, hashed, merge_rows, to_fold
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, events_to_fold
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.cdc.lanes import CONTRACT, SHAPE, State
from omnisupport_ingest_tests.oracle.histories import simulate
from omnisupport_ingest_tests.oracle.model import Event, Key, Position

SEED = 2026
LANES = 250
KEYS = tuple((str(number),) for number in range(1, 150))

Transaction = tuple[int, int]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return lanes.with_distinct_times(lanes.in_lanes(Random(SEED), LANES))


@pytest.fixture(scope="module")
def windows(events: list[Event]) -> dict[Transaction, str]:
    rng = Random(SEED)
    return {transaction: rng.choice(("w1", "w2", "w3")) for transaction in _transactions(events)}


@pytest.fixture(scope="module")
def parts(spark: SparkSession, events: list[Event], windows: dict[Transaction, str]) -> list[DataFrame]:
    rng = Random(SEED + 1)
    part_of = {transaction: rng.randrange(3) for transaction in _transactions(events)}
    return [
        _fold(spark, [event for event in events if part_of[event.at[:2]] == part], windows)
        for part in range(3)
    ]


@pytest.fixture(scope="module")
def merged(parts: list[DataFrame]) -> DataFrame:
    one, two, three = parts
    return _merge(_merge(one, two), three).localCheckpoint()


@pytest.mark.quick
class TestDatabaseHistory:
    """One history of a simulated database with many keys, from exact snapshots."""

    @pytest.mark.slow
    def test_windows_folded_apart_come_to_what_the_database_holds(self, spark: SparkSession) -> None:
        history = simulate(Random(SEED), exact=True, keys=KEYS)
        events = lanes.with_distinct_times(lanes.in_one_lane(history.events))
        transactions = _transactions(events)
        windows = {at: f"w{index * 4 // len(transactions)}" for index, at in enumerate(transactions)}
        current = lanes.folded(current_state(_fold(spark, events, windows), CONTRACT), events)
        live = {key[1:]: dict(state.values) for key, state in current.items() if not state.is_deleted}
        assert live == history.final
        assert current == lanes.expected(events)


class TestChainsOfKeyChanges:
    """One row whose key changes again and again; its long column is never sent again."""

    @pytest.mark.parametrize("windows", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_the_last_key_has_the_column_that_only_the_first_one_carried(
        self, spark: SparkSession, windows: int
    ) -> None:
        long, *others = SHAPE.columns
        at = datetime(2026, 11, 1, tzinfo=UTC)
        events = [
            Event(Position(1, 10, 0), "c", SHAPE.name, ("1",), at, after=dict.fromkeys(SHAPE.columns, "v"))
        ]
        for number in range(1, 41):
            old, new = (str(number),), (str(number + 1),)
            place = Position(1, 10 + number, 0)
            events.append(Event(place, "d", SHAPE.name, old, at))
            events.append(
                Event(
                    place._replace(ordinal=1),
                    "c",
                    SHAPE.name,
                    new,
                    at,
                    after=dict.fromkeys(others, str(number)),
                    unchanged=frozenset({long}),
                    moved_from=old,
                )
            )
        sent = lanes.with_distinct_times(lanes.in_one_lane(events))
        window_of = {place: f"w{number % windows}" for number, place in enumerate(_transactions(sent))}
        current = lanes.folded(current_state(_fold(spark, sent, window_of), CONTRACT), sent)
        assert dict(current["0", "41"].values) == {long: "v", **dict.fromkeys(others, "40")}
        assert current == lanes.expected(sent)


class TestSoups:
    """Events in random order that no database would send: gaps, withheld events, repeats, updates of deleted
    rows.

    Each transaction is in a random window and in one of three random parts. Windows follow commit time, not
    log order, so one window may hold the first and the last event of a key, and another the one between.
    Parts follow arrival, which may be in any order.
    """

    def test_one_fold_of_everything_comes_to_what_the_oracle_comes_to(
        self, spark: SparkSession, events: list[Event]
    ) -> None:
        one_window = dict.fromkeys(_transactions(events), "w")
        current = current_state(_fold(spark, events, one_window), CONTRACT)
        _assert_equal(lanes.folded(current, events), lanes.expected(events), events)

    def test_a_truncate_and_a_boundary_in_quarantine_leave_every_row_below_in_doubt(
        self, spark: SparkSession
    ) -> None:
        events = lanes.with_distinct_times(lanes.in_lanes(Random(SEED + 2), 80, whole_table_withheld=True))
        rng = Random(SEED)
        windows = {at: rng.choice(("w1", "w2")) for at in _transactions(events)}
        found = lanes.folded(current_state(_fold(spark, events, windows), CONTRACT), events)
        assert any(state.existence_unresolved for state in found.values())
        _assert_part(found, lanes.expected(events), events)

    def test_parts_of_windows_come_to_the_same(self, parts: list[DataFrame], events: list[Event]) -> None:
        current = current_state(reduce(DataFrame.unionByName, parts), CONTRACT)
        _assert_part(lanes.folded(current, events), lanes.expected(events), events)

    def test_merged_parts_come_to_the_same(self, merged: DataFrame, events: list[Event]) -> None:
        _assert_part(lanes.folded(current_state(merged, CONTRACT), events), lanes.expected(events), events)

    def test_merging_in_another_order_and_grouping_gives_the_same_rows(
        self, merged: DataFrame, parts: list[DataFrame]
    ) -> None:
        one, two, three = parts
        assert _rows(_merge(two, _merge(three, one))) == _rows(merged)

    def test_merging_again_what_is_merged_already_gives_the_same_rows(
        self, merged: DataFrame, parts: list[DataFrame]
    ) -> None:
        assert _rows(_merge(merged, *parts, merged)) == _rows(merged)


def _assert_equal(folded: dict[Key, State], expected: dict[Key, State], events: list[Event]) -> None:
    keys = folded.keys() | expected.keys()
    wrong = {key for key in keys if folded.get(key) != expected.get(key)}
    assert not wrong, _told(wrong, folded, expected, events)


def _assert_part(folded: dict[Key, State], expected: dict[Key, State], events: list[Event]) -> None:
    """Assert equality, but allow a column that came with a key change to be unresolved.

    A window that folded events of the old key from both sides of the change, when the change is in another
    window, no longer has the earlier ones. Then the column must be unresolved.
    """
    moved = {event.key for event in events if event.key is not None and event.moved_from is not None}
    keys = folded.keys() | expected.keys()
    equal = {key for key in keys if folded.get(key) == expected.get(key)}
    safe = {key for key in moved & folded.keys() if folded[key].is_part_of(expected[key])}
    wrong = keys - equal - safe
    assert not wrong, _told(wrong, folded, expected, events)


def _told(wrong: set[Key], folded: dict[Key, State], expected: dict[Key, State], events: list[Event]) -> str:
    """The wrong key with the fewest events in its lane, with those events in log order."""

    def lane_of(key: Key) -> list[Event]:
        return sorted((e for e in events if e.key is None or e.key[0] == key[0]), key=lambda event: event.at)

    key = min(wrong, key=lambda key: (len(lane_of(key)), key))
    sent = "\n".join(f"  {event}" for event in lane_of(key)[:40])
    return (
        f"{len(wrong)} of {len(expected)} keys differ; the simplest is {key}:\n"
        f"folded   {folded.get(key)}\nexpected {expected.get(key)}\n{sent}"
    )


def _transactions(events: list[Event]) -> list[Transaction]:
    return sorted({event.at[:2] for event in events})


def _fold(spark: SparkSession, events: list[Event], windows: dict[Transaction, str]) -> DataFrame:
    return fold_events(lanes.frame(spark, events, windows), CONTRACT).localCheckpoint()


def _merge(*parts: DataFrame) -> DataFrame:
    return merge_rows(reduce(DataFrame.unionByName, parts), CONTRACT)


def _rows(folded: DataFrame) -> dict[tuple[object, ...], int]:
    """Return the hash of each key's folded row by window and key; the hash covers what the next merge needs.

    Lives that key changes ended are compared by what they lead to: what is left of one depends on whether the
    change was known when the old key's later events were folded.
    """
    rows = hashed(folded).where(F.col("_cdc_kind") == KEY)
    rows = rows.select("window", "_cdc_key", "_cdc_row_hash").collect()
    return {tuple(row[:-1]): row[-1] for row in rows}


def test_one_task_takes_the_events_into_the_fold_that_spark_takes(
    spark: SparkSession, events: list[Event], windows: dict[Transaction, str]
) -> None:
    accepted = [event for event in events if not event.quarantined]
    frame = lanes.frame(spark, accepted, windows)
    found = events_to_fold(frame.select(*EVENT_COLUMNS).toArrow().combine_chunks())
    by_spark = to_fold(frame).toArrow().select(EVENT_COLUMNS).cast(found.schema)
    order = [(name, "ascending") for name in ("epoch", "commit_lsn", "ordinal", "key", "op", "window")]
    assert found.num_rows > len(accepted), "no key change among them"
    assert found.sort_by(order).to_pylist() == by_spark.sort_by(order).to_pylist()
