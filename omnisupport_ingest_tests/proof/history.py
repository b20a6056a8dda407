"""What the source of one home has to tell: a lane of keys per seed, all in the same tables.

A lane is drawn from its own seed, so it is the same whatever other lanes share its home. What ends a
whole table ends the rows of every lane; most of those events are left out, else no row would live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

from omnisupport_ingest_tests.oracle import histories
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape
from omnisupport_ingest_tests.proof.quality import refused
from omnisupport_ingest_tests.proof.tables import NO_VALUE, SHAPES, TYPES, UNKNOWN, spelled

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SPAN = timedelta(hours=5)

_KEPT = {"t": 0.07, "b": 0.02}
"""How many of the truncates and boundaries are told: each ends the rows of a hundred lanes."""

_LANES_PER_LSN = 10_000
_EPOCH_APART = 20_000
_TABLE_APART = 200
_READS_APART = 100_000_000


@dataclass(frozen=True)
class Told:
    """An event, and what is wrong with it, if anything.

    ``unreadable``: the text that stands where its row image should. ``misplaced``: the file that
    brings it contradicts its time.
    """

    event: Event
    unreadable: str | None = None
    misplaced: bool = False


def tx_id_of(event: Event) -> int:
    """The transaction that an event is of."""
    return event.at.commit_lsn % 1_000_000


def lane(seed: int, *, epochs: int, sure_order: bool) -> list[Told]:
    """The events of one lane, in log order. ``sure_order``: the source says in what order things were."""
    rng, later = Random(f"lane {seed}"), Random(f"columns added again {seed}")
    of_rules = Random(f"rules that reject a batch {seed}")
    events: list[Event] = []
    for number, shape in enumerate(SHAPES):
        drawn = _database(rng, shape) if seed % 2 else _soup(rng, shape)
        drawn += _revived(rng, shape)
        drawn += _hot(rng, shape) if rng.random() < 0.1 else []
        drawn = [_moved_apart(event, number) for event in drawn]
        drawn = _reshaped(rng, drawn) if drawn and rng.random() < 0.25 else drawn
        drawn = _added_again(later, drawn) if drawn and later.random() < 0.1 else drawn
        events += refused(of_rules, drawn) if drawn and of_rules.random() < 0.2 else drawn
    if rng.random() < 0.2:
        events = [_burst(event) for event in events]
    if epochs == 1:
        events = [_in_first_epoch(event) for event in events]
    if epochs > 2 and (second := [event.at for event in events if event.at.epoch == 2]):
        third = rng.choice(second)[:2]
        events = [_in_third_epoch(event) if event.at[:2] >= third else event for event in events]
    events += _without_contract(rng, events)
    if rng.random() < 0.3:
        events += _at_one_place(rng, events)
    events = [_in_lane(event, seed) for event in events]
    events = _timed(rng, sorted(events, key=lambda event: event.at))
    whole_table = [each for each in events if each.op in "tb" and each.scope is None]
    told = [_spoilt(rng, each, sure_order) for each in events if each not in whole_table]
    ends = [Told(each) for each in whole_table if rng.random() < _KEPT[each.op]]
    return told + _collisions(rng, told) + ends


def _database(rng: Random, shape: TableShape) -> list[Event]:
    history = histories.simulate(rng, shape=shape)
    return [replace(event, read_at=None) for event in history.events]


def _soup(rng: Random, shape: TableShape) -> list[Event]:
    """Without withheld events of its own: here judging makes them."""
    drawn = histories.soup(rng, shape=shape, withheld=False)
    moved = [replace(each, at=each.at._replace(commit_lsn=992 + 8 * each.at.commit_lsn)) for each in drawn]
    return list({(event.at, event.content): event for event in moved}.values())


def _revived(rng: Random, shape: TableShape) -> list[Event]:
    """Rows that were deleted and are alive again by an update, as if their second creation never came.

    What the update did not send must not be taken from the life before. Drawn by chance alone this is
    too rare, and mostly overwritten by what follows.
    """
    events = []
    for number in range(rng.randint(0, 3)):
        key, value = (str(51 + number),), 1000 + 10 * number
        created, deleted, updated = sorted(rng.sample(range(1000, 1040), 3))
        sent = rng.sample(shape.columns, rng.randint(1, len(shape.columns) - 1))
        event = Event(Position(1, created, 150 + 2 * number), "c", shape.name, key, START)
        whole: Image = {column: f"{column} {value}" for column in shape.columns}
        part: Image = {column: f"{column} {value + 1}" for column in sent}
        unsent = frozenset(shape.columns) - frozenset(sent)
        events += [
            replace(event, after=whole),
            replace(event, at=event.at._replace(commit_lsn=deleted), op="d"),
            replace(event, at=event.at._replace(commit_lsn=updated), op="u", after=part, unchanged=unsent),
        ]
    return events


def _moved_apart(event: Event, table: int) -> Event:
    """Room for every table in one transaction, and values that some contract does not allow."""
    ordinal = event.at.ordinal
    ordinal += table * _TABLE_APART if ordinal >= 0 else -table * _READS_APART
    return replace(
        event,
        at=event.at._replace(ordinal=ordinal),
        before=_values(event.before),
        after=_values(event.after),
    )


def _values(image: Image | None) -> Image | None:
    """The same value always becomes the same other one, as it would in a row that is not changed."""
    return (
        None
        if image is None
        else {name: None if text is None else spelled(name, text) for name, text in image.items()}
    )


def _burst(event: Event) -> Event:
    """Four transactions as one, so that many rows share an LSN."""
    lsn, number = divmod(event.at.commit_lsn, 4)
    ordinal = event.at.ordinal
    ordinal += number * 2 * _TABLE_APART if ordinal >= 0 else 0
    # Among the other lanes' transactions, so that a truncate of theirs has some of these on either side.
    return replace(event, at=event.at._replace(commit_lsn=lsn + 750, ordinal=ordinal))


def _in_first_epoch(event: Event) -> Event:
    at = event.at
    return replace(event, at=Position(1, at.commit_lsn + (at.epoch - 1) * _EPOCH_APART, at.ordinal))


def _in_third_epoch(event: Event) -> Event:
    return replace(event, at=event.at._replace(epoch=3))


def _hot(rng: Random, shape: TableShape) -> list[Event]:
    """A row that is changed all the time, a column at once."""
    events = []
    for number in range(60):
        column = rng.choice(shape.columns)
        image: Image = {column: f"{column} {2000 + number}"}
        unsent = frozenset(shape.columns) - {column}
        at = Position(1, 1000 + number // 2, 170 + 2 * (number % 2))
        events.append(Event(at, "u", shape.name, ("61",), START, after=image, unchanged=unsent))
    return events


def _reshaped(rng: Random, events: list[Event]) -> list[Event]:
    """A column is added, dropped, renamed or given another type at some event of the table."""
    since = rng.choice(events).at
    column = rng.choice(("note", "body", *TYPES))
    kind = rng.choice(("added", "dropped", "renamed", "retyped"))

    def image(given: Image | None) -> Image | None:
        if given is None or column not in given:
            return given
        rest = {name: text for name, text in given.items() if name != column}
        if kind == "renamed":
            return {**rest, f"{column}_2": given[column]}
        if kind == "retyped" and column in TYPES:
            return {**rest, column: None if given[column] is None else NO_VALUE}
        return given if kind == "retyped" else rest

    def unsent(names: frozenset[str]) -> frozenset[str]:
        return names if kind == "retyped" else names - {column}

    return [
        replace(
            event, before=image(event.before), after=image(event.after), unchanged=unsent(event.unchanged)
        )
        if (event.at < since) == (kind == "added")
        else event
        for event in events
    ]


def _added_again(rng: Random, events: list[Event]) -> list[Event]:
    """A column is dropped at some event of the table, and added again under its name at a later one."""
    dropped, added = sorted(rng.choice(events).at for _ in range(2))
    column = rng.choice(("note", "body", *TYPES))

    def image(given: Image | None) -> Image | None:
        return given and {name: text for name, text in given.items() if name != column}

    return [
        replace(
            event,
            before=image(event.before),
            after=image(event.after),
            unchanged=event.unchanged - {column},
        )
        if dropped <= event.at < added
        else event
        for event in events
    ]


def _without_contract(rng: Random, events: list[Event]) -> list[Event]:
    """Rows of a table that no contract names, and logical messages."""
    some = rng.sample(events, min(2, len(events)))
    rows = [
        replace(
            each,
            at=each.at._replace(ordinal=10_000 + number),
            op="c",
            table=UNKNOWN,
            key=("1",),
            before=None,
            after={"text": f"draft {number}"},
            unchanged=frozenset(),
            moved_from=None,
            scope=None,
        )
        for number, each in enumerate(some)
    ]
    return rows + [
        replace(each, at=each.at._replace(ordinal=11_000), op="m", key=None, after=None) for each in rows[:1]
    ]


def _at_one_place(rng: Random, events: list[Event]) -> list[Event]:
    """Rows that a copy brought: one position for all of them, as its source does not tell them apart."""
    shape = SHAPES[0]
    at = rng.choice(events).at._replace(ordinal=20_000)
    return [
        Event(
            at,
            "c",
            shape.name,
            (str(number),),
            START,
            after={column: spelled(column, f"copied {number}") for column in shape.columns},
            identity=f"row {number}",
        )
        for number in range(101, 104)
    ]


def _in_lane(event: Event, seed: int) -> Event:
    def key_of(key: Key | None) -> Key | None:
        return None if key is None else (str(seed), *key)

    at = event.at._replace(commit_lsn=event.at.commit_lsn * _LANES_PER_LSN + seed % _LANES_PER_LSN)
    scope = None if event.scope is None else ((str(seed), *event.scope[0]), (str(seed), *event.scope[1]))
    return replace(event, at=at, key=key_of(event.key), moved_from=key_of(event.moved_from), scope=scope)


def _timed(rng: Random, events: list[Event]) -> list[Event]:
    """Commit times to the minute, so that some are equal; now and then one runs against the log.

    Snapshot rows of one read share a time as a transaction's changes do.
    """
    places = sorted({event.at[:2] for event in events})
    times = {}
    for number, place in enumerate(places):
        apart = rng.choice((0, 0, 0, 1, -1, 5, -5, rng.randint(-50, 50)))
        minutes = number * SPAN / timedelta(minutes=1) / len(places) + apart
        times[place] = START + timedelta(minutes=int(minutes))
    return [replace(event, source_ts=times[event.at[:2]]) for event in events]


def _spoilt(rng: Random, event: Event, sure_order: bool) -> Told:
    chance = rng.random()
    if chance < 0.01:
        return Told(replace(event, source_ts=event.source_ts + rng.choice((-1, 1)) * timedelta(days=30)))
    if chance < 0.025 and event.op in "cur":
        return Told(
            replace(event, after=None, unchanged=frozenset(), before=None), unreadable='{"status": "cut o'
        )
    if chance < 0.03 and event.op in "crud":
        assert event.key is not None
        key = None if chance < 0.0275 else (event.key[0], None)
        return Told(replace(event, key=key, moved_from=None))
    return Told(event, misplaced=not sure_order and chance > 0.97)


def _collisions(rng: Random, told: Iterable[Told]) -> list[Told]:
    """Events with the position of another one and other content."""
    found = []
    for each in told:
        event = each.event
        if rng.random() > 0.03 or event.op == "m" or event.table == UNKNOWN or event.identity is not None:
            continue
        others = [replace(event, key=(event.key[0], "77"), moved_from=None)] if event.key else []
        if event.scope is not None:
            others.append(replace(event, scope=(event.scope[0], event.scope[0])))
        if event.op in "cur":
            others.append(replace(event, op="d", after=None, unchanged=frozenset(), moved_from=None))
        if event.after:
            column = sorted(event.after, key=lambda name: (name in TYPES, name))[0]
            value = spelled(column, "7") if column in TYPES else f"collided {event.at.ordinal}"
            others += [replace(event, after={**event.after, column: value})] * 3
        if others:
            found.append(Told(rng.choice(others)))
    return found
