"""Rows that leave the net changes by ``find_superseded`` are missed by no fold, whatever comes after.

A history lands in stages. Between them windows are sealed, sealed windows lose their superseded rows, events
in living windows are released or withheld, and late events come for sealed windows. At each stage the fold of
what is left is, to the last field, the fold of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import superseded
from omnisupport_ingest.cdc.event_fold import ENDED
from omnisupport_ingest.cdc.superseded import ASKED, SUPERSEDED, find_superseded, taken_away_in
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import (
    EXAMPLES,
    TABLE,
    assert_part,
    drawn,
    in_windows,
    kernel_states,
    oracle_states,
    typed,
)
from omnisupport_ingest_tests.cdc.test_kernel_update import Held
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.histories import KEYS, SHAPE
from omnisupport_ingest_tests.oracle.model import Event, Position

STAGES = 3

randoms = st.integers(0, (1 << 32) - 1).map(Random)


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"threads": 1})


def left(
    rows: Mapping[str, pa.Table], sealed: set[str], above: Mapping[int, Position]
) -> dict[str, pa.Table]:
    """``rows`` by window without what is superseded in ``sealed`` windows."""
    mine = [each.select(["window", *ASKED]) for window, each in rows.items() if window in sealed]
    if not mine:
        return dict(rows)
    every = pa.concat_tables(each.select(["_cdc_kind", "_cdc_key"]) for each in rows.values())
    connection = _connection()
    connection.register("net_rows", pa.concat_tables(mine))
    connection.register("every_row", every)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE taken_away AS {taken_away_in('every_row')}")
    find_superseded(connection, {epoch: tuple(at) for epoch, at in above.items()})
    gone = connection.execute(f"SELECT * FROM {SUPERSEDED}").fetchall()
    found = dict(rows)
    for window in {window for window, _ in gone}:
        keys = pa.array([key for each, key in gone if each == window], pa.string())
        held = rows[window]
        found[window] = held.filter(pc.invert(pc.fill_null(pc.is_in(held["_cdc_key"], keys), False)))
    return found


def history(rng: Random, *, moving: bool) -> list[Event]:
    """Events of which many supersede others: two histories, one above the other in the log."""
    withheld = rng.random() < 0.6
    below, above = (drawn(rng, moving=moving, withheld=withheld) for _ in range(2))
    above = [
        replace(
            event,
            at=event.at._replace(commit_lsn=event.at.commit_lsn + 6),
            source_ts=event.source_ts + timedelta(minutes=1),
        )
        for event in above
    ]
    return one_content(fuller(rng, [*below, *above]))


def windows_of(rng: Random, events: list[Event]) -> dict[tuple[int, int], str]:
    """Windows in log order, as servers fill them, with some commits out of place; or any at all."""
    if rng.random() < 0.3:
        return in_windows(rng, events, 4)
    places = sorted({event.at[:2] for event in events})
    found = {at: f"w{4 * number // len(places)}" for number, at in enumerate(places)}
    return {at: f"w{rng.randrange(4)}" if rng.random() < 0.1 else window for at, window in found.items()}


def fuller(rng: Random, events: list[Event]) -> list[Event]:
    """Let most updates and creations carry every column, as those of a database do; few key changes do."""
    whole = [rng.random() < (0.85 if event.moved_from is None else 0.3) for event in events]
    bare = (replace(event, key=None, moved_from=None, before=None) for event in events)
    images = typed([replace(e, after=dict.fromkeys(SHAPE.columns, f"v {n}")) for n, e in enumerate(bare)])
    return [
        replace(event, after=image.after, before=None, unchanged=frozenset())
        if event.op in "cur" and full and event.identity is None
        else event
        for event, image, full in zip(events, images, whole, strict=True)
    ]


def one_content(events: list[Event]) -> list[Event]:
    """Copies of one event are alike, accepted or not."""
    first: dict[object, Event] = {}
    return [
        replace(first.setdefault((e.at, e.identity, e.op, e.key), e), quarantined=e.quarantined)
        for e in events
    ]


def stage_of(rng: Random, events: list[Event]) -> list[int]:
    """When each event lands: an epoch in log order; snapshot rows and ends whenever they are read."""
    cuts: dict[int, list[Position]] = {}
    for epoch in {event.at.epoch for event in events}:
        places = sorted({e.at[:2] for e in events if e.at.epoch == epoch})
        cuts[epoch] = sorted(rng.choice([*places, (epoch, 99)]) for _ in range(STAGES - 1))
    drawn_stage: dict[Position, int] = {}
    return [
        drawn_stage.setdefault(event.at, rng.randrange(STAGES))
        if event.op in "rb"
        else sum(event.at[:2] >= cut for cut in cuts[event.at.epoch])
        for event in events
    ]


class Lake:
    """The net changes of a table by window, once whole and once without what is superseded."""

    def __init__(self, rng: Random, events: list[Event], windows: Mapping[tuple[int, int], str]) -> None:
        self.rng, self.windows = rng, windows
        self.stages = stage_of(rng, events)
        self.coming = events
        self.landed: list[Event] = []
        self.sealed: set[str] = set()
        self.whole: dict[str, pa.Table] = {}
        self.thin: dict[str, pa.Table] = {}
        self.removed = 0

    def window(self, event: Event) -> str:
        return self.windows[event.at[:2]]

    def land(self, stage: int) -> None:
        """Take in the events of ``stage``; sealed windows withhold theirs, and are folded again from all."""
        rng = self.rng
        news = [e for e, lands in zip(self.coming, self.stages, strict=True) if lands == stage]
        news = [replace(e, quarantined=e.quarantined or self.window(e) in self.sealed) for e in news]
        # A person releases what is withheld in a living window, or another contract withholds what was not.
        self.landed = [
            replace(e, quarantined=not e.quarantined)
            if self.window(e) not in self.sealed and rng.random() < 0.1
            else e
            for e in self.landed
        ]
        self.landed += news
        touched = {self.window(e) for e in news}
        for window in {self.window(e) for e in self.landed}:
            if window not in self.sealed or window in touched:
                of_window = [e for e in self.landed if self.window(e) == window]
                rows = kernels.fold(
                    kernels.events_table(of_window, TABLE, self.windows), TABLE, Cut(few=1000)
                )
                self.whole[window] = self.thin[window] = rows

    def seal(self) -> None:
        """Seal some more windows, and let superseded rows leave all that are sealed."""
        if not self.whole:
            return
        oldest = sorted(self.whole)[: self.rng.randint(1, 3)]
        self.sealed |= {*oldest} if self.rng.random() < 0.7 else {*self.rng.sample([*self.whole], 1)}
        above: dict[int, Position] = {}
        for event in self.landed:
            if self.window(event) not in self.sealed:
                above[event.at.epoch] = min(event.at, above.get(event.at.epoch, event.at))
        before = sum(rows.num_rows for rows in self.thin.values())
        self.thin = left(self.thin, self.sealed, above)
        self.removed += before - sum(rows.num_rows for rows in self.thin.values())


def current(rows: Mapping[str, pa.Table]) -> dict[str, dict[str, object]]:
    return shown(kernels.current(pa.concat_tables(rows.values()), TABLE))


def shown(rows: kernels.Rows) -> dict[str, dict[str, object]]:
    """The current state by key to the last field, but what is open, which nothing shows."""
    hidden = ("_open", "_from_key", "_from_at")
    return {row["_cdc_key"]: {k: v for k, v in row.items() if k not in hidden} for row in rows}


def told(rng: Random, *, moving: bool) -> Lake:
    events = history(rng, moving=moving)
    lake = Lake(rng, events, windows_of(rng, events))
    for stage in range(STAGES):
        lake.land(stage)
        if lake.whole:
            found = kernels.current(pa.concat_tables(lake.thin.values()), TABLE)
            assert shown(found) == current(lake.whole)
            assert_part(kernel_states(found, lake.landed), oracle_states(lake.landed), lake.landed)
        lake.seal()
    return lake


@settings(max_examples=examples(2 * EXAMPLES))
@given(randoms, st.booleans())
def test_no_fold_misses_a_row_that_was_superseded(rng: Random, moving: bool) -> None:
    told(rng, moving=moving)


@pytest.mark.full
@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.booleans())
def test_a_dimension_goes_on_in_place_where_its_net_changes_lost_rows(rng: Random, moving: bool) -> None:
    """What it cannot merge it folds from what is left."""
    events = history(rng, moving=moving)
    lake = Lake(rng, events, windows_of(rng, events))
    lake.land(0)
    lake.seal()
    held = Held(rng.choice((0, 1000)))
    if lake.whole:
        held.take(pa.concat_tables(lake.whole.values()))
        held.parts = [pa.concat_tables(lake.thin.values())]
    # What lands next is of windows that are not sealed, as a late event has its window folded again.
    more = [
        e for e, stage in zip(events, lake.stages, strict=True) if stage and lake.window(e) not in lake.sealed
    ]
    if not more:
        return
    part = kernels.fold(kernels.events_table(more, TABLE, lake.windows), TABLE)
    held.take(part)
    due = current({**lake.whole, "more": part})
    found = {row["_cdc_key"]: row for row in held.rows.to_pylist(maps_as_pydicts="strict")}
    assert found.keys() == due.keys()
    for key, row in found.items():
        for name in (*TABLE.types, "_cdc_op", "_cdc_source_ts", "_cdc_updated_at"):
            assert row[name] == due[key][name]
        assert sorted(row["_cdc_unresolved"] or ()) == sorted(due[key]["_cdc_unresolved"] or ())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("second", "moved"),
    [(Position(1, 5, 0), Position(1, 3, 0)), (Position(2, 5, 0), Position(1, 9, 0))],
    ids=["released", "older epoch"],
)
def test_a_key_change_that_may_come_between_two_rows_keeps_the_lower_one(
    second: Position, moved: Position
) -> None:
    """It waits for a person in a window that is not sealed, or an older epoch lands it late."""
    key, other = KEYS[0], KEYS[1]
    first, start = Position(1, 1, 0), datetime(2026, 11, 1, tzinfo=UTC)
    images = (dict.fromkeys(SHAPE.columns, f"v {number}") for number in (1, 2))
    made = [
        Event(at, "c", SHAPE.name, key, start, after=image)
        for at, image in zip((first, second), images, strict=True)
    ]
    left_key = Event(moved, "d", SHAPE.name, key, start)
    partial = Event(
        moved._replace(ordinal=1),
        "c",
        SHAPE.name,
        other,
        start,
        after={"status": "v 3"},
        unchanged=frozenset(SHAPE.columns) - {"status"},
        moved_from=key,
    )
    *made, left_key, partial = typed([*made, left_key, partial])
    windows = {first[:2]: "w0", second[:2]: "w1", moved[:2]: "w2"}
    rows = {
        windows[each.at[:2]]: kernels.fold(kernels.events_table([each], TABLE, windows), TABLE)
        for each in made
    }
    late = kernels.fold(kernels.events_table([left_key, partial], TABLE, windows), TABLE)
    thin = left(rows, {"w0", "w1"}, {1: moved} if second.epoch == 1 else {})
    assert thin["w0"].num_rows == 1
    assert current({**thin, "w2": late}) == current({**rows, "w2": late})
    assert not current({**thin, "w2": late})[kernels.key_text(partial.key) or ""]["_cdc_unresolved"]
    if second.epoch == 1:
        assert left(rows, {"w0", "w1"}, {})["w0"].num_rows == 0


@pytest.mark.full
def test_rows_do_leave_and_every_situation_comes_up() -> None:
    lakes = [told(Random(seed), moving=seed % 2 == 0) for seed in range(90)]
    assert sum(lake.removed for lake in lakes) > 30
    kinds = [kind for lake in lakes for rows in lake.thin.values() for kind in rows["_cdc_kind"].to_pylist()]
    assert kinds.count(ENDED) > 10


@pytest.mark.full
@pytest.mark.parametrize(
    "condition",
    [
        "AND coalesce(len(rows._cdc_unresolved), 0) = 0",
        "AND held.key NOT IN (SELECT key FROM taken_away WHERE key IS NOT NULL)",
        "WHERE held.last < complete.first\n    AND",
    ],
)
def test_without_a_condition_of_the_rule_a_fold_misses_a_row(
    monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    rule = superseded._RULE.replace(condition, "WHERE" if condition.startswith("WHERE") else "")
    assert rule != superseded._RULE
    monkeypatch.setattr(superseded, "_RULE", rule)
    with pytest.raises(AssertionError):
        for seed in range(2000):
            told(Random(seed), moving=seed % 2 == 0)
