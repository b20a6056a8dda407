"""The Spark fold comes to what the oracle comes to, however the events are split and merged.

Each test folds hundreds of random histories in one job. A failure names the lane: its events are
drawn again, alone, from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from random import Random

import pytest
from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.fold import GROUP, fold_events, merge_rows
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.cdc.lanes import CONTRACT, State
from omnisupport_ingest_tests.oracle.histories import simulate
from omnisupport_ingest_tests.oracle.model import Event, Key

SEED = 2026
LANES = 250
KEYS = tuple((str(number),) for number in range(1, 150))

Windows = dict[tuple[int, int], str]


@dataclass(frozen=True)
class Case:
    """Events with what they come to; ``parts`` is how they arrived, folded apart."""

    events: list[Event]
    windows: Windows
    parts: list[DataFrame] = field(repr=False)

    @property
    def all_parts(self) -> DataFrame:
        return reduce(DataFrame.unionByName, self.parts)


def database_history() -> list[Event]:
    """One history of a simulated database with many keys, from exact snapshots."""
    return lanes.in_one_lane(simulate(Random(SEED), exact=True, keys=KEYS).events)


def soups() -> list[Event]:
    """Events that no database would send: gaps, holes, repeats, updates of rows that are gone."""
    return lanes.in_lanes(Random(SEED), LANES)


@pytest.fixture(scope="module", params=[database_history, soups])
def case(request: pytest.FixtureRequest, spark: SparkSession) -> Case:
    """The events, each transaction in a window drawn at random, in three parts drawn at random.

    Windows follow commit time, not log order, so a window may hold the first and the last event of
    a key and another the one between; parts follow arrival, which may be in any order.
    """
    draw: Callable[[], list[Event]] = request.param
    events, rng = lanes.with_distinct_times(draw()), Random(SEED)
    transactions = sorted({event.at[:2] for event in events})
    windows = {transaction: rng.choice(("w1", "w2", "w3")) for transaction in transactions}
    part_of = {transaction: rng.randrange(3) for transaction in transactions}
    parts = [[event for event in events if part_of[event.at[:2]] == part] for part in range(3)]
    return Case(events, windows, [_fold(spark, part, windows) for part in parts])


def test_parts_in_any_split_come_to_what_the_oracle_comes_to(case: Case) -> None:
    assert_same(current_state(case.all_parts, CONTRACT), case.events)


def test_merging_parts_changes_nothing(case: Case) -> None:
    assert_same(current_state(merge_rows(case.all_parts, CONTRACT), CONTRACT), case.events)


def test_one_fold_of_everything_equals_the_merged_folds_of_its_parts(
    case: Case, spark: SparkSession
) -> None:
    """Row by row, with all that a later merge may need: so the next merge agrees as well."""
    whole = _fold(spark, case.events, case.windows)
    assert _rows(merge_rows(case.all_parts, CONTRACT)) == _rows(whole)


def test_merging_in_another_order_and_grouping_gives_the_same_rows(case: Case) -> None:
    one, two, three = case.parts
    left = merge_rows(merge_rows(one.unionByName(two), CONTRACT).unionByName(three), CONTRACT)
    right = merge_rows(merge_rows(three.unionByName(two), CONTRACT).unionByName(one), CONTRACT)
    assert _rows(left) == _rows(right)


def test_merging_again_what_is_merged_already_gives_the_same_rows(case: Case) -> None:
    once = merge_rows(case.all_parts, CONTRACT).localCheckpoint()
    again = merge_rows(once.unionByName(case.all_parts).unionByName(once), CONTRACT)
    assert _rows(again) == _rows(once)


def assert_same(current: DataFrame, events: list[Event]) -> None:
    expected, folded = lanes.expected(events), lanes.folded(current)
    wrong = {
        key: (folded.get(key), expected.get(key))
        for key in folded.keys() | expected.keys()
        if folded.get(key) != expected.get(key)
    }
    assert not wrong, f"{len(wrong)} of {len(expected)} keys differ; {_shortest(wrong, events)}"


def _shortest(wrong: dict[Key, tuple[State | None, State | None]], events: list[Event]) -> str:
    """The wrong key with the fewest events in its lane, with those events in log order."""

    def lane_of(key: Key) -> list[Event]:
        return sorted((e for e in events if e.key is None or e.key[0] == key[0]), key=lambda event: event.at)

    key = min(wrong, key=lambda key: (len(lane_of(key)), key))
    folded, expected = wrong[key]
    told = "\n".join(f"  {event}" for event in lane_of(key)[:40])
    return f"the simplest, {key}:\nfolded   {folded}\nexpected {expected}\n{told}"


def _fold(spark: SparkSession, events: list[Event], windows: Windows) -> DataFrame:
    return fold_events(lanes.frame(spark, events, windows), CONTRACT).localCheckpoint()


def _rows(folded: DataFrame) -> dict[tuple[object, ...], int]:
    """The hash of each folded row (of all it says), by what the row stands for."""
    place = [*GROUP, "_cdc_position"]
    rows = folded.where("_cdc_key is not null").select(*place, "_cdc_row_hash").collect()
    return {tuple(row[:-1]): row[-1] for row in rows}
