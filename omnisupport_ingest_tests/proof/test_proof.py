"""Small homes, of a stream and of files, as ``make prove`` runs many with a hundred histories each."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.oracle.model import Event, Position
from omnisupport_ingest_tests.proof.history import lane
from omnisupport_ingest_tests.proof.run import SMALL_BATCHES, draw, prove
from omnisupport_ingest_tests.proof.tables import NO_VALUE, TICKETS, TWO_DIMENSIONS
from omnisupport_ingest_tests.proof.tally import Tally
from omnisupport_ingest_tests.proof.versions import versions

FILES, STREAM, SMALL = range(4108, 4120), range(1149, 1159), range(3053, 3059)
STEPS = (
    "stop between layers",
    "overlapping replays",
    "two writers",
    "other contracts",
    "another decision table",
    "run some windows",
)
_BROUGHT = (
    "late events",
    "key changes",
    "truncates",
    "boundaries of ranges",
    "exact texts",
    "keys that are NULL in part",
    "columns that are not there",
    "events of a third epoch",
    "rows purged",
    "windows folded",
)
"""What the quick story must have held; the long ones hold everything."""

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def plain(spark: SparkSession) -> Iterator[SparkSession]:
    """Plans are large and rows few: finding better plans on the way would take most of the time."""
    adaptive = spark.conf.get("spark.sql.adaptive.enabled")
    batches, few = SMALL_BATCHES
    before = spark.conf.get(batches)
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    spark.conf.set(batches, few)
    yield spark
    spark.conf.set("spark.sql.adaptive.enabled", str(adaptive))
    spark.conf.set(batches, str(before))


def a_stream(seeds: range, slots: int, steps: int, folder: Path, spark: SparkSession) -> Tally:
    """What the home of a stream has seen: nothing is replayed in it but what is late, so its windows are
    folded."""
    story = draw(seeds, slots, steps, late_steps=0, kinds=("run some windows",))
    return prove(story, folder, spark, say=lambda _: None)


def test_every_layer_is_what_the_oracle_comes_to(plain: SparkSession, tmp_path: Path) -> None:
    seen = a_stream(SMALL, 2, 0, tmp_path, plain)
    assert seen.comparisons >= 4
    for thing in _BROUGHT:
        assert seen.things[thing], thing


@pytest.mark.slow
def test_a_stream_and_files_agree_and_nothing_that_the_proof_is_about_never_happened(
    plain: SparkSession, tmp_path: Path
) -> None:
    story = draw(FILES, slots=3, steps=2, kinds=STEPS)
    seen = prove(story, tmp_path / "files", plain, say=lambda _: None)
    # Told once more in other batches.
    seen.add(a_stream(STREAM, 3, 1, tmp_path / "stream", plain))
    assert seen.never == []


def test_versions_hold_from_one_event_to_the_next_and_none_while_the_row_is_gone() -> None:
    def event(lsn: int, op: str, after: dict[str, str | None] | None = None) -> Event:
        at = NOON + timedelta(minutes=lsn)
        return Event(Position(1, lsn, 0), op, "tickets", ("1", "1"), at, after=after)

    told = [event(1, "c", {"status": "new"}), event(3, "u", {"note": "n"}), event(5, "d"), event(8, "u", {})]
    found = list(versions(told, TICKETS))
    assert [(each.opened_at.commit_lsn, each.closed_at and each.closed_at.commit_lsn) for each in found] == [
        (1, 3),
        (3, 5),
        (8, None),
    ]
    assert [each.values for each in found] == [
        (("status", "new"),),
        (("note", "n"), ("status", "new")),
        (),
    ]
    assert [(each.opened_by, each.closed_by) for each in found] == [("c", "u"), ("u", "d"), ("u", None)]


def test_a_lane_is_the_same_whenever_it_is_drawn() -> None:
    assert lane(7, epochs=2, sure_order=False) == lane(7, epochs=2, sure_order=False)


def test_the_histories_hold_what_they_are_meant_to() -> None:
    told = [each for seed in range(200) for each in lane(seed, epochs=3, sure_order=False)]
    events = [each.event for each in told]
    assert {event.op for event in events} == set("crudtbm")
    assert {event.at.epoch for event in events} == {1, 2, 3}
    assert any(each.unreadable for each in told)
    assert any(each.misplaced for each in told)
    assert any(event.identity for event in events)
    assert any(event.moved_from and event.unchanged for event in events)
    assert any(event.after and None in event.after.values() for event in events)
    assert any(event.key is None and event.op in "crud" for event in events)
    assert any(event.key and None in event.key for event in events)
    values = {text for event in events for text in (event.after or {}).values() if text is not None}
    assert {"NaN", "infinity", TWO_DIMENSIONS, NO_VALUE} <= values
    assert max(map(len, values)) > 4096
    assert {character for text in values for character in text} >= set("'\"\\\n\r\té漢🙂\u2028\x01")
    contents = {(event.at, event.identity, event.content) for event in events}
    assert len({(at, identity) for at, identity, _ in contents}) < len(contents)


def test_many_rows_live_again_without_what_their_life_before_knew() -> None:
    """What a fold that forgets where a life begins would leak; a home without it proves nothing of that."""
    leaks = 0
    for seed in range(60):
        told = [each.event for each in lane(seed, epochs=1, sure_order=True)]
        rows = {(event.table, event.key) for event in told if event.key is not None}
        for table, key in rows:
            own = sorted((e for e in told if (e.table, e.key) == (table, key)), key=lambda e: e.at)
            last = next((n for n in range(len(own) - 1, -1, -1) if own[n].op in "crd"), 0)
            leaks += bool(own[last].op == "d" and own[last + 1 :] and own[-1].unchanged)
    assert leaks > 60
