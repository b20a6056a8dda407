"""What the pipeline must come to, by the simplest means: sort the events, walk them once.

Written from the specification's table of the fold alone: slow, sequential, one table, in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from omnisupport_ingest_tests.oracle.model import Cell, Event, Key, Position, Row, TableShape

_WITHHELD_OF_ONE_POSITION = "crudtb"
"""The order of withheld events that share a position: what begins a life first, what may end it last. So
the outcome of a collision does not depend on which of its events is looked at first."""

AT_ONE_POSITION = "tbdcru"
"""The order of events that share a position and differ in their identity."""


@dataclass(frozen=True)
class Layers:
    """Where every raw event goes; the three together are the raw events, each once."""

    accepted: list[Event]
    duplicates: list[Event]
    quarantined: list[Event]

    @property
    def folded(self) -> list[Event]:
        """What the fold sees: accepted events, and the quarantined ones as withheld events."""
        return self.accepted + self.quarantined


def layers(raw: Iterable[Event]) -> Layers:
    """Sort raw events (in landing order) by position into accepted, duplicates and quarantined.

    Duplicates are judged first: a copy of an event that landed before is dropped. What is left
    of one position is accepted if it is one event; several are a collision, and none is accepted.
    """
    distinct: dict[Position, list[Event]] = {}
    result = Layers([], [], [])
    for event in raw:
        landed_before = distinct.setdefault(event.at, [])
        if event.content in [other.content for other in landed_before]:
            result.duplicates.append(event)
        else:
            landed_before.append(event)
    for events in distinct.values():
        if len(events) > 1:
            result.quarantined.extend(replace(event, quarantined=True) for event in events)
        else:
            (result.quarantined if events[0].quarantined else result.accepted).extend(events)
    return result


def current_state(events: Iterable[Event], shape: TableShape) -> dict[Key, Row]:
    """Current state of every key of a table that any event named, deleted ones included.

    ``events``: accepted ones and withheld, in any order, repeats allowed, of any tables.
    """
    replay = _Replay(shape)
    for event in _in_order(event for event in events if event.table == shape.name):
        replay.take(event)
    return replay.rows


def live(state: dict[Key, Row]) -> dict[Key, Row]:
    """The rows of a state that are not deleted."""
    return {key: row for key, row in state.items() if not row.is_deleted}


def _in_order(events: Iterable[Event]) -> Iterator[Event]:
    """Each event once, by position; an accepted event voids the withheld ones at its position."""
    at: dict[tuple[Position, str], list[Event]] = {}
    for event in events:
        known = at.setdefault((event.at, event.identity or ""), [])
        if event not in known:
            known.append(event)
    for place in sorted(
        at, key=lambda each: (each[0], min(AT_ONE_POSITION.index(e.op) for e in at[each]), each[1])
    ):
        accepted = [event for event in at[place] if not event.quarantined]
        if accepted:
            assert len({event.content for event in accepted}) == 1, f"two accepted events at {place}"
            yield accepted[0]
        else:
            yield from sorted(at[place], key=lambda withheld: _WITHHELD_OF_ONE_POSITION.index(withheld.op))


class _Replay:
    """The table while the events go by; ``take`` is the specification's table, row by row."""

    def __init__(self, shape: TableShape) -> None:
        self.rows: dict[Key, Row] = {}
        self._shape = shape
        self._below_delete: dict[tuple[Key, Position], Row] = {}
        self._reads: dict[Key, Event] = {}

    def take(self, event: Event) -> None:
        if event.key is None:
            for key, row in self.rows.items():
                if event.reaches(key):
                    _end(row, event)
        elif event.op == "d":
            self._delete(event.key, event)
        elif event.op == "u":
            self._update(event.key, event)
        else:
            self._begin(event.key, event)

    def _begin(self, key: Key, event: Event) -> None:
        row = self.rows[key] = Row(self._shape, event.at)
        if event.quarantined:
            return
        row.cells.update(self._carried(event))
        if event.moved_from is not None:
            for column in row.unresolved:
                found = self._moved_along(column, event.moved_from, key, event)
                if found is not None:
                    row.cells[column], row.along[column] = found
        if event.op == "r":
            self._reads[key] = event

    def _update(self, key: Key, event: Event) -> None:
        row = self.rows.get(key)
        if row is None or row.ended:
            # Two events in quarantine above an end: the update may be of a row that the delete ended.
            doubtful = event.quarantined and row is not None and row.doubted_after_end
            row = self.rows[key] = Row(self._shape, event.at, existence_unresolved=doubtful)
        row.last = event.at
        for column in self._carried(event):
            row.along.pop(column, None)
        if event.quarantined:
            for column in self._carried(event):
                row.cells.pop(column, None)
        else:
            row.cells.update(self._carried(event))
            row.existence_unresolved = False

    def _delete(self, key: Key, event: Event) -> None:
        row = self.rows.setdefault(key, Row(self._shape, event.at))
        if not row.ended:
            below = replace(row, cells=dict(row.cells), along=dict(row.along))
            self._below_delete.setdefault((key, event.at), below)
        _end(row, event)

    def _carried(self, event: Event) -> dict[str, Cell]:
        # An unsent column may stand in the old image (replica identity full).
        return {column: Cell(text, event) for column, text in self._shape.carried(event).items()}

    def _moved_along(
        self, column: str, old_key: Key, key: Key, event: Event
    ) -> tuple[Cell, tuple[tuple[Key, Position], ...]] | None:
        """The value that a column not sent has after a key change and the lives it was taken from, or
        ``None``: not known.

        A snapshot row stands below transactions that its read may have seen. If it saw this one,
        the row it found under the old key is another, which came there later, and what it found
        under the new key is the row that moved.
        """
        if event.before is not None and column in event.before:
            return Cell(event.before[column], event), ()
        old_row = self._below_delete.get((old_key, event.at.below()))
        if old_row is None:
            # Its `d` was discarded: the row stands as it was just below.
            standing = self.rows.get(old_key)
            old_row = standing if standing is not None and not standing.ended else None
        cell = old_row.cells.get(column) if old_row else None
        if old_row is not None and cell is not None and not cell.decided_by.saw(event):
            return cell, ((old_key, event.at.below()), *old_row.along.get(column, ()))
        read = self._reads.get(key)
        if read is not None and read.saw(event):
            known = self._carried(read).get(column)
            return None if known is None else (known, ())
        return None


def _end(row: Row, event: Event) -> None:
    """End the life of a row; a withheld event leaves it, with nothing known. An ended life ends once."""
    if row.ended:
        row.doubted_after_end = event.quarantined
        return
    row.last = event.at
    if event.quarantined:
        row.cells.clear()
        row.existence_unresolved = True
    else:
        row.deleted_at = event.at
        row.existence_unresolved = False
