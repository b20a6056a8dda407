"""Random source histories, from a little database that logs what it does as PostgreSQL would.

A history is drawn from a ``random.Random``. Hypothesis drives one (and shrinks what fails); a
plain seed drives one too, so that many histories can be drawn for a single Spark job and any of
them drawn again alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

from hypothesis import strategies as st

from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape

SHAPE = TableShape("tickets", ("status", "note", "body"))
"""``note`` is often NULL. ``body`` may be long: then an update that leaves it alone does not send
it (unchanged TOAST)."""

KEYS: tuple[Key, ...] = (("1",), ("2",), ("3",), ("4",))
"""Few, so that keys are taken again and again."""

_SPARE: Key = ("0",)
_START = datetime(2026, 11, 1, 9, tzinfo=UTC)
_FIRST_LSN = 1000


@dataclass(frozen=True)
class History:
    """What a source sent, in an order it may land in, and the rows it holds in the end.

    ``exact``: no row can be unresolved, as every snapshot was one read. Where a snapshot took
    several reads, a row may have moved from one that was still to come to one that was done;
    ``read_again`` are snapshot rows of the end, with which such a row is repaired.
    """

    events: list[Event]
    final: dict[Key, Image]
    exact: bool
    read_again: list[Event]


class Source:
    """A table with its log: every change is kept as the events it would send."""

    def __init__(self, rng: Random, shape: TableShape, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.rows: dict[Key, Image] = {}
        self.epoch = 1
        self.lsn = _FIRST_LSN
        self.events: list[Event] = []
        self._rng = rng
        self._shape = shape
        self._sends_before = rng.random() < 0.3  # REPLICA IDENTITY FULL
        self._last_value = 0
        self._last_read = -1_000_000
        self._index = 0  # of the next change in its transaction
        self._commit_ts = _START

    def transaction(self, *, logged: bool = True) -> None:
        """Some statements; a transaction that is rolled back leaves no trace."""
        self.lsn += self._rng.randint(1, 3)
        self._index = 0
        rows_before, changes = self.rows, list[Event]()
        # Commit times are taken before the commit record is written: close ones change places.
        self._commit_ts = _START + timedelta(minutes=self.lsn - _FIRST_LSN + self._rng.randint(-4, 4))
        for _ in range(self._rng.randint(1, 4)):
            for change in self._statement():
                changes += change
                self._index += 1
        if self._rng.random() < 0.15:
            self.rows = rows_before
        elif logged:
            self.events += changes

    def read(self, keys: tuple[Key, ...], low: int) -> Iterator[Event]:
        """A chunk of a snapshot: the rows of ``keys`` as they are now, placed at ``low``."""
        for key in keys:
            if key in self.rows:
                yield self._snapshot_event("r", low, self.reserve(), key)

    def boundary(self, low: int, ordinal: int, scope: tuple[Key, Key] | None = None) -> Event:
        return replace(self._snapshot_event("b", low, ordinal, None), scope=scope)

    def reserve(self) -> int:
        """The next ordinal for snapshots; the counter only grows."""
        self._last_read += 1
        return self._last_read

    def _snapshot_event(self, op: str, low: int, ordinal: int, key: Key | None) -> Event:
        return Event(
            at=Position(self.epoch, low, ordinal),
            op=op,
            table=self._shape.name,
            key=key,
            source_ts=_START + timedelta(minutes=low - _FIRST_LSN),
            after=None if key is None else dict(self.rows[key]),
            read_at=None if key is None else self.lsn + 1,
        )

    def _statement(self) -> Iterator[list[Event]]:
        """Change the rows; per change (or truncated relation) the events it sends."""
        taken = sorted(self.rows)
        free = [key for key in self.keys if key not in self.rows]
        kinds = ["insert"] * 8 * bool(free) + ["update"] * 8 * bool(taken) + ["delete"] * 3 * bool(taken)
        kinds += ["move"] * 6 * bool(free and taken) + ["swap"] * 3 * (len(taken) > 1)
        kinds += ["truncate"] * (self._rng.random() < len(KEYS) / len(self.keys))
        match self._rng.choice(kinds):
            case "insert":
                yield [self._insert(self._rng.choice(free))]
            case "update":
                yield [self._update(self._rng.choice(taken))]
            case "delete":
                yield [self._delete(self._rng.choice(taken))]
            case "move":
                yield self._move(self._rng.choice(taken), self._rng.choice(free))
            case "swap":
                one, other = self._rng.sample(taken, 2)
                for old, new in ((one, _SPARE), (other, one), (_SPARE, other)):
                    yield self._move(old, new)
            case "truncate":
                self.rows = {}
                yield [self._change("t", None)]

    def _insert(self, key: Key) -> Event:
        self.rows = {**self.rows, key: {column: self._value(column) for column in self._shape.columns}}
        return self._change("c", key, after=dict(self.rows[key]))

    def _update(self, key: Key) -> Event:
        old = self.rows[key]
        new, sent, unchanged = self._rewritten(old)
        self.rows = {**self.rows, key: new}
        return self._change("u", key, before=self._before(old), after=sent, unchanged=unchanged)

    def _delete(self, key: Key) -> Event:
        old = self.rows[key]
        self.rows = {other: row for other, row in self.rows.items() if other != key}
        return self._change("d", key, before=self._before(old))

    def _move(self, old_key: Key, new_key: Key) -> list[Event]:
        old = self.rows[old_key]
        deleted = self._delete(old_key)
        new, sent, unchanged = self._rewritten(old)
        self.rows = {**self.rows, new_key: new}
        created = self._change("c", new_key, before=self._before(old), after=sent, unchanged=unchanged)
        at = deleted.at._replace(ordinal=deleted.at.ordinal + 1)
        return [deleted, replace(created, at=at, moved_from=old_key)]

    def _rewritten(self, old: Image) -> tuple[Image, Image, frozenset[str]]:
        """A new row image, the part of it that is sent, and the names of the columns that are not."""
        new = {
            column: self._value(column) if self._rng.random() < 0.25 else value
            for column, value in old.items()
        }
        long_and_left_alone = (old["body"] or "").startswith("long") and new["body"] == old["body"]
        unchanged = frozenset({"body"} if long_and_left_alone else ())
        return new, {column: new[column] for column in new if column not in unchanged}, unchanged

    def _before(self, old: Image) -> Image | None:
        return dict(old) if self._sends_before else None

    def _value(self, column: str) -> str | None:
        """A value never seen before, so that no wrong one can pass for it."""
        self._last_value += 1
        if column == "note" and self._rng.random() < 0.5:
            return None
        kind = "long" if column == "body" and self._rng.random() < 0.8 else "short"
        return f"{kind} {column} {self._last_value}"

    def _change(
        self,
        op: str,
        key: Key | None,
        before: Image | None = None,
        after: Image | None = None,
        unchanged: frozenset[str] = frozenset(),
    ) -> Event:
        at = Position(self.epoch, self.lsn, 2 * self._index)
        return Event(at, op, self._shape.name, key, self._commit_ts, before, after, unchanged)


def simulate(
    rng: Random, *, exact: bool | None = None, shape: TableShape = SHAPE, keys: tuple[Key, ...] = KEYS
) -> History:
    """Draw a history: one epoch or two, each beginning with a snapshot of what is there already.

    ``exact`` asks for snapshots of one read that stands where it was taken; by default some are,
    and some take two reads, placed lower than they were taken. The more ``keys``, the longer.
    """
    source = Source(rng, shape, keys)
    exact = rng.random() < 0.4 if exact is None else exact
    for epoch in range(1, 2 + (rng.random() < 0.3)):
        source.epoch = epoch
        for _ in range(_several(rng, source, 3)):  # before the slot was there: nobody was looking
            source.transaction(logged=False)
        if epoch > 1 and rng.random() < 0.5:
            source.lsn = _FIRST_LSN  # another server: its log is at a lower place
        _capture(rng, source, exact)
    events = list(source.events)
    rng.shuffle(events)
    return History(events, dict(source.rows), exact, list(source.read(keys, source.lsn + 1)))


def _capture(rng: Random, source: Source, exact: bool) -> None:
    """Follow the stream from a new slot, with one snapshot or two while it runs, and some of ranges."""
    slot_start = source.lsn + 1
    for number in range(rng.randint(1, 2) + rng.randint(0, 2)):
        boundary = source.reserve()
        of, scope = source.keys, None
        if number and rng.random() < 0.6:
            first, last = sorted(rng.sample(range(len(source.keys)), 2))
            of, scope = source.keys[first : last + 1], (source.keys[first], source.keys[last])
        half = rng.randint(1, len(of) - 1)
        lows = []
        for keys in [of] if exact else [of[:half], of[half:]]:
            for _ in range(_several(rng, source, 3)):
                source.transaction()
            lows.append(source.lsn + 1 if exact else rng.randint(slot_start, source.lsn + 1))
            source.events += source.read(keys, lows[-1])
        source.events.append(source.boundary(min(lows), boundary, scope))
        for _ in range(_several(rng, source, 4)):
            source.transaction()


def _several(rng: Random, source: Source, most: int) -> int:
    """How many transactions: so many that some keys are taken often, however many there are."""
    return rng.randint(0, most * len(source.keys) // len(KEYS))


def soup(
    rng: Random,
    *,
    shape: TableShape = SHAPE,
    withheld: bool = True,
    whole_table: bool = True,
    moving: bool = False,
) -> list[Event]:
    """Events that no database would send, in any order: gaps, withheld ones, repeats, collisions.

    Updates of rows that are gone, creations that never came, columns that were never sent; with
    ``withheld`` some are quarantined, and some positions hold an accepted event as well as a withheld;
    with ``whole_table`` some are truncates and boundaries of the table, not of ranges of its keys alone; with
    ``moving`` most are key changes, and changes of their old keys.
    """
    events: list[Event] = []
    ops = ["c", "c", "u", "u", "u", "u", "d", "d", "r", "move", "move", "range"] + ["t", "b"] * whole_table
    if moving:
        ops = ["c", "u", "u", "move", "move", "d"]
    for value in range(rng.randint(2, 12)):
        at = Position(rng.choice((1, 1, 1, 2)), rng.randint(1, 6), 2 * rng.randint(0, 5))
        if at not in {event.at for event in events}:
            events += _soup_events(rng, rng.choice(ops), at, value, shape)
    if withheld:
        released = [replace(event, quarantined=True) for event in events if rng.random() < 0.1]
        quarantined = rng.random() < 0.5
        events = [replace(e, quarantined=quarantined and rng.random() < 0.3) for e in events] + released
    events += [event for event in events if rng.random() < 0.1]
    rng.shuffle(events)
    return events


def collided(rng: Random, events: list[Event]) -> list[Event]:
    """``events`` with some positions given to a second event of other content."""
    others = [
        replace(event, after={**event.after, "status": "another"})
        for event in events
        if event.after is not None and rng.random() < 0.2
    ]
    raw = events + others
    rng.shuffle(raw)
    return raw


def _soup_events(rng: Random, op: str, at: Position, value: int, shape: TableShape) -> list[Event]:
    def image() -> Image:
        chosen = [column for column in shape.columns if rng.random() < 0.6]
        return {c: None if rng.random() < 0.2 else f"{c} {value}" for c in chosen}

    # The commit time belongs to the transaction: changes of one share it, and the window with it.
    source_ts = _START + timedelta(minutes=at.epoch * 100 + at.commit_lsn * 7 % 4 * 60)
    plain = Event(at, op, shape.name, None, source_ts)
    if op in ("t", "b"):
        return [plain]
    if op == "range":
        first, last = sorted(rng.choices(KEYS[:3], k=2))
        return [replace(plain, op="b", scope=(first, last))]
    key = rng.choice(KEYS[:2])
    if op == "d":
        return [replace(plain, key=key)]
    if op != "move":
        return [_carrying(replace(plain, key=key), image(), shape)]
    new_key = rng.choice([other for other in KEYS[:3] if other != key])
    before = image() if rng.random() < 0.3 else None
    created = replace(plain, op="c", key=new_key, moved_from=key, at=at._replace(ordinal=at.ordinal + 1))
    return [
        replace(plain, op="d", key=key, before=before),
        _carrying(replace(created, before=before), image(), shape),
    ]


def _carrying(event: Event, image: Image, shape: TableShape) -> Event:
    return replace(event, after=image, unchanged=frozenset(shape.columns) - frozenset(image))


def _randoms() -> st.SearchStrategy[Random]:
    return st.randoms(use_true_random=False)


def histories() -> st.SearchStrategy[History]:
    """Histories of the simulated database, whose end is known."""
    return _randoms().map(simulate)


def soups(*, withheld: bool = True) -> st.SearchStrategy[list[Event]]:
    """Event soups; nobody knows what they should come to but the rules themselves."""
    return _randoms().map(lambda rng: soup(rng, withheld=withheld))
