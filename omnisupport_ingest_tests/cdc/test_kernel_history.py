"""The history kernel equals the oracle in every version of random histories, however the events are divided.

The oracle folds the events at or below each position again (``proof/versions.py``). ``test_history`` and the
proof show that Spark gives the kernel what it gets here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.history_rows import TableEvent, history_groups
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest_tests.cdc import kernels, lanes
from omnisupport_ingest_tests.cdc.kernels import Cut, Table
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle import histories
from omnisupport_ingest_tests.oracle.histories import SHAPE
from omnisupport_ingest_tests.oracle.model import Event, Key, Position
from omnisupport_ingest_tests.proof.versions import Version, versions

TABLE = Table(SHAPE, ("id",), {"id": "text", **dict.fromkeys(SHAPE.columns, "text")})
IN_LANE = Table(SHAPE, ("lane", "id"), {"lane": "text", "id": "text", **dict.fromkeys(SHAPE.columns, "text")})
START = datetime(2026, 11, 1, tzinfo=UTC)

randoms = st.integers(0, (1 << 32) - 1)
cuts = st.builds(Cut, st.integers(1, 3), st.integers(1, 7), st.none() | st.integers(0, 99))


@pytest.mark.parametrize(
    ("withheld", "body", "doubtful"),
    [("", "new", False), ("c", None, False), ("d", "new", False), ("cd", None, True)],
)
@pytest.mark.parametrize("arrived", [1, -1])
def test_a_delete_stands_before_the_creation_of_its_position(
    withheld: str, body: str | None, doubtful: bool, arrived: int
) -> None:
    """A log without an order inside one LSN has both halves of a key change there."""
    at, then = Position(1, 5, 0), START + timedelta(seconds=5)
    events = [
        Event(Position(1, 3, 0), "c", SHAPE.name, ("1",), START, after={"body": "old"}),
        Event(at, "d", SHAPE.name, ("1",), then, identity="d", quarantined="d" in withheld),
        Event(
            at,
            "c",
            SHAPE.name,
            ("1",),
            then,
            None,
            {"body": "new"},
            identity="c",
            quarantined="c" in withheld,
        ),
    ]
    windows = {event.at[:2]: "w" for event in events}
    table = kernels.events_table(events[::arrived], TABLE, windows)
    rows = [row for batch in history_groups(table.to_batches(), TABLE.shape, ()) for row in batch.to_pylist()]
    first, last = sorted(rows, key=lambda row: row["_cdc_valid_from"])
    assert (first["body"], first["_cdc_valid_to"]) == ("old", then)
    assert (last["body"], last["_cdc_valid_to"]) == (body, None)
    assert (EXISTENCE in last["_cdc_unresolved"]) == doubtful


@settings(max_examples=examples(600))
@given(randoms, cuts)
def test_every_version_of_any_events_is_the_oracles(seed: int, cut: Cut) -> None:
    events = any_events(Random(seed))
    assert made(events, cut) == Counter(versions(events, SHAPE))


@settings(max_examples=examples(200))
@given(randoms, cuts)
def test_rows_at_the_position_of_a_truncate_or_snapshot_end_stand_above_it(seed: int, cut: Cut) -> None:
    """A log without an order inside one position has a truncate and what was inserted after it there."""
    rng = Random(seed)
    events = with_rows_at_ends(any_events(rng), rng)
    ends = {event.at for event in events if event.key is None}

    def unnamed(version: Version) -> Version:
        # The oracle does not say which of several events of one position opens or closes a version.
        opened_by = "" if version.opened_at in ends else version.opened_by
        closed_by = "" if version.closed_at in ends else version.closed_by
        return replace(version, opened_by=opened_by, closed_by=closed_by)

    assert Counter(map(unnamed, made(events, cut))) == Counter(map(unnamed, versions(events, SHAPE)))


@settings(max_examples=examples(150))
@given(randoms, cuts)
def test_every_version_of_what_a_database_sent_is_the_oracles(seed: int, cut: Cut) -> None:
    sent = [replace(event, read_at=None) for event in histories.simulate(Random(seed)).events]
    events = lanes.with_distinct_times(lanes.in_one_lane(sent))
    assert made(events, cut) == Counter(versions(events, SHAPE))


@settings(max_examples=examples(100))
@given(randoms, cuts)
def test_versions_of_a_key_follow_one_another_and_no_copy_adds_one(seed: int, cut: Cut) -> None:
    events = any_events(Random(seed))
    found = made(events, cut)
    assert made([*events, *events], cut) == found
    of_key: dict[Key, list[Version]] = {}
    for each in found:
        of_key.setdefault(each.key, []).append(each)
    for each in of_key.values():
        each.sort(key=lambda version: version.opened_at)
        for one, following in pairwise(each):
            assert one.closed_at is not None and one.opened_at < one.closed_at <= following.opened_at
    assert all(count == 1 for count in found.values())


def test_the_histories_hold_what_they_are_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        for each in made(any_events(Random(seed)), Cut()):
            seen.update((f"opened by {each.opened_by}", f"closed by {each.closed_by}"))
            seen["doubtful"] += each.doubtful
    opened = {f"opened by {by}" for by in ("c", "u", "r", "d", "t", "b", "moved")}
    closed = {f"closed by {by}" for by in ("c", "u", "r", "d", "t", "b", "moved", None)}
    assert {name for name, count in seen.items() if count > 5} >= opened | closed | {"doubtful"}


LONG, OTHER, *_ = SHAPE.columns


class TestNaming:
    """What opens and closes each version, one key at a time."""

    def versions(self, *events: Event) -> list[tuple[object, ...]]:
        found = made(lanes.in_one_lane(events), Cut())
        assert set(found.values()) == {1}
        in_order = sorted(found, key=lambda version: (version.opened_at, version.key))
        return [(each.key[1], each.opened_by, each.closed_by, dict(each.values)) for each in in_order]

    @pytest.mark.parametrize(("end", "op"), [("t", "c"), ("t", "u"), ("b", "r")])
    @pytest.mark.parametrize("withheld", [False, True])
    def test_a_truncate_or_snapshot_end_closes_what_is_below_its_position(
        self, end: str, op: str, withheld: bool
    ) -> None:
        events = [
            event(3, "c", "1", **{LONG: "old"}),
            replace(event(5, end, None), identity=end, after=None, quarantined=withheld),
            replace(event(5, op, "1", **{LONG: "new"}), identity="1"),
            replace(event(5, op, "2", **{LONG: "two"}), identity="2"),
        ]
        assert self.versions(*events) == [
            ("1", "c", end, {LONG: "old"}),
            ("1", op, None, {LONG: "new"}),
            ("2", op, None, {LONG: "two"}),
        ]

    def test_changes_of_one_transaction_are_versions_of_their_own(self) -> None:
        assert self.versions(
            event(10, "c", "1", **{LONG: "a"}),
            event(10, "u", "1", ordinal=2, **{LONG: "b"}),
            event(10, "d", "1", ordinal=4),
            event(10, "c", "1", ordinal=6, **{LONG: "c"}),
            event(20, "t", None),
        ) == [
            ("1", "c", "u", {LONG: "a"}),
            ("1", "u", "d", {LONG: "b"}),
            ("1", "c", "t", {LONG: "c"}),
        ]

    def test_an_unsent_column_comes_from_the_version_just_below_the_key_change_not_from_a_later_one(
        self,
    ) -> None:
        moved = replace(event(20, "c", "2", ordinal=1, **{OTHER: "x"}), moved_from=("1",))
        assert self.versions(
            event(10, "c", "1", **{LONG: "first"}),
            event(15, "u", "1", **{LONG: "second"}),
            event(20, "d", "1"),
            moved,
            event(25, "c", "1", **{LONG: "of another row"}),
            event(30, "u", "2", **{OTHER: "y"}),
        ) == [
            ("1", "c", "u", {LONG: "first"}),
            ("1", "u", "moved", {LONG: "second"}),
            ("2", "moved", "u", {LONG: "second", OTHER: "x"}),
            ("1", "c", None, {LONG: "of another row"}),
            ("2", "u", None, {LONG: "second", OTHER: "y"}),
        ]

    def test_a_key_change_onto_a_row_whose_delete_is_missing_closes_it_as_a_key_change(self) -> None:
        assert self.versions(
            event(10, "c", "1", **{LONG: "a"}),
            event(10, "c", "2", ordinal=2, **{LONG: "b"}),
            event(20, "d", "1"),
            replace(event(20, "c", "2", ordinal=1, **{LONG: "a", OTHER: "x"}), moved_from=("1",)),
        ) == [
            ("1", "c", "moved", {LONG: "a"}),
            ("2", "c", "moved", {LONG: "b"}),
            ("2", "moved", None, {LONG: "a", OTHER: "x"}),
        ]

    def test_a_quarantined_update_is_a_version_that_does_not_know_what_it_carried(self) -> None:
        withheld = replace(event(20, "u", "1", **{LONG: "b"}), quarantined=True)
        events = [
            event(10, "c", "1", **{LONG: "a", OTHER: "x"}),
            withheld,
            event(30, "u", "1", **{LONG: "c"}),
        ]
        assert self.versions(*events) == [
            ("1", "c", "u", {LONG: "a", OTHER: "x"}),
            ("1", "u", "u", {OTHER: "x"}),
            ("1", "u", None, {LONG: "c", OTHER: "x"}),
        ]
        released = replace(withheld, quarantined=False)
        assert self.versions(*events, released)[1] == ("1", "u", "u", {LONG: "b", OTHER: "x"})


def event(lsn: int, op: str, key: str | None, *, ordinal: int = 0, **values: str) -> Event:
    """An event that sends ``values`` alone."""
    return Event(
        Position(1, lsn, ordinal),
        op,
        SHAPE.name,
        None if key is None else (key,),
        START + timedelta(seconds=lsn),
        after=None if op in "dt" else dict(values),
        unchanged=frozenset(SHAPE.columns).difference(values) if op in "cu" else frozenset(),
    )


def any_events(rng: Random) -> list[Event]:
    """Draw events that no database would send, some in quarantine; none of these at the position of an
    accepted one."""
    events = lanes.with_distinct_times(lanes.in_one_lane(histories.soup(rng)))
    accepted = {event.at for event in events if not event.quarantined}
    return [event for event in events if not (event.quarantined and event.at in accepted)]


def with_rows_at_ends(events: list[Event], rng: Random) -> list[Event]:
    """Return ``events`` with events of rows at the positions of truncates and snapshot ends, some in
    quarantine, but not where the end is."""
    keys = sorted({event.key for event in events if event.key is not None})
    found = [event if event.key is not None else replace(event, identity=event.op) for event in events]
    for at, end in {event.at: event for event in events if event.key is None}.items():
        for key in rng.sample(keys, rng.randint(0, len(keys))):
            op = rng.choice("ccrud")
            values = {name: f"{op} {at}" for name in SHAPE.columns if rng.random() < 0.7}
            row = Event(
                at,
                op,
                SHAPE.name,
                key,
                end.source_ts,
                after=None if op == "d" else values,
                unchanged=frozenset() if op == "d" else frozenset(SHAPE.columns).difference(values),
                quarantined=not end.quarantined and rng.random() < 0.2,
                identity=f"{op} {key}",
            )
            found.append(row)
    rng.shuffle(found)
    return found


def made(events: Sequence[Event], cut: Cut) -> Counter[Version]:
    """Return the kernel's versions, with the columns that a key change did not send taken from the life
    before."""
    windows = {event.at[:2]: "w" for event in events}
    table = kernels.events_table(events, IN_LANE, windows)
    keyed = table.filter([key is not None for key in table["key"].to_pylist()])
    ends = whole_table(events)
    rows = [
        row
        for part in cut.parts(keyed, ("key",))
        for batch in history_groups(part, IN_LANE.shape, ends)
        for row in batch.to_pylist()
    ]
    lives = {(row["_cdc_key"], at(row["_cdc_ended_at"])): row for row in rows if row["_cdc_kind"] == ENDED}
    return Counter(version(row, lives) for row in rows if row["_cdc_kind"] == KEY)


def whole_table(events: Iterable[Event]) -> list[TableEvent]:
    """Return the truncates and snapshot ends, as ``history`` gives them to every worker."""
    listed = {event for event in map(hashable, events) if event.key is None}
    accepted = {event.at for event in listed if not event.quarantined}
    found = [
        TableEvent(
            *(tuple(event.at), event.op, event.quarantined, micros(event.source_ts), None, None),
            None if event.scope is None else KeyRange.parse(lanes.scope_text(event.scope)),
        )
        for event in listed
        if not (event.quarantined and event.at in accepted)
    ]
    return sorted(
        found, key=lambda end: (end.position, end.op != "t", end.key_range.text if end.key_range else "")
    )


def hashable(event: Event) -> Event:
    return event if event.key is not None else replace(event, before=None, after=None)


def version(row: dict[str, Any], lives: Mapping[tuple[str, Any], dict[str, Any]]) -> Version:
    row = dict(row)
    still_open, origin = set(row["_open"]), (row["_from_key"], at(row["_from_at"]))
    unresolved = set(row["_cdc_unresolved"])
    while still_open and origin in lives:
        life = lives[origin]
        for name in still_open - set(life["_cdc_unresolved"]):
            row[name] = life[name]
            unresolved.discard(name)
        still_open &= set(life["_open"])
        origin = life["_from_key"], at(life["_from_at"])
    opened_at = at(row["_cdc_valid_from_position"])
    assert opened_at is not None
    return Version(
        key=tuple(json.loads(row["_cdc_key"])),
        opened_at=opened_at,
        closed_at=at(row["_cdc_valid_to_position"]),
        opened=row["_cdc_valid_from"],
        closed=row["_cdc_valid_to"],
        opened_by=row["_cdc_opened_by"],
        closed_by=row["_cdc_closed_by"],
        deleted=False,
        doubtful=EXISTENCE in unresolved,
        values=tuple(sorted((name, row[name]) for name in SHAPE.columns if name not in unresolved)),
    )


def at(value: Mapping[str, int] | None) -> Position | None:
    return None if value is None else Position(value["epoch"], value["commit_lsn"], value["ordinal"])


def micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
