"""The history, read at any position, equals the oracle's state there.

Hundreds of random histories go through one Spark job. A failure names the lane and its events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

import pytest
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from omnisupport_ingest.cdc import history as history_module
from omnisupport_ingest.cdc.current import current_state as current_rows
from omnisupport_ingest.cdc.current import follow_key_changes
from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.fold import fold_events
from omnisupport_ingest.cdc.history import history
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.cdc.lanes import CONTRACT, SHAPE
from omnisupport_ingest_tests.oracle import histories
from omnisupport_ingest_tests.oracle.histories import simulate
from omnisupport_ingest_tests.oracle.model import Event, Image, Position
from omnisupport_ingest_tests.oracle.oracle import current_state, layers, live

SEED = 2027
LANES = 250
LONG, *OTHERS = SHAPE.columns
AT = datetime(2026, 11, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Held:
    """A row that is alive at a position: its known values, and whether it may not exist."""

    values: tuple[tuple[str, str | None], ...]
    doubtful: bool

    @classmethod
    def of(cls, values: Image, doubtful: bool) -> Held:
        return cls(tuple(sorted(values.items())), doubtful)


class Version:
    """A row of the history."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.key = (str(row["lane"]), str(row["id"]))
        self.first = Position(*row["_cdc_valid_from_position"])
        ends = row["_cdc_valid_to_position"]
        self.end = None if ends is None else Position(*ends)
        unresolved = set(row["_cdc_unresolved"])
        known = {name: row[name] for name in SHAPE.columns if name not in unresolved}
        self.held = Held.of(known, EXISTENCE in unresolved)

    def holds_at(self, at: Position) -> bool:
        return self.first <= at and (self.end is None or at < self.end)


def made(spark: SparkSession, events: list[Event]) -> DataFrame:
    """Return the history of ``events``, whose transactions are in random windows."""
    rng = Random(SEED)
    transactions = sorted({event.at[:2] for event in events})
    windows = {at: rng.choice(("w1", "w2", "w3")) for at in transactions}
    return history(lanes.frame(spark, events, windows), CONTRACT)


def versions_of(spark: SparkSession, events: list[Event]) -> list[Version]:
    return [Version(row) for row in made(spark, events).collect()]


def bears_on(event: Event, lane: str) -> bool:
    """Whether a truncate or snapshot end may reach a key of ``lane``."""
    return event.scope is None or int(event.scope[0][0]) <= int(lane) <= int(event.scope[1][0])


def wrong_places(versions: list[Version], events: list[Event]) -> list[str]:
    """Return every position, lane by lane, at which history and oracle differ, in words."""
    of_lane: dict[str, list[Event]] = defaultdict(list)
    keyless = [event for event in events if event.key is None]
    for event in events:
        if event.key is not None:
            of_lane[event.key[0]].append(event)
    held: dict[str, list[Version]] = defaultdict(list)
    for version in versions:
        held[version.key[0]].append(version)
    found = []
    for lane, alone in of_lane.items():
        reaching = [event for event in keyless if bears_on(event, lane)]
        together = sorted(alone + reaching, key=lambda event: event.at)
        for at in sorted({event.at for event in together}):
            expected = {
                key: Held.of(row.values, row.existence_unresolved)
                for key, row in live(
                    current_state([event for event in together if event.at <= at], SHAPE)
                ).items()
            }
            here = [version for version in held[lane] if version.holds_at(at)]
            came = {version.key: version.held for version in here}
            if came != expected or len(here) != len(came):
                sent = "\n".join(f"  {event}" for event in together)
                found.append(f"lane {lane} at {at}:\nhistory {came}\noracle  {expected}\n{sent}")
                break
    return sorted(found, key=len)


@pytest.fixture(scope="module")
def soups() -> list[Event]:
    """Gaps, withheld events, repeats, truncates, snapshot ends, key changes and two epochs, in lanes."""
    return lanes.with_distinct_times(lanes.in_lanes(Random(SEED), LANES))


@pytest.fixture(scope="module")
def doubtful_soups() -> list[Event]:
    """The same, with a truncate and a snapshot end in quarantine too."""
    return lanes.with_distinct_times(lanes.in_lanes(Random(SEED + 1), LANES, whole_table_withheld=True))


@pytest.fixture(scope="module")
def soup_versions(spark: SparkSession, soups: list[Event]) -> list[Version]:
    return versions_of(spark, soups)


def test_read_at_any_position_it_is_what_the_oracle_comes_to_there(
    soup_versions: list[Version], soups: list[Event]
) -> None:
    wrong = wrong_places(soup_versions, soups)
    assert not wrong, f"{len(wrong)} lanes differ; the simplest:\n{wrong[0]}"


def test_a_truncate_in_quarantine_leaves_doubt_from_its_position_on(
    spark: SparkSession, doubtful_soups: list[Event]
) -> None:
    versions = versions_of(spark, doubtful_soups)
    assert any(version.row["_cdc_opened_by"] == "t" for version in versions)
    wrong = wrong_places(versions, doubtful_soups)
    assert not wrong, f"{len(wrong)} lanes differ; the simplest:\n{wrong[0]}"


def test_positions_with_two_contents_are_withheld_of_both(spark: SparkSession) -> None:
    """One position with an update and a delete, or with two updates: neither is accepted."""
    rng = Random(SEED + 2)
    collided = histories.collided(rng, lanes.in_lanes(rng, LANES))
    updates = [each for each in collided if each.op == "u" and rng.random() < 0.2]
    collided += [replace(each, op="d", after=None) for each in updates]
    sent = layers(lanes.with_distinct_times(collided)).folded
    wrong = wrong_places(versions_of(spark, sent), sent)
    assert not wrong, f"{len(wrong)} lanes differ; the simplest:\n{wrong[0]}"


def test_an_update_and_a_delete_at_one_position_leave_the_row_itself_in_doubt(spark: SparkSession) -> None:
    update, delete = (
        replace(event(20, op, "1", **values), quarantined=True)
        for op, values in (("u", {LONG: "b"}), ("d", {}))
    )
    sent = lanes.in_one_lane([event(10, "c", "1", **{LONG: "a"}), update, delete])
    opened = [version.held.doubtful for version in versions_of(spark, sent) if version.end is None]
    assert opened == [True]
    one_window = dict.fromkeys({each.at[:2] for each in sent}, "w")
    current = current_rows(fold_events(lanes.frame(spark, sent, one_window), CONTRACT), CONTRACT)
    assert lanes.folded(current, sent) == lanes.expected(sent)


@pytest.mark.slow
def test_the_history_of_a_database_ends_with_what_it_holds(spark: SparkSession) -> None:
    """Inserts, updates, deletes, key changes and swaps of many keys, from snapshots."""
    keys = tuple((str(number),) for number in range(1, 60))
    simulated = simulate(Random(SEED), exact=True, keys=keys)
    events = lanes.with_distinct_times(lanes.in_one_lane(simulated.events))
    versions = versions_of(spark, events)
    assert not wrong_places(versions, events)
    still = {version.key[1:]: dict(version.held.values) for version in versions if version.end is None}
    assert still == simulated.final


def test_a_version_begins_and_ends_when_the_events_at_its_ends_were_committed(
    soup_versions: list[Version], soups: list[Event]
) -> None:
    times = {event.at: event.source_ts for event in soups}
    for version in soup_versions:
        assert version.row["_cdc_valid_from"].astimezone(UTC) == times[version.first]
        ended = version.row["_cdc_valid_to"]
        assert (ended is None) == (version.end is None) == (version.row["_cdc_closed_by"] is None)
        assert ended is None or ended.astimezone(UTC) == times[version.end]


def test_any_order_of_arrival_and_any_windows_give_the_same_rows(
    spark: SparkSession, soups: list[Event], soup_versions: list[Version]
) -> None:
    shuffled = [*soups, *soups[::7]]
    Random(SEED).shuffle(shuffled)
    one_window = dict.fromkeys({event.at[:2] for event in soups}, "w")
    other = history(lanes.frame(spark, shuffled, one_window), CONTRACT, partitions=1)
    assert hashes(other.collect()) == hashes(version.row for version in soup_versions)


def hashes(rows: Iterable[Row]) -> list[tuple[object, ...]]:
    names = ("_cdc_key", "_cdc_valid_from_position", "_cdc_row_hash")
    found = ([row[name] for name in names] for row in rows)
    return sorted((key, tuple(position), row_hash) for key, position, row_hash in found)


@pytest.mark.slow
def test_a_chain_of_forty_key_changes_keeps_the_column_that_only_the_first_key_sent(
    spark: SparkSession,
) -> None:
    events = [event(10, "c", "1", **{LONG: "v"})]
    for number in range(1, 41):
        events.append(event(10 + number, "d", str(number)))
        created = event(10 + number, "c", str(number + 1), ordinal=1, **{OTHERS[0]: str(number)})
        events.append(replace(created, moved_from=(str(number),)))
    found = sorted(versions_of(spark, lanes.in_one_lane(events)), key=lambda version: version.first)
    assert len(found) == 41
    assert [dict(version.held.values)[LONG] for version in found] == ["v"] * 41
    assert [version.row["_cdc_closed_by"] for version in found] == ["moved"] * 40 + [None]


def event(lsn: int, op: str, key: str | None, *, ordinal: int = 0, **values: str) -> Event:
    place = Position(1, lsn, ordinal)
    named = None if key is None else (key,)
    after = None if op in "dtb" else dict(values)
    return Event(
        place,
        op,
        SHAPE.name,
        named,
        AT,
        after=after,
        unchanged=frozenset(SHAPE.columns).difference(values) if op in "cu" else frozenset(),
    )


class TestPlantedMistakes:
    """The comparison with the oracle detects planted mistakes."""

    @pytest.mark.slow
    def test_stepping_over_withheld_is_found(
        self, spark: SparkSession, soups: list[Event], soup_versions: list[Version]
    ) -> None:
        accepted = [each for each in soups if not each.quarantined]
        assert wrong_places(versions_of(spark, accepted), soups)

    @pytest.mark.slow
    def test_taking_an_unsent_column_from_another_life_of_the_old_key_is_found(
        self, spark: SparkSession, soups: list[Event], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def from_the_last(lives: DataFrame, contract: TableContract) -> DataFrame:
            later = Window.partitionBy("_cdc_key").orderBy(F.desc("_cdc_ended_at"))
            taken = {*SHAPE.columns, "_cdc_unresolved"}
            right = follow_key_changes(lives, contract)
            return right.select(
                *(F.first(name).over(later).alias(name) if name in taken else name for name in right.columns)
            )

        monkeypatch.setattr(history_module, "follow_key_changes", from_the_last)
        assert wrong_places(versions_of(spark, soups), soups)
