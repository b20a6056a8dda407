"""Capture is killed at every failpoint between the source and landing; PostgreSQL is killed with it.

Each chain goes through the failpoints in the order in which a start passes them, and dies at each, once or
three times in a row. A start that finds its effect done does not do it again, so what a first start
does once is repeated by what repeats it: another contract, or another epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest_tests.recovery.crash import CrashDesk, Point, died, finished
from omnisupport_ingest_tests.recovery.desk import kill_server
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

NEW_EPOCH = ("--new-epoch", "crash")

MOMENTS = ("before", "after")
TIMES = (1, 3)


@dataclass(frozen=True)
class Step:
    """A failpoint that the chain dies at. ``of``: which of its passes; ``again``: how capture is called
    to pass the point again after a death behind it."""

    failpoint: str
    of: str = ""
    again: Sequence[str] = ()


ROWS, BOUNDARY, STREAM = "-r-", "-boundary", "-s-"

FIRST_START = (
    Step("source.publication"),
    Step("source.slot_intent"),
    Step("source.slot"),
    Step("landing.epoch", again=NEW_EPOCH),
    Step("landing.snapshot_plan"),
    Step("landing.data", ROWS),
    Step("landing.manifest", ROWS),
    Step("landing.data", BOUNDARY),
    Step("landing.manifest", BOUNDARY, again=NEW_EPOCH),
    Step("landing.data", STREAM),
    Step("landing.manifest", STREAM),
    Step("source.confirm", "forward"),
)

REPAIR = tuple(
    Step(name)
    for name in (
        "source.slot_drop",
        "source.slot_intent",
        "source.slot",
        "landing.epoch",
        "source.slot_intent_clear",
    )
)

COVERED = {step.failpoint for step in (*FIRST_START, *REPAIR)} | {"landing.clear"}

MORE_TABLES = ("ticket_comments", "agents")

crash = pytest.mark.crash


@crash
@pytest.mark.parametrize(("moment", "times"), itertools.product(MOMENTS, TIMES))
def test_first_start_killed_at_every_gate_ends_as_the_source(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk = crash_desk
    for step in FIRST_START:
        point = Point(step.failpoint, moment, step.of)
        for attempt in range(times):
            desk.change()
            if attempt and point == Point("source.publication", "after"):
                desk.contract(MORE_TABLES[attempt - 1])
            repeats = attempt > 0 and moment == "after"
            died(desk.capture(*(step.again if repeats else ()), at=point), point)
    desk.ends_well()
    assert len(desk.died) == len(FIRST_START) * times


@crash
@pytest.mark.parametrize(("moment", "times"), itertools.product(MOMENTS, TIMES))
def test_repair_by_a_new_epoch_killed_at_every_gate_is_made_by_the_same_command(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk = crash_desk
    desk.change()
    finished(desk.capture())
    for step in REPAIR:
        point = Point(step.failpoint, moment)
        for _ in range(times):
            desk.change()
            died(desk.capture(*NEW_EPOCH, at=point), point)
    desk.change()
    finished(desk.capture(*NEW_EPOCH))
    numbers = [epoch.number for epoch in desk.source.store.epochs()]
    assert numbers == list(range(1, len(numbers) + 1))
    # One more than the deaths that had recorded theirs: `source.slot_intent_clear` comes after that.
    recorded = times if moment == "before" else 2 * times
    assert len(numbers) == 2 + recorded
    desk.ends_well()


@crash
@pytest.mark.parametrize(("moment", "times"), itertools.product(MOMENTS, TIMES))
def test_start_killed_while_it_clears_up_after_a_dead_one_ends_as_the_source(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk = crash_desk
    finished(desk.capture())
    left, clears = Point("landing.data", "after", STREAM), Point("landing.clear", moment)
    for attempt in range(times):
        if attempt == 0 or moment == "after":
            desk.change()
            died(desk.capture(at=left), left)
        died(desk.capture(at=clears), clears)
    desk.ends_well()


LANDED_NOT_CONFIRMED = (
    Point("landing.data", "before", STREAM),
    Point("landing.data", "after", STREAM),
    Point("landing.manifest", "after", STREAM),
    Point("source.confirm", "before", "forward"),
    Point("source.confirm", "after", "forward"),
)


@crash
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("point", LANDED_NOT_CONFIRMED, ids=str)
def test_postgresql_killed_with_capture_sends_again_what_has_landed_and_it_lands_once(
    crash_desk: CrashDesk, postgres: EmbeddedPostgres, point: Point, times: int
) -> None:
    desk = crash_desk
    source = desk.source
    finished(desk.capture())
    try:
        for _ in range(times):
            went_back = False
            # The server writes a slot down now and then: mostly it forgets the last confirmations.
            for _ in range(5):
                desk.change()
                finished(desk.capture())
                confirmed = source.confirmed()
                desk.change()
                died(desk.capture(at=point), point)
                kill_server(postgres)
                postgres.start()
                # It may forget one of WAL without an event alone.
                now = source.confirmed()
                went_back = now < confirmed and landed_above(source, now) > 0
                if went_back:
                    break
            assert went_back, "the server never forgot that events were confirmed"
    finally:
        postgres.start()
    before = positions(source)
    desk.ends_well()
    after = positions(source)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)


def landed_above(source: SourceUnderTest, confirmed: Lsn) -> int:
    """How many landed events the server holds for unconfirmed, so that it sends them again."""
    return sum(event.commit_lsn >= confirmed.value for event in source.changes())


def positions(source: SourceUnderTest) -> list[tuple[int, int, int]]:
    return [(event.epoch, event.commit_lsn, event.ordinal) for event in source.changes()]
