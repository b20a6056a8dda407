"""Marking copies and collisions, of thousands of random deliveries in one Spark job.

What is marked is said anew from what deliveries are: the first of several that landed is the one that counts,
and two contents at one place of a window are a collision. A clock that is set back, an epoch that begins with
a snapshot, and files whose names sort otherwise than they landed are among them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from pyspark.sql import Row, SparkSession

from omnisupport_ingest.cdc.dedupe import mark_copies
from omnisupport_ingest.cdc.envelope import RAW_TYPE, event_hash
from omnisupport_ingest.landing.names import chunk_batch_id, file_batch_id, stream_batch_id
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.cdc.kernels import key_text
from omnisupport_ingest_tests.oracle.histories import collided, soup
from omnisupport_ingest_tests.oracle.judging import Arrival, Clockwork
from omnisupport_ingest_tests.oracle.model import Event

CASES = 2000
START = datetime(2026, 11, 1, 9, tzinfo=UTC)


@dataclass(frozen=True)
class Landed:
    """A copy as it landed: the ``number``-th of its case, in ``batch``, as line ``row`` of a file or null."""

    case: int
    number: int
    event: Event
    batch: str
    row: int | None
    arrival: Arrival

    @property
    def window(self) -> str:
        """Of the case alone, so that cases do not meet."""
        return f"{self.case} {self.event.source_ts:%H}"

    @property
    def place(self) -> tuple[object, ...]:
        return self.window, self.event.at, self.event.identity

    @property
    def facts(self) -> tuple[object, ...]:
        """What a verdict depends on beside the event itself."""
        return self.arrival.watermark_before, self.arrival.newest_epoch_before, self.arrival.from_file


def drawn(case: int) -> list[Landed]:
    """The copies of one case in landing order, batch by batch."""
    rng = Random(f"marking {case}")
    events = collided(rng, soup(rng, withheld=False))
    events = [replace(event, identity=rng.choice((None, "a", "b"))) for event in events]
    events += [event for event in events for _ in range(rng.choice((0, 0, 1, 3)))]
    rng.shuffle(events)
    digests = rng.sample(range(1000), 1000)
    clockwork, now, found = Clockwork(), START, list[Landed]()
    from_file = rng.random() < 0.4
    while events:
        epoch, of_chunk = events[0].at.epoch, events[0].op in "rb"
        of_kind = [e for e in events if e.at.epoch == epoch and (e.op in "rb") == of_chunk]
        members = of_kind[: rng.randint(1, 4)]
        for event in members:
            events.remove(event)
        now += timedelta(minutes=rng.randint(-90, 120))
        arrival = clockwork.arrive(
            epoch,
            [event.source_ts for event in members],
            now,
            moves=from_file or not of_chunk,
            from_file=from_file,
            begins=True,
        )
        # Of a log where it goes on, of a snapshot when it began, of a file its content.
        batch = chunk_batch_id(epoch, f"{len(found):016x}", "tickets", 0, 1)
        if from_file:
            batch = file_batch_id(f"{digests.pop():064x}"[::-1])
        elif not of_chunk:
            batch = stream_batch_id(epoch, Lsn(len(found)))
        for row, event in enumerate(members, 1):
            number = len(found)
            found.append(Landed(case, number, event, batch, row if from_file else None, arrival))
    return found


def row_of(landed: Landed) -> dict[str, object]:
    event, arrival = landed.event, landed.arrival
    return dict.fromkeys(RAW_TYPE.names) | {
        "window": landed.window,
        **dict(zip(("epoch", "commit_lsn", "ordinal"), event.at, strict=True)),
        "op": event.op,
        "source_ts": event.source_ts,
        "lsn": landed.number,
        "source_schema": "public",
        "source_table": event.table,
        "key": key_text(event.key),
        "before": None if event.before is None else repr(sorted(event.before.items())),
        "after": repr(event.scope) if event.after is None and event.scope else _text(event),
        "unchanged": sorted(event.unchanged, key=hash) or None,
        "moved_from_key": key_text(event.moved_from),
        "identity": event.identity,
        "file_row": landed.row,
        "batch_id": landed.batch,
        "landed_at": arrival.landed_at,
        "watermark_before": arrival.watermark_before,
        "newest_epoch_before": arrival.newest_epoch_before,
    }


def _text(event: Event) -> str | None:
    return None if event.after is None else repr(sorted(event.after.items()))


@pytest.fixture(scope="module")
def cases() -> list[Landed]:
    return [landed for case in range(CASES) for landed in drawn(case)]


@pytest.fixture(scope="module")
def marked(spark: SparkSession, cases: list[Landed]) -> dict[tuple[int, int], Row]:
    """The marks of each copy, by case and number; they are handed to Spark in any order."""
    rows = [row_of(landed) for landed in Random(1).sample(cases, len(cases))]
    sent = [tuple(row[name] for name in RAW_TYPE.names) for row in rows]
    raw = spark.createDataFrame(sent, RAW_TYPE).withColumn("event_hash", event_hash())
    found = mark_copies(raw).select("window", "lsn", "copy", "collision").collect()
    return {(int(row["window"].split()[0]), row["lsn"]): row for row in found}


def test_every_copy_is_marked_once_by_content_and_the_first_that_landed_is_the_first(
    cases: list[Landed], marked: dict[tuple[int, int], Row]
) -> None:
    assert len(marked) == len(cases)
    contents: dict[object, list[Landed]] = defaultdict(list)
    for landed in cases:
        contents[landed.place, landed.event.content].append(landed)
    for copies in contents.values():
        marks = {each.number: marked[each.case, each.number]["copy"] for each in copies}
        assert sorted(marks.values()) == list(range(1, len(copies) + 1))
        first = next(each for each in copies if marks[each.number] == 1)
        # Of copies whose batches arrived in the same state any may be the first: all are judged alike.
        assert first.facts == copies[0].facts, (copies[0], first)


def test_what_shares_its_place_with_another_content_is_a_collision_and_nothing_else_is(
    cases: list[Landed], marked: dict[tuple[int, int], Row]
) -> None:
    contents: dict[object, set[object]] = defaultdict(set)
    for landed in cases:
        contents[landed.place].add(landed.event.content)
    collisions = {(each.case, each.number) for each in cases if len(contents[each.place]) > 1}
    assert {place for place, row in marked.items() if row["collision"]} == collisions


def test_the_cases_hold_what_they_are_meant_to(cases: list[Landed]) -> None:
    places: dict[object, list[Landed]] = defaultdict(list)
    for landed in cases:
        places[landed.place].append(landed)
    several = [copies for copies in places.values() if len(copies) > 1]
    assert sum(len({each.event.content for each in copies}) > 1 for copies in several) > CASES / 4
    assert sum(copies[0].arrival.landed_at > copies[-1].arrival.landed_at for copies in several) > CASES / 10
    assert sum(copies[0].batch > copies[-1].batch for copies in several) > CASES / 4
    assert sum(copies[0].facts != copies[-1].facts for copies in several) > CASES / 4
